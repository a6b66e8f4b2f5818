"""The base of topologies for one number of ranks."""

from abc import abstractmethod
from dataclasses import fields
from functools import cached_property
from hashlib import sha256
from typing import Any, ClassVar

from ...expressions import formerly
from ..base import Topology

_SHORT = 64  # a value with more entries prints a digest of them


class Given(Topology):
    """A topology for one number of ranks. It stores its hash: every step hashes it, and a large value takes long."""

    facts: ClassVar[tuple[str, ...]] = ("doubly_stochastic",)  # the constructor refuses everything else

    @property
    @abstractmethod
    def ranks(self) -> int:
        """Return the number of ranks that this topology is for."""

    def check(self, size: int) -> None:
        """Raise ValueError if the group has another number of ranks; a group of one rank is allowed."""
        super().check(size)
        if size not in (1, self.ranks):
            name = type(self).__name__
            raise ValueError(f"this {name} was given for {self.ranks} ranks and the group has {size}")

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, f.name) for f in fields(self)))

    def __hash__(self) -> int:
        return self._hash

    @staticmethod
    def _edges(edges: tuple[tuple[int, int], ...]) -> list[tuple[int, int]]:
        """Return the edges to print; for one rank, a loop, which has no effect."""
        return list(edges) if edges or formerly() else [(0, 0)]

    def _shown(self, entries: int, contents: Any, summary: str) -> str:
        if entries > _SHORT:
            contents = f"<{summary}, sha256 {sha256(repr(contents).encode()).hexdigest()[:12]}>"
        return f"{type(self).__name__}({contents})"
