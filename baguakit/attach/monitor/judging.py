"""The rank at fault when a flight does not arrive: a sentence, from the records of all ranks."""

import time
from dataclasses import dataclass, field

from .records import GAVE_UP, LEFT, RAISED, History, Record, parted


def store_gone(rank: int, error: Exception) -> str:
    """Return the sentence about a store to which the connection has broken."""
    return (
        f"rank {rank} cannot reach the store any more: the process that holds it, rank 0 or torchrun, is gone "
        f"({first_line(error)})"
    )


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or its type if it has none."""
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def store_silent(rank: int, silent: float, what: str, timeout: float) -> str:
    """Return the sentence about a store that does not answer."""
    return (
        f"rank {rank} has had no answer from the store, which rank 0 or torchrun holds, for {silent:.1f} s, and "
        f"{what} has not arrived within {timeout:g} s: the link between the two hosts is down, or that host stands "
        "still"
    )


@dataclass(frozen=True)
class Waiting:
    """The flight that a rank waits for.

    Attributes:
        what: its label.
        lane, count: its lane, and its number among the launches there.
        late: the timeout is over.
        patience: seconds without a heartbeat after which a rank is dead.
    """

    what: str
    lane: int
    count: int
    late: bool
    patience: float


@dataclass(eq=False)
class Judge:
    """Names the rank at fault.

    Args:
        rank: this rank.
        timeout: in seconds, for the sentences.
        history: the launches of this rank.
    """

    rank: int
    timeout: float
    history: History
    seen: dict[int, tuple[int, float]] = field(default_factory=dict)  # heartbeat and its time, by rank

    def sentence(self, waiting: Waiting, records: dict[int, Record | None]) -> str:
        """Return a sentence that names the rank at fault, or "" if none can be named yet.

        Args:
            waiting: the flight that this rank waits for.
            records: of all other ranks; None for a rank that has not written one.
        """
        here = {r: record for r, record in records.items() if record is not None}
        for r, record in here.items():
            if said := self._gone(r, record, waiting):
                return said
        if said := parted(self.rank, 1 + len(records), self.history, here, waiting.late):
            return said
        for r, record in here.items():
            if said := self._dead(r, record, waiting):
                return said
        return self._late(waiting, here, set(records) - set(here)) if waiting.late else ""

    def _gone(self, r: int, record: Record, waiting: Waiting) -> str:
        latest = record.on(waiting.lane)
        waits = f"rank {self.rank} waits for it in {waiting.what}"
        if record.how == GAVE_UP:
            return record.why
        if record.how == RAISED:
            return f"rank {r} raised {record.why} after {latest.what}; {waits}"
        if record.how == LEFT and latest.count < waiting.count:
            return f"rank {r} has left after {latest.what}, and {waits}; give every rank the same number of steps"
        return ""

    def _dead(self, r: int, record: Record, waiting: Waiting) -> str:
        now = time.monotonic()
        if self.seen.get(r, (0, now))[0] != record.beats:
            self.seen[r] = (record.beats, now)
        elif not record.how and (silent := now - self.seen[r][1]) > waiting.patience:
            return (
                f"rank {r} is dead: no sign of it for {silent:.1f} s; its latest launch known is "
                f"{record.on(waiting.lane).what}, and rank {self.rank} waits for it in {waiting.what}"
            )
        return ""

    def _late(self, waiting: Waiting, here: dict[int, Record], absent: set[int]) -> str:
        if absent:
            return (
                f"rank {min(absent)} is late: it has not come to {waiting.what} within {self.timeout:g} s; "
                "its process is dead, or does something else"
            )
        if any(record.busy for record in here.values()):
            return ""  # that rank says so itself
        latest = {r: record.on(waiting.lane) for r, record in here.items()}
        r = min(latest, key=lambda r: latest[r].count)
        if latest[r].count < waiting.count:
            return (
                f"rank {r} is late: it has not launched {waiting.what} within {self.timeout:g} s; "
                f"its latest launch known is {latest[r].what}"
            )
        return f"all ranks have launched {waiting.what}, and it has not arrived within {self.timeout:g} s"
