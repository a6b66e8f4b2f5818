"""The ways in which a bucket has flown: the formats that were asked for, and those in which values were sent."""

from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from ..comm import INTER, INTRA, Note

MOST = 64  # kinds of flights that are told apart in a bucket
PLACES = {INTRA: ", within nodes", INTER: ", between nodes"}


class Ways:
    """The notes of the flights of a bucket that have landed.

    Attributes:
        kinds: the notes of a flight, and how many flights had the same; that of the latest flight first.
    """

    def __init__(self) -> None:
        self.kinds: list[tuple[tuple[Note, ...], int]] = []

    def add(self, notes: Iterable[Note]) -> None:
        """Add a flight that has landed."""
        kind, flights = tuple(notes), 1
        for i, (known, count) in enumerate(self.kinds):
            if known == kind:
                kind, flights = known, flights + count
                del self.kinds[i]
                break
        self.kinds.insert(0, (kind, flights))
        del self.kinds[MOST:]


class Way(NamedTuple):
    """A note in words.

    Attributes:
        asked: the format that was asked for, as an expression.
        flew: the one in which values were sent: an expression, a dtype such as "float32", or "nothing".
        reason: why they differ; "" if they do not.
        part: of the network, "flat", "intra" or "inter".
    """

    asked: str
    flew: str
    reason: str
    part: str

    def line(self, flights: int, of: int) -> str:
        """Return what follows the name of a bucket of which so many flights flew so."""
        times = f" in {flights:,} of {of:,} flights" if flights < of else ""
        instead = f", not {self.asked}" if self.reason and self.asked != self.flew else ""
        return f"{PLACES.get(self.part, '')}: {self.flew}{times}{instead}" + f": {self.reason}" * bool(self.reason)


def way_of(note: Note) -> Way:
    """Return a note in words."""
    return Way(in_words(note.asked), in_words(note.flew), str(note.reason), note.part)


def in_words(format: Any) -> str:
    """Return a format in words."""
    if format is None:
        return "nothing"
    return str(format).removeprefix("torch.") if isinstance(format, torch.dtype) else repr(format)


def ways_in(kinds: Iterable[tuple[tuple[Note, ...], int]]) -> dict[Way, int]:
    """Return how many flights flew in each way, of the kinds that `Ways` keeps and in their order."""
    flights: Counter[Way] = Counter()
    for notes, count in kinds:
        for way in dict.fromkeys(map(way_of, notes)):
            flights[way] += count
    return dict(flights)


def numbered(buckets: list[int]) -> str:
    """Return the numbers of buckets in rising order as text, such as "buckets 0-3, 7"."""
    runs: list[list[int]] = []
    for bucket in buckets:
        if runs and bucket == runs[-1][-1] + 1:
            runs[-1][1:] = [bucket]
        else:
            runs.append([bucket])
    return f"bucket{'s' * (len(buckets) > 1)} " + ", ".join("-".join(map(str, run)) for run in runs)
