"""One bucket of one rule in a report."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

from ...comm import Note
from ..monitor import Collective
from ..runners.ways import Way, ways_in


@dataclass(frozen=True, eq=False)
class Row:
    """One bucket of one rule.

    Attributes:
        rule, number, bucket: the rule in words and its number in `att.rules`, and the number of the bucket.
        values, dtype: of the bucket, padding included.
        flights, landed: the number of flights launched, and landed.
        bytes: sent by this rank in all of them, by part of the network ("flat", "intra", "inter").
    """

    rule: str
    number: int
    bucket: int
    values: int
    dtype: str
    flights: int
    landed: int
    bytes: dict[str, float]
    _flights: tuple[Collective, ...] = field(repr=False)
    _kinds: tuple[tuple[tuple[Note, ...], int], ...] = field(repr=False, default=())

    @cached_property
    def ways(self) -> dict[Way, int]:
        """Return how many of the flights that have landed sent values in each way, those of the latest flight first.

        Empty for a stage of which no other format was asked than the dtype of the bucket.
        """
        return ways_in(self._kinds)

    @cached_property
    def latest(self) -> tuple[Way, ...]:
        """Return the ways in which the latest flight that has landed sent values."""
        return tuple(ways_in(self._kinds[:1]))

    @property
    def asked(self) -> str:
        """Return the format that was asked for in the latest flight, such as "MinMaxUInt8()"; "" if none was."""
        return _joined(way.asked for way in self.latest)

    @property
    def flew(self) -> str:
        """Return the format in which the latest flight sent values; "" if none was asked for.

        An expression such as "MinMaxUInt8()", a dtype such as "float32", or "nothing"; several are joined by " + ".
        """
        return _joined(way.flew for way in self.latest)

    @property
    def reason(self) -> str:
        """Return why the latest flight saved less than was asked for; "" if it did not."""
        return _joined((way.reason for way in self.latest if way.reason), "; ")

    @property
    def bytes_sent(self) -> float:
        """Return the bytes sent by this rank in all flights, over all parts of the network."""
        return sum(self.bytes.values())

    @cached_property
    def _seconds(self) -> tuple[float, float]:
        known = [flight.flight.seconds() for flight in self._flights if flight.flight.over()]
        air, exposed = (sum(each) / max(1, len(known)) for each in zip(*known, strict=True)) if known else (0.0, 0.0)
        return air, exposed

    @property
    def seconds(self) -> float:
        """Return the seconds of work on the lane: the mean over the latest flights that the device has finished."""
        return self._seconds[0]

    @property
    def exposed(self) -> float:
        """Return the seconds for which training waited for a flight, likewise."""
        return self._seconds[1]


def _joined(texts: Iterable[str], by: str = " + ") -> str:
    return by.join(dict.fromkeys(texts))
