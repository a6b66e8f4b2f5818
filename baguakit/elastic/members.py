"""A group whose ranks come and go: its settings, and the members of a round."""

from dataclasses import dataclass
from typing import Any

SILENCE = 5.0  # seconds without a beat after which a member is gone, whatever it has said


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
        """Return the seconds without a beat after which a member is gone."""
        return max(SILENCE, 5 * self.keep_alive)

    @property
    def agreed(self) -> str:
        """Return those settings that must be equal on all ranks."""
        return f"least={self.least}, most={self.most}, every={self.every}, keep_alive={self.keep_alive:g}"


@dataclass(frozen=True)
class Member:
    """A member of a round.

    Attributes:
        name: host, process number and a random part.
        latest: the number of the latest round in which it had a whole state; 0: it has none.
        rank: in that round.
        door: its address.
        agreed: the settings that must be equal.
        cut: the names of members that do not answer at their doors; None while it does not say.
    """

    name: str
    latest: int
    rank: int
    door: str = ""
    agreed: str = ""
    cut: list[str] | None = None


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
