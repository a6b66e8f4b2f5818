"""The inner group of a group of `bk.backend`, which compresses: `Comm` sends what it sends by the inner one."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from .nccl import nccl_backend

_inner: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()  # by outer group
_members: WeakKeyDictionary[Any, list[int]] = WeakKeyDictionary()  # by inner group


def stand_for(group: Any, inner: Any, members: Sequence[int]) -> None:
    """Let every `Comm` of `group` send by `inner`, a group of the same ranks: `members` of the default group."""
    _inner[group], _members[inner] = inner, list(members) or list(range(group.size()))


def inner_of(group: Any) -> Any:
    """Return the group by which a `Comm` of `group` sends: of a group of `bk.backend`, its inner group."""
    return _inner.get(group, group)


def add_nccl(group: Any, store: Any, name: str, timeout: timedelta, members: Sequence[int]) -> None:
    """Let a group over gloo send tensors on GPUs as well, by NCCL, which connects with its first message."""
    ranks = list(members) or list(range(group.size()))
    backend = nccl_backend(PrefixStore(f"baguakit/{name}", store), group.rank(), ranks, f"baguakit/{name}", timeout)
    backend._set_sequence_number_for_group()
    group._register_backend(torch.device("cuda"), dist.ProcessGroup.BackendType.NCCL, backend)


def members_of(group: Any) -> list[int]:
    """Return the ranks of the members in the default group; of a group made without one, its own ranks."""
    if group in _members:
        return _members[group]
    try:
        return dist.get_process_group_ranks(group)
    except KeyError:
        return list(range(group.size()))
