"""The findings of `doctor`."""

from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """The weight of a finding: all is well; good to know; something will not run; the core cannot work."""

    GOOD = "ok"
    NOTE = "note"
    LACKS = "missing"
    BROKEN = "broken"


@dataclass(frozen=True)
class Finding:
    """A thing that was looked at.

    Attributes:
        what: the thing, in at most 13 characters.
        kind: its weight.
        found: what was found, in words.
        mend: the command, or the step, that mends it.
        loses: what will not run because of it, as a sentence without a full stop.
    """

    what: str
    kind: Kind
    found: str
    mend: str = ""
    loses: str = ""
