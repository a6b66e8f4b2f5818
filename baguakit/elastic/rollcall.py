"""The roll call of a round: the ranks tell each other who they are, since a rendezvous only numbers them.

Each writes its name; rank 0 reads all, and writes the list. So ranks that were told different numbers, or have died
meanwhile, are found before anything is built on the round, and all meet again.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .bells import ring_broken

POLL = 0.01  # seconds between two queries of the store


@dataclass(frozen=True)
class Member:
    """A member of a round.

    Attributes:
        name: host, process number and a random part.
        latest: the number of the latest round in which it had a whole state; 0: it has none.
        rank: in that round.
    """

    name: str
    latest: int
    rank: int


@dataclass(frozen=True)
class Round:
    """A round: a group of ranks that know each other.

    Attributes:
        number: greater than that of any round in which a member has been.
        store: a part of the key-value store that only this round uses.
        rank: of this process.
        members: by rank.
    """

    number: int
    store: Any
    rank: int
    members: tuple[Member, ...]

    @property
    def size(self) -> int:
        """Return the number of members."""
        return len(self.members)

    def survivors(self) -> list[int]:
        """Return the ranks that come from the latest round with a whole state; none if training begins."""
        latest = max(member.latest for member in self.members)
        return [rank for rank, member in enumerate(self.members) if latest and member.latest == latest]


def roll_call(store: Any, rank: int, size: int, least: int, me: Member, seconds: float) -> Round | None:
    """Return the round, or None if its ranks have not all confirmed it within so many seconds: then meet again.

    A rank may be told a size that leaves out others, who have just gone or come, and is below the `least`.
    """
    store.set(f"here/{rank}", json.dumps([size, asdict(me)]))
    if rank == 0:
        keys = [f"here/{r}" for r in range(size)]
        found = [json.loads(text) for text in store.multi_get(keys)] if waited(store, keys, seconds) else []
        agree = size >= least and bool(found) and all(told == size for told, _ in found)
        store.set("all", json.dumps([each for _, each in found] if agree else []))
    if waited(store, ["all"], 1.5 * seconds):
        members = tuple(Member(**each) for each in json.loads(store.get("all")))
        if len(members) == size and members[rank].name == me.name:
            return Round(1 + max(member.latest for member in members), store, rank, members)
    ring_broken(store, size, f"{me.name} has not been confirmed as rank {rank} of {size}")
    return None


def waited(store: Any, keys: Sequence[str], seconds: float) -> bool:
    """Wait until all keys are in the store; return False if they are not within so many seconds."""
    until = time.monotonic() + seconds
    while not store.check(list(keys)):
        if time.monotonic() > until:
            return False
        time.sleep(POLL)
    return True
