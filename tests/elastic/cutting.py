"""A link between two processes that seems to be broken: none is, and no root is needed."""

from typing import Any

from baguakit.elastic.carrying import Carrying
from baguakit.elastic.doors import SILENT, Knocks
from baguakit.monitor import PeerError


def cut_from(pid: int, membership: Any) -> None:
    """Let this process not reach one of its round any more: its door does not answer, and no round begins with it."""
    doors = {member.door for member in membership.round.members if f":{pid}:" in member.name}
    knock, fill = Knocks.knock, Carrying.fill

    def fails(carrying: Carrying) -> None:
        if any(member.door in doors for member in membership.round.members):
            raise PeerError(f"{pid} cannot be reached")
        fill(carrying)

    Knocks.knock = lambda knocks, door: SILENT if door in doors else knock(knocks, door)  # type: ignore[method-assign]
    Carrying.fill = fails  # type: ignore[method-assign]
    membership.broken(membership.round, f"{pid} cannot be reached")
