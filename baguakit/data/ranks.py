"""Which of how many ranks this process is, and what they can tell each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..arguments import whole
from ..comm import Comm


@dataclass(frozen=True)
class Ranks:
    """Rank `rank` of `size`; `comm` is what they talk through, None where they cannot or need not."""

    rank: int
    size: int
    comm: Comm | None = None
    known: bool = True  # False: numbered by hand inside a process group that numbers them otherwise

    @property
    def share(self) -> tuple[int, int]:
        """(which, of how many) can share out work: this rank's place in the group, (0, 1) without one."""
        return (0, 1) if self.comm is None else (self.rank, self.size)

    def gather(self, value: Any) -> list[Any]:
        """The `value` of every rank that shares, in rank order; collective where there is a group."""
        return [value] if self.comm is None else self.comm.gather_objects(value)


def resolve(num_replicas: int | None, rank: int | None, group: Any = None) -> Ranks:
    """Ranks as given, else those of `group`, else of the default process group, else one rank alone.

    Raises ValueError where `rank` is not one of `num_replicas`, or `group` is not one of this process's.
    """
    comm = _comm(group)
    here = (0, 1) if comm is None else (comm.rank, comm.size)
    mine = here[0] if rank is None else whole("rank", rank, 0)
    size = here[1] if num_replicas is None else whole("num_replicas", num_replicas, 1)
    if mine >= size:
        raise ValueError(f"there is no rank {mine} of {size} ranks; rank runs from 0 to num_replicas - 1")
    same = (mine, size) == here
    return Ranks(mine, size, comm if same and size > 1 else None, known=same or comm is None or comm.size == 1)


def _comm(group: Any) -> Comm | None:
    if isinstance(group, Comm):
        return group
    try:
        comm = Comm(group)
    except RuntimeError:  # torch.distributed is not initialised
        if group is None:
            return None
        raise ValueError(
            "group= needs torch.distributed.init_process_group first; without it leave group out"
        ) from None
    if not hasattr(comm.group, "rank"):
        raise ValueError("this process is no member of group=; build the sampler on its members only")
    return comm
