"""Process groups and the messages over them: the only module that calls `torch.distributed` for exchanges."""

from .comm import Comm, check_comm
from .groups import FLAT, INTER, INTRA, PatientStore, check_device, check_peer, lazy_group, next_name, rotated, store_of
from .nccl import error_in
from .notes import Note
from .own import abort_all

__all__ = [
    "FLAT",
    "INTER",
    "INTRA",
    "Comm",
    "Note",
    "PatientStore",
    "abort_all",
    "check_comm",
    "check_device",
    "check_peer",
    "error_in",
    "lazy_group",
    "next_name",
    "rotated",
    "store_of",
]
