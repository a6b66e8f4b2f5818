"""A process group at a round: the only door to `torch.distributed`."""

from .comm import Comm, check_comm
from .groups import PatientStore, check_device, next_name, rotated, store_of

__all__ = ["Comm", "PatientStore", "check_comm", "check_device", "next_name", "rotated", "store_of"]
