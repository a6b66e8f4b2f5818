"""Meetings: in the store, processes agree on who is in the next round. Every round has exactly one successor.

    came     who has come to the meeting, in order
    closed   the members of the round that came of it, by rank: written once, by compare-and-set
    over     the round is over
    broken   why, where that was not agreed on; told: there is this, or a plan of a pause (`pausing.py`)
    alive/r  member r has heard that it is over, and will come
    gone/r   member r will not come
    beat/r   a count that member r raises from time to time; waits/NAME, a process that has come

A meeting closes when the round before is over, and each of its members has come, will not come, or has not answered for
a moment. The first of those that have come closes it. Those that come too late come to the next one.

Why not torch's rendezvous of `torch.distributed.elastic`: its waiting ranks look once a second, and miss a round by
chance; signs of life of all ranks rewrite one value, and on a busy machine living ranks are taken for dead and never
again for alive; and one whose training hangs while its threads live keeps all others waiting.
"""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore

POLL = (0.02, 0.25)  # seconds between two looks into the store, at first and at most
SILENCE = 5.0  # seconds without a beat after which a member is gone, whatever it has said
ABSENCE = 2.0  # seconds without a look into the store after which one that has come is gone


@dataclass(frozen=True)
class Settings:
    """The settings of a group, equal on all ranks: see `join`."""

    host: str
    port: int
    name: str
    least: int
    most: int
    keep_alive: float
    last_call: float
    patience: float
    every: int

    @property
    def silence(self) -> float:
        """Return the seconds without a beat after which a member is gone."""
        return max(SILENCE, 5 * self.keep_alive)


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
        number: 1, 2, 3 …
        store: the part of the key-value store that only this round uses.
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


class Counts:
    """Counts in the store that others raise as long as they live."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[int, float]] = {}  # the latest value of each, and when it was seen first

    def rise(self, store: Any, key: str, now: float, seconds: float) -> bool:
        """Return whether a count has been raised within so many seconds, or has not been watched for as long."""
        count = store.add(key, 0)
        if key not in self._seen or self._seen[key][0] != count:
            self._seen[key] = (count, now)
        return now - self._seen[key][1] < seconds


class Meeting:
    """The meeting for round `number`, to which this process comes.

    Args:
        store: the part of the key-value store of this training.
        settings: of the group.
        me: this process.
        number: of the round.
    """

    def __init__(self, store: Any, settings: Settings, me: Member, number: int) -> None:
        self.store, self.settings, self.me, self.number = store, settings, me, number
        self.here = PrefixStore(str(number), store)
        self.last = PrefixStore(str(number - 1), store)
        self.before = members_of(self.last) if number > 1 else ()
        self._counts = Counts()
        self._over: float | None = None  # when the round before was seen to be over
        self._enough: float | None = None  # when the least had come
        here: Any = self.here
        here.append("came", json.dumps(asdict(me)) + "\n")

    def wait(self, look: Callable[[], None]) -> tuple[Member, ...]:
        """Wait until the meeting is closed, and return the members of the round; `look` may end that by an error."""
        pause, most = POLL
        while not self.here.check(["closed"]):
            look()
            now = time.monotonic()
            self.here.add(f"waits/{self.me.name}", 1)
            came = self._came()
            if next(member for member in came if self._waits(member, now)).name == self.me.name:
                present = [member for member in came if self._waits(member, now)]
                if self._all_here(present, now):
                    self._close(present)
            time.sleep(pause)
            pause = min(1.2 * pause, most)
        return members_of(self.here)

    def _came(self) -> list[Member]:
        lines = self.here.get("came").decode().splitlines()
        return list({member.name: member for member in (Member(**json.loads(line)) for line in lines)}.values())

    def _waits(self, member: Member, now: float) -> bool:
        return member.name == self.me.name or self._counts.rise(self.here, f"waits/{member.name}", now, ABSENCE)

    def _all_here(self, came: list[Member], now: float) -> bool:
        """Return whether nobody else is expected."""
        names = {member.name for member in came}
        if self.before:
            if not self.last.check(["over"]):
                if any(self._beats_on(r, now) for r in range(len(self.before))):
                    return False
                tell_broken(self.last, "all its ranks are gone")  # if they are only slow, they hear it and come
            self._over = self._over or now
            missing = [r for r, member in enumerate(self.before) if member.name not in names]
            # Without any of them training would begin anew.
            sure = len(missing) == len(self.before)
            if any(self._expected(r, now, sure) for r in missing):
                return False
        if len(came) < self.settings.least:
            return False
        self._enough = self._enough or now
        on = any(member.name in names for member in self.before)  # a training that goes on waits for nobody else
        return on or len(came) >= self.settings.most or now - self._enough >= self.settings.last_call

    def _expected(self, r: int, now: float, sure: bool) -> bool:
        """Return whether member r of the round before may still come."""
        if self.last.check([f"gone/{r}"]):
            return False
        if sure or self.last.check([f"alive/{r}"]):
            return self._beats_on(r, now)
        return self._over is not None and now - self._over < self.settings.keep_alive

    def _beats_on(self, r: int, now: float) -> bool:
        return self._counts.rise(self.last, f"beat/{r}", now, self.settings.silence)

    def _close(self, came: list[Member]) -> None:
        """Write the members, those of the round before first and in their order; somebody else may be faster."""
        old = {member.name: rank for rank, member in enumerate(self.before)}
        ordered = sorted(came, key=lambda member: old.get(member.name, len(old)))
        members = [asdict(member) for member in ordered[: self.settings.most]]
        self.here.compare_set("closed", "", json.dumps(members))
        self.store.set("round", str(self.number))


def members_of(store: Any) -> tuple[Member, ...]:
    """Return the members of a round that has been closed, from its part of the store."""
    return tuple(Member(**each) for each in json.loads(store.get("closed")))


def latest_round(store: Any, known: int) -> int:
    """Return the number of the latest round; 0 for none. `known` is one that is not later."""
    number = max(known, int(store.get("round")) if store.check(["round"]) else 0)
    while store.check([f"{number + 1}/closed"]):
        number += 1
    return number


def tell_broken(store: Any, why: str) -> None:
    """Tell all ranks of a round that it is over."""
    store.multi_set(["over", "broken", "told"], [why] * 3)


def delete_before(store: Any, number: int) -> Iterator[str]:
    """Delete what all rounds before one have left in the store, a key at a time, and yield each: it may take long."""
    for key in store.list_keys():
        if (round := key.partition("/")[0]).isdecimal() and int(round) < number:
            store.delete_key(key)
            yield key
