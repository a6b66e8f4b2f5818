"""Let optimizers step over a few flat tensors instead of thousands of small tensors."""

from .fusion import fuse, unfuse

__all__ = ["fuse", "unfuse"]
