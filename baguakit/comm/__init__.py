"""A process group at a round: the only door to `torch.distributed`."""

from .comm import Comm, rotated
from .groups import check_device, store_of

__all__ = ["Comm", "check_device", "rotated", "store_of"]
