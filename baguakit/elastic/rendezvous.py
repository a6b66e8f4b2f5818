"""The meeting that fixes the members of the next round, and the pause that ends a round for such a meeting.

**Meetings.** Processes agree on the members of the next round in these keys of a store:

    came        the processes that have come to the meeting, in order
    waits/NAME  a counter that process NAME increases from time to time after it has come
    closed      the members of the new round, by rank: written once, by compare-and-set
    cut         the reason why processes were left out of the new round
    over        the round is over
    broken      the reason why the round is over, if ranks did not agree on a pause
    told        `broken` or the plan of a pause has been written
    alive/r     member r has heard that the round ends, and will come to the next meeting
    gone/r      member r will not come
    beat/r      a counter that member r increases from time to time

A meeting closes when the previous round is over, and each member of that round has come, will not come, has a closed
door (`doors.py`), or has not answered in time. The process that came first closes the meeting. A process that comes
later waits for the next meeting. A new process does not come before it reaches the doors of all living old members.

If no step has been made within the patience, each member writes the names of members whose doors do not answer. Then
members are left out, one after another, until all remaining members reach each other.

`torch.distributed.elastic` is not used, because its rendezvous can leave out waiting ranks, treats slow ranks as dead
ranks, and waits for a rank whose training hangs, as long as other threads of that rank run.

**Pauses.** All ranks end the round after the same step `until`, so that no step is lost:

    until  =  1 + max_r at_r        rounded up to a multiple of `every`

The plan of the pause sets `every`. at_r is the number of steps that rank r has made when it hears of the pause. Rank r
writes at_r on a thread, even during a step. Before it ends its next step, it reads all at_r and computes `until`.
"""

import json
import re
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore

from .doors import GONE, SILENT, Knocks

PORT = 29400  # as of `torchrun`
ENDPOINT = re.compile(r"(?:\[(?P<v6>[0-9A-Fa-f:.]+(?:%\w+)?)\]|(?P<host>[\w.-]+))(?::(?P<port>[0-9]{1,5}))?")
SILENCE = 5.0  # seconds without a beat after which a member is gone, whatever it has said
POLL, SLOWEST_POLL = 0.02, 0.25  # seconds between two looks into the store, at first and at most
ABSENCE = 2.0  # seconds without a look into the store after which a process that has come counts as gone
SAID = 5.0  # seconds that the ranks have to tell their steps in a pause


@dataclass(frozen=True)
class Settings:
    """The settings of a group: see `join`."""

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
        """Return the seconds without a sign of life after which a member counts as lost."""
        return max(SILENCE, 5 * self.keep_alive)

    @property
    def agreed(self) -> str:
        """Return, as text, the settings that must be equal on all ranks."""
        return f"least={self.least}, most={self.most}, every={self.every}, keep_alive={self.keep_alive:g}"


def endpoint_of(endpoint: str, least: int = 1) -> tuple[str, int]:
    """Return the host and port (`least` to 65535) of "host:port", "[::1]:port" or "host"; else raise a ValueError."""
    found = ENDPOINT.fullmatch(endpoint)
    if found is None or not least <= int(found["port"] or PORT) <= 65535:
        raise ValueError(
            f'endpoint is "host:port" of the store, such as "10.0.0.1:{PORT}" or "[::1]:{PORT}", with a port from '
            f"{least} to 65535, not {endpoint!r}"
        )
    return found["v6"] or found["host"], int(found["port"] or PORT)


@dataclass(frozen=True)
class Member:
    name: str  # host, process number and a random part
    latest: int  # the number of the latest round in which it had a whole state; 0: it has none
    rank: int  # its rank in that round
    door: str = ""  # its address
    agreed: str = ""  # the settings that must be equal
    cut: list[str] | None = None  # the names of members that do not answer at their doors; None while it does not say


@dataclass(frozen=True)
class Round:
    """A round: a group whose members do not change."""

    number: int  # 1, 2, 3 …
    store: Any  # the part of the key-value store that only this round uses
    rank: int  # of this process
    members: tuple[Member, ...]  # by rank

    @property
    def size(self) -> int:
        return len(self.members)

    def survivors(self) -> list[int]:
        """Return the ranks whose complete state is from the latest round; [] if no rank has a complete state."""
        latest = max(member.latest for member in self.members)
        return [rank for rank, member in enumerate(self.members) if latest and member.latest == latest]


class Counts(dict[str, tuple[int, float]]):
    """The last values of counters in the store, and when they changed. A living process keeps raising its counter."""

    def rise(self, store: Any, key: str, now: float, seconds: float) -> bool:
        """Return True if counter `key` has risen in the last `seconds`, or has been watched for less than `seconds`."""
        if (count := store.add(key, 0)) != self.get(key, (None, now))[0]:
            self[key] = (count, now)
        return now - self[key][1] < seconds


