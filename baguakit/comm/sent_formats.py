"""The formats in which flights send values, and the bytes that they send."""

from typing import Any, NamedTuple

import torch

from .groups import INTER, INTRA

PLACES = {INTRA: ", within nodes", INTER: ", between nodes"}
Sent = dict[str, float]
"""Bytes by part of the network."""


class SentFormat(NamedTuple):
    """The format that was asked of a flight, and the one in which it sent values.

    A flight holds the objects themselves, and a report the same `in_words`: nothing is turned into text before it is
    printed.

    Attributes:
        asked: the format that was asked for: in a report an expression.
        flew: the one in which values were sent: in a report an expression, a dtype such as "float32", or "nothing".
        reason: why they differ; "" if they do not.
        part: of the network, "flat", "intra" or "inter".
    """

    asked: Any
    flew: Any
    reason: Any
    part: str

    def in_words(self) -> "SentFormat":
        """Return the same in words."""
        return SentFormat(_named(self.asked), _named(self.flew), str(self.reason), self.part)

    def line(self, flights: int, of: int) -> str:
        """Return the text that follows the name of a bucket of which so many flights flew so, once in words."""
        times = f" in {flights:,} of {of:,} flights" if flights < of else ""
        instead = f", not {self.asked}" if self.reason and self.asked != self.flew else ""
        return f"{PLACES.get(self.part, '')}: {self.flew}{times}{instead}" + f": {self.reason}" * bool(self.reason)


def _named(format: Any) -> str:
    if format is None:
        return "nothing"
    return str(format).removeprefix("torch.") if isinstance(format, torch.dtype) else repr(format)
