"""Find the rank at fault when a flight does not arrive, from the records of all ranks, and name it in a sentence.

Two ranks have diverged if the digests of their first k launches differ for some k, even if all messages arrived.
"""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from .records import GAVE_UP, LEFT, RAISED, Air, LaunchCount, Record, Waiting


def store_gone(rank: int, error: Exception) -> str:
    return (
        f"rank {rank} cannot reach the store any more: the process that holds it, rank 0 or torchrun, is gone "
        f"({first_line(error)})"
    )


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or the type of the error if the text is empty."""
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def store_silent(rank: int, silent: float, what: str, timeout: float) -> str:
    return (
        f"rank {rank} has had no answer from the store, which rank 0 or torchrun holds, for {silent:.1f} s, and "
        f"{what} has not arrived within the timeout of {timeout:g} s: "
        "the link between the two hosts is down, or that host stands still"
    )


@dataclass(eq=False)
class Judge:
    """Finds the rank at fault, for all ranks that wait.

    The silence of other ranks is measured by a special clock. It advances only when this rank looks at the records, and
    by a limited time per look. This rank may look rarely, because the store is slow or because the rank was stopped.
    Then other ranks must not seem dead: they may have written heartbeats meanwhile, or the slow store delayed them.
    """

    rank: int  # this one
    size: int
    timeout: float  # in seconds, for the sentences
    air: Air  # the launches of this rank
    most: float  # seconds by which the clock moves with a look
    now: float = 0.0  # the time of the clock
    seen: dict[int, tuple[int, float]] = field(default_factory=dict)  # heartbeat and its time, by rank
    _looked: float = field(default_factory=lambda: time.monotonic())

    def look(self) -> float:
        """Advance the clock, for one look at the records, and return its time."""
        before, self._looked = self._looked, time.monotonic()
        self.now += min(self.most, self._looked - before)
        return self.now

    def sentence(self, mine: Record, records: dict[int, Record]) -> str | None:
        """Return a sentence that names the rank at fault, "" if none can be named yet, or None if no rank waits.

        `mine` is the record of this rank; `records` has those of all others that have written one.
        """
        here = {self.rank: mine, **records}
        awaited = _awaited(here)
        return next(filter(None, self._found(here, awaited)), "") if awaited else None

    def _found(self, here: dict[int, Record], awaited: list[tuple[int, Waiting]]) -> Iterator[str]:
        for rank, waiting in awaited:
            yield from (_gone(r, record, rank, waiting) for r, record in here.items())
        others, late = {r: record for r, record in here.items() if r != self.rank}, [w for _, w in awaited if w.late]
        yield self.diverged(others, bool(late))
        yield from (self._dead(r, record, here, awaited) for r, record in others.items())
        yield from (self._late(waiting, here) for waiting in late)

    def diverged(self, records: Mapping[int, Record], sure: bool) -> str:
        """Return a sentence that names the ranks whose launches differ from the others'; "" if none is found.

        If more than half of all ranks agree, the other ranks are at fault. Without such a majority the sentence names
        both sides, but only if the caller is `sure` that no majority will form later, or if there are two ranks.
        """
        for lane in self.air.latest():
            here = {r: (record.on(lane), self.air.at(lane, record.on(lane).number)) for r, record in records.items()}
            known = {r: (theirs, ours) for r, (theirs, ours) in here.items() if ours is not None and theirs.number}
            others = [r for r, (theirs, ours) in known.items() if theirs.digest != ours.digest]
            if not others:
                continue
            first = min(known[r][0].number for r in others)  # an older record, which still agrees, says nothing
            agree = [r for r, (theirs, _) in known.items() if r not in others and theirs.number >= first]
            alike = sorted([self.rank, *agree])
            theirs, ours = known[others[0]]
            few, many = sorted(((others, theirs), (alike, ours)), key=lambda side: len(side[0]))
            if 2 * len(many[0]) <= self.size and not sure and self.size > 2:
                continue
            return _sentence(*few, *many, alone=len(few[0]) < len(many[0]))
        return ""

    def heard(self, r: int, beats: int, now: float) -> float:
        """Record that rank `r` has made `beats` heartbeats at time `now`; return when that number was first seen."""
        if self.seen.get(r, (-1, 0.0))[0] != beats:
            self.seen[r] = (beats, now)
        return self.seen[r][1]

    def silence(self, records: Mapping[int, Record]) -> float:
        """Return the longest time in seconds since a rank of `records` last wrote. Ranks that left do not count."""
        here = [(r, record.beats) for r, record in records.items() if not record.how]
        return max((self.now - self.heard(r, beats, self.now) for r, beats in here), default=0.0)

    def _dead(self, r: int, record: Record, here: dict[int, Record], awaited: list[tuple[int, Waiting]]) -> str:
        silent = self.now - self.heard(r, record.beats, self.now)
        if record.how or silent <= min((waiting.patience for _, waiting in awaited), default=silent):
            return ""
        for rank, waiting in _awaited({other: each for other, each in here.items() if other != r}):
            if silent > waiting.patience:
                return (
                    f"rank {r} is dead: no sign of it for {silent:.1f} s; its latest launch known is "
                    f"{record.on(waiting.lane).what}, and rank {rank} waits for it in {waiting.what}"
                )
        return ""

    def _late(self, waiting: Waiting, here: dict[int, Record]) -> str:
        if absent := set(range(self.size)) - set(here):
            return (
                f"rank {min(absent)} is late: it has not come to {waiting.what} within the timeout of "
                f"{self.timeout:g} s; its process is dead, or does something else"
            )
        if any(record.busy for record in here.values()):
            return ""  # that rank says so itself
        latest = {r: record.on(waiting.lane) for r, record in here.items()}
        r = min(latest, key=lambda r: latest[r].number)
        if latest[r].number < waiting.number:
            return (
                f"rank {r} is late: it has not launched {waiting.what} within the timeout of {self.timeout:g} s; "
                f"its latest launch known is {latest[r].what}"
            )
        if not waiting.number:  # a message, which two ranks launch
            return f"{waiting.what} has not arrived within the timeout of {self.timeout:g} s"
        return (
            f"all ranks have launched {waiting.what}, and it has not arrived within the timeout of {self.timeout:g} s"
        )


def _awaited(here: dict[int, Record]) -> list[tuple[int, Waiting]]:
    """Return [(rank, its flight)] for lanes on which ranks wait: the lane's latest late flight, else its latest flight.

    A flight's `patience` is the shortest of all ranks that wait on its lane. Lanes with a late flight come first.
    """
    waits = [(rank, record.waiting) for rank, record in here.items() if record.waiting is not None and not record.how]
    found = []
    for lane in dict.fromkeys(waiting.lane for _, waiting in waits):
        there = [(rank, waiting) for rank, waiting in waits if waiting.lane == lane]
        rank, latest = max(there, key=lambda each: (each[1].late, each[1].number))
        found.append((rank, latest._replace(patience=min(waiting.patience for _, waiting in there))))
    return sorted(found, key=lambda each: not each[1].late)


def _gone(r: int, record: Record, rank: int, waiting: Waiting) -> str:
    if record.how in ("", GAVE_UP):
        return record.why
    latest, waits = record.on(waiting.lane), f"rank {rank} waits for it in {waiting.what}"
    if record.how == RAISED:
        return f"rank {r} raised {record.why} after {latest.what}; {waits}"
    if record.how == LEFT and latest.number < waiting.number:
        return f"rank {r} has left after {latest.what}, and {waits}; give every rank the same number of steps"
    return ""


def differing(count: int, calls: Mapping[int, str]) -> str:
    """Return a sentence that names the ranks whose `count`-th call differs from the call of most ranks."""
    alike: dict[str, list[int]] = {}
    for rank, call in sorted(calls.items()):
        alike.setdefault(call, []).append(rank)
    many, few, *_ = sorted(alike, key=lambda call: (-len(alike[call]), alike[call]))
    a, b = LaunchCount(count, few), LaunchCount(count, many)
    return _sentence(alike[few], a, alike[many], b, alone=len(alike[few]) < len(alike[many]))


def _sentence(few: list[int], a: LaunchCount, many: list[int], b: LaunchCount, alone: bool) -> str:
    head = f"{_ranks(few)} and {_ranks(many)} have diverged"
    if alone:
        head = f"{_ranks(few)} {'has' if len(few) == 1 else 'have'} diverged from {_ranks(many)}"
    late = ", in another step or after other launches" if a.what == b.what else ""
    return (
        f"{head}: as launch {a.number}, {_ranks(few)} made {a.what}, and {_ranks(many)} {b.what}{late}; "
        "all ranks must make the same calls, backward passes and steps in the same order, from the same state"
    )


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (" …" if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