class Rendezvous:
    """The meeting that begins round `number`, for this process. `store` holds the keys of this training only.

    `stuck()` returns whether no step has been made within the patience.
    """

    def __init__(
        self, store: Any, settings: Settings, me: Member, number: int, stuck: Callable[[], bool] = lambda: False
    ) -> None:
        self.store, self.settings, self.me, self.number, self.stuck = store, settings, me, number, stuck
        self.here: Any = PrefixStore(str(number), store)
        self.last: Any = PrefixStore(str(number - 1), store)
        self.before = members_of(self.last) if number > 1 else ()
        self.cut_off = ""  # the members that this process does not reach, so that it cannot come
        self.cut = ""  # the sentence about members that are left out
        self._places = {member.name: rank for rank, member in enumerate(self.before)}
        self._old = me.name in self._places
        self._counts, self._knocks = Counts(), Knocks()
        self._over: float | None = None  # when this process saw that the previous round was over
        self._enough: float | None = None  # when the least had come

    def wait(self, look: Callable[[], None]) -> tuple[Member, ...]:
        """Wait until the meeting is closed, or `look()` raises. Return the members, or raise if settings differ."""
        pause, has_come = POLL, False
        try:
            while not self.here.check(["closed"]):
                look()
                now = time.monotonic()
                if has_come:
                    self._look(now)
                elif has_come := self._may_come(now):
                    self._come(self.me)
                time.sleep(pause)
                pause = min(1.2 * pause, SLOWEST_POLL)
        finally:
            self._knocks.end()
        self.cut = self.here.get("cut").decode() if self.here.check(["cut"]) else ""
        return members_of(self.here)

    def _look(self, now: float) -> None:
        """Say that this process waits, and read who has come. If it came first and all have come, close the meeting."""
        self.here.add(f"waits/{self.me.name}", 1)
        said = [Member(**json.loads(line)) for line in self.here.get("came").splitlines()]
        came = list({member.name: member for member in said}.values())  # what each has said last
        first = next(member for member in came if self._waits(member, now))
        if not self._old:
            self._check_agreed(first)
        # If a rank has made no step within the patience, this rank first writes which members have SILENT doors.
        if self._old and self.me.cut is None and (self.stuck() or any(member.cut is not None for member in came)):
            others = [member for member in came if member.name != self.me.name]
            if (silent := silent_of(others, self._knocks)) is not None:
                self._come(replace(self.me, cut=silent))
        elif first.name == self.me.name:
            present = [each for each in came if each.agreed == self.me.agreed and self._waits(each, now)]
            kept, old = unbroken(present, self._places), [each for each in present if each.name in self._places]
            all_said = all(each.cut is not None for each in old) or all(each.cut is None for each in present)
            if self._all_here(present, kept, now) and all_said:
                self._close(kept, [member for member in present if member not in kept])

    def _may_come(self, now: float) -> bool:
        """Return whether this process was in the previous round, or reaches all living members of that round."""
        if self._old:
            return True
        beats = [member for r, member in enumerate(self.before) if self._beats_on(r, now)]
        for member in beats[:1]:
            self._check_agreed(member)
        silent = silent_of(beats, self._knocks)
        self.cut_off = ", ".join(silent or ())
        return silent == []

    def _come(self, me: Member) -> None:
        self.me = me
        self.here.append("came", json.dumps(asdict(me)) + "\n")

    def _check_agreed(self, other: Member) -> None:
        if other.agreed and other.agreed != self.me.agreed:
            raise ValueError(
                f"{self.me.name} joins with {self.me.agreed}, and {other.name} has joined with {other.agreed}: "
                "pass the same on all ranks"
            )

    def _waits(self, member: Member, now: float) -> bool:
        if member.name == self.me.name:
            return True
        waits = f"waits/{member.name}"
        return self._knocks.knock(member.door) != GONE and self._counts.rise(self.here, waits, now, ABSENCE)

    def _all_here(self, came: list[Member], kept: list[Member], now: float) -> bool:
        """Return True if no other process is expected, and `kept` has enough members."""
        names = {member.name for member in came}
        if self.before:
            if not self.last.check(["over"]):
                if any(self._beats_on(r, now) for r in range(len(self.before))):
                    return False
                tell_broken(self.last, "all its ranks are gone")  # ranks that are only slow hear of it, and come
            self._over = self._over or now
            missing = [r for name, r in self._places.items() if name not in names]
            sure = len(missing) == len(self.before)  # without any of them, training would begin from the start
            if any(self._expected(r, now, sure) for r in missing):
                return False
        if len(kept) < self.settings.least:
            return False
        self._enough = self._enough or now
        on = not names.isdisjoint(self._places)  # a running training does not wait for new processes
        return on or len(kept) >= self.settings.most or now - self._enough >= self.settings.last_call

    def _expected(self, r: int, now: float, sure: bool) -> bool:
        """Return whether member r of the previous round may still come."""
        if self.last.check([f"gone/{r}"]) or (not sure and self._knocks.knock(self.before[r].door) == GONE):
            return False
        if sure or self.last.check([f"alive/{r}"]):
            return self._beats_on(r, now)
        return self._over is not None and now - self._over < self.settings.keep_alive

    def _beats_on(self, r: int, now: float) -> bool:
        return self._counts.rise(self.last, f"beat/{r}", now, self.settings.silence)

    def _close(self, came: list[Member], out: list[Member]) -> None:
        """Write the new round's members: old members in their order, then new ones. Only the first write counts."""
        ordered = sorted(came, key=lambda member: self._places.get(member.name, len(self._places)))
        members = [asdict(replace(member, cut=None)) for member in ordered[: self.settings.most]]
        said = []
        for one in out:
            names = [each.name for each in came if each.name in (one.cut or ()) or one.name in (each.cut or ())]
            said.append(f"{one.name} is left out: it and {', '.join(names)} do not reach each other")
        if said:
            self.here.set("cut", " and ".join(said))
        self.here.compare_set("closed", "", json.dumps(members))
        self.store.set("round", str(self.number))


