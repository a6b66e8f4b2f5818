"""Process groups and the messages over them: the only module that calls `torch.distributed` for exchanges."""

from .comm import LENGTHS, TAGS, Comm, check_comm
from .groups import (
    HOSTS,
    PatientStore,
    add_nccl,
    check_device,
    host,
    lazy,
    lazy_group,
    members_of,
    next_name,
    own_group,
    ranks_by_host,
    stand_for,
    store_of,
)
from .nccl import error_in
from .own import abort_all, let_go, longer, set_timeout, timeout_of
from .sending import FLAT, INTER, INTRA, SENT, Rider, SentFormat, check_peer

__all__ = [
    "FLAT",
    "HOSTS",
    "INTER",
    "INTRA",
    "LENGTHS",
    "SENT",
    "TAGS",
    "Comm",
    "PatientStore",
    "Rider",
    "SentFormat",
    "abort_all",
    "add_nccl",
    "check_comm",
    "check_device",
    "check_peer",
    "error_in",
    "host",
    "lazy",
    "lazy_group",
    "let_go",
    "longer",
    "members_of",
    "next_name",
    "own_group",
    "ranks_by_host",
    "set_timeout",
    "stand_for",
    "store_of",
    "timeout_of",
]
