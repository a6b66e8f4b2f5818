"""Notes of a flight: the format that was asked for, and the one in which values were sent."""

from typing import Any, NamedTuple


class Note(NamedTuple):
    """One decision of a flight, made by `Comm.note`. Nothing is turned into text before a report is printed.

    Attributes:
        asked: the format that was asked for, such as a compressor.
        flew: the one that was used: a compressor, a `torch.dtype`, or None if nothing was sent.
        reason: why they differ, or "".
        part: of the network, "flat", "intra" or "inter".
    """

    asked: Any
    flew: Any
    reason: Any
    part: str


Notes = list[Note]
Sent = dict[str, float]
"""Bytes by part of the network."""


def noted(asked: Any, flew: Any, reason: Any, part: str, size: int) -> Note:
    """Return the note of a decision in a group of so many ranks: one rank sends nothing."""
    return Note(asked, flew, reason, part) if size > 1 else Note(asked, None, "one rank", part)
