"""Let optimizers step over a few flat tensors instead of thousands of small tensors."""

from .fusion import Report, fuse, report, unfuse

__all__ = ["Report", "fuse", "report", "unfuse"]