def unbroken(present: list[Member], places: Mapping[str, int]) -> list[Member]:
    """Remove the member in the most broken pairs until no pair is broken, and return the remaining members.

    In a broken pair, one member does not reach the other. In a tie, remove a new member, or else the highest old rank.
    """
    kept = list(present)
    while pairs := {frozenset((a.name, b.name)) for a in kept for b in kept if b.name in (a.cut or ())}:
        broken = {each.name: sum(each.name in pair for pair in pairs) for each in kept}
        kept.remove(max(kept, key=lambda each: (broken[each.name], places.get(each.name, len(places)))))
    return kept


def silent_of(members: Iterable[Member], knocks: Knocks) -> list[str] | None:
    """Return the names of the members whose doors are SILENT; None while the state of a door is not known."""
    states = {member.name: knocks.knock(member.door) if member.door else GONE for member in members}
    return None if "" in states.values() else [name for name, state in states.items() if state == SILENT]


def members_of(store: Any) -> tuple[Member, ...]:
    """Return the members of a round whose meeting is closed, from the round's part of the store."""
    return tuple(Member(**each) for each in json.loads(store.get("closed")))


def latest_round(store: Any, known: int) -> int:
    """Return the number of the latest round; 0 if there is none. `known` is the latest number known so far."""
    number = max(known, int(store.get("round")) if store.check(["round"]) else 0)
    while store.check([f"{number + 1}/closed"]):
        number += 1
    return number


def tell_broken(store: Any, why: str) -> None:
    """Tell all ranks of a round that it is over, and the reason `why`."""
    store.multi_set(["over", "broken", "told"], [why] * 3)


def delete_before(store: Any, number: int) -> None:
    """Delete the keys of rounds before `number`, unless the store fails."""
    with suppress(RuntimeError):
        for key in store.list_keys():
            if (round := key.partition("/")[0]).isdecimal() and int(round) < number:
                store.delete_key(key)


class Pause:
    """The pause of a round: all ranks end the round after the same step. Only the first plan of a pause counts.

    `step()` returns the number of steps of this rank; -1 if ranks do not wait for each other, and may stop at any step.
    """

    def __init__(self, round: Round, step: Callable[[], int]) -> None:
        self.round, self.step = round, step
        self.plan: dict[str, Any] = {}  # "every", and "why"; empty while there is none
        self._until: int | None = None

    def ask(self, every: int, why: str) -> None:
        """Ask all ranks to end the round after a step whose number is a multiple of `every`."""
        self.round.store.compare_set("plan", "", json.dumps({"every": every, "why": why}))
        self.round.store.set("told", "")

    def heard(self) -> None:
        """Read the plan of the pause, and write this rank's step to the store. Called on the thread of `_pulse`."""
        self.plan = json.loads(self.round.store.get("plan"))  # first, so that a step that ends now waits for all
        self.round.store.set(f"at/{self.round.rank}", str(self.step()))

    def due(self, step: int) -> bool:
        """Return True if the round ends after `step`. If a pause is planned, first wait for the steps of all ranks.

        If a rank does not write its step in time, return False: the rank is lost, so the next message to it fails.
        """
        if not self.plan:
            return False
        store, until = self.round.store, time.monotonic() + SAID
        keys = [f"at/{rank}" for rank in range(self.round.size)]
        while self._until is None:
            if store.check(keys):
                every, top = self.plan["every"], max(map(int, store.multi_get(keys)))
                self._until = (top // every + 1) * every
            elif time.monotonic() > until or store.check(["over"]):
                return False
            else:
                time.sleep(POLL)
        return step < 0 or step >= self._until
