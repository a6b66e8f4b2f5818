"""The rank of this process, the number of ranks, and how they communicate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...arguments import integer
from ...comm import Comm


@dataclass(frozen=True)
class Membership:
    """The place of this process among the ranks of a sampler.

    Attributes:
        rank, size: the rank of this process and the number of ranks.
        comm: the group that they communicate in; None if there is no group, or one rank only.
        known: False if the caller set `rank` and `size` to other values than the process group has.
    """

    rank: int
    size: int
    comm: Comm | None = None
    known: bool = True

    @property
    def share(self) -> tuple[int, int]:
        """(rank, size) in the group that divides work; (0, 1) without a group."""
        return (0, 1) if self.comm is None else (self.rank, self.size)

    def gather(self, value: Any) -> list[Any]:
        """Return the `value` of every rank that shares the work. Collective if there is a group."""
        return [value] if self.comm is None else self.comm.gather_objects(value)


def membership(num_replicas: int | None, rank: int | None, group: Any = None) -> Membership:
    """Return the given rank and number of ranks; by default those of `group`, of the default group, or one rank.

    Raises:
        TypeError: `group` is neither a `Comm` nor a process group of which this process is a member.
        ValueError: `rank` is not less than `num_replicas`.
    """
    comm = _comm(group)
    here = (0, 1) if comm is None else (comm.rank, comm.size)
    mine = here[0] if rank is None else integer("rank", rank, 0)
    size = here[1] if num_replicas is None else integer("num_replicas", num_replicas, 1)
    if mine >= size:
        raise ValueError(f"there is no rank {mine} of {size} ranks; rank runs from 0 to num_replicas - 1")
    same = (mine, size) == here
    alone = comm is None or (comm.size == 1 and comm.membership is None)
    return Membership(mine, size, comm if same and not alone else None, known=same or alone)


def _comm(group: Any) -> Comm | None:
    if isinstance(group, Comm):
        return group
    try:
        return Comm(group)
    except RuntimeError:  # torch.distributed is not initialised
        return None
