"""The loss of compression, measured in the flights themselves.

    ε = √( Σ ‖x − Q(x)‖² / Σ ‖x‖² )

over all x that this rank compressed in the latest flight of each bucket: gradients, differences of weights, or what
else the stage compresses. What a stage loses that compresses without a compressor (`LowRankMean`) is what it declares.

The stage flies as it is, with a compressor that keeps the norms of what passes through it: the bytes on the wire and
the results stay the same. The norms are tensors, and nobody waits for them until they are read.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from ...comm import Comm
from ...compressors import Compressor
from ...stages import Stage, State


@dataclass(eq=False)
class Tally:
    """The norms of what was compressed in one flight, and of what that lost."""

    given: list[Tensor] = field(default_factory=list)
    lost: list[Tensor] = field(default_factory=list)

    def note(self, given: Tensor, lost: Tensor) -> None:
        """One more compression: its norms, 0-dimensional."""
        self.given.append(given)
        self.lost.append(lost)


@dataclass(eq=False)
class Losses:
    """The loss of a rule's compression, flight by flight."""

    air: dict[int, Tally] = field(default_factory=dict)  # by bucket
    done: dict[int, Tally] = field(default_factory=dict)

    def watched(self, bucket: int, stage: Stage) -> Stage:
        """`stage` for one flight of a bucket, whose losses will be known when it has landed."""
        tally = self.air[bucket] = Tally()
        return watched(stage, tally)

    def landed(self, bucket: int) -> None:
        """The flight of a bucket has landed."""
        if bucket in self.air:
            self.done[bucket] = self.air.pop(bucket)

    def error(self) -> float:
        """ε over the latest flight of each bucket; NaN where nothing was compressed. Waits for the device."""
        pairs = [pair for tally in self.done.values() for pair in zip(tally.given, tally.lost, strict=True)]
        if not pairs:
            return float("nan")
        given, lost = torch.stack([torch.stack(pair) for pair in pairs]).square().sum(0).tolist()
        return float((lost / given) ** 0.5) if given else 0.0


def norm(x: Tensor) -> Tensor:
    """‖x‖, in fp64."""
    norm: Tensor = torch.linalg.vector_norm(x, dtype=torch.float64)
    return norm


def watched(stage: Stage, tally: Tally) -> Stage:
    """A copy of `stage` that does the same and tells `tally`."""
    held = {f.name: getattr(stage, f.name) for f in fields(stage)}
    compressors = {name: Watched(value, tally) for name, value in held.items() if isinstance(value, Compressor)}
    if stage.lossy and not compressors:
        return WatchedStage(stage, tally)
    twin = copy.copy(stage)
    for name, inner in stage.nested().items():
        object.__setattr__(twin, name, watched(inner, tally))
    for name, compressor in compressors.items():
        object.__setattr__(twin, name, compressor)
    return twin


class Watched(Compressor):
    """A compressor that tells what it loses."""

    def __init__(self, inner: Compressor, tally: Tally) -> None:
        self.inner, self.tally = inner, tally

    @property
    def dense(self) -> bool:  # type: ignore[override]
        return self.inner.dense

    def row_bytes(self, n: int) -> int:
        return self.inner.row_bytes(n)

    def compress(self, x: Tensor, residual: Tensor | None = None, key: int = 0) -> Tensor:
        lost = torch.empty(x.shape, dtype=torch.float32, device=x.device) if residual is None else residual
        packed = self.inner.compress(x, lost, key)
        self.tally.note(norm(x), norm(lost))
        return packed

    def decompress(
        self, packed: Tensor, n: int, dtype: torch.dtype = torch.float32, out: Tensor | None = None
    ) -> Tensor:
        return self.inner.decompress(packed, n, dtype, out)

    def add_(self, out: Tensor, packed: Tensor, weights: Sequence[float] | Tensor) -> Tensor:
        return self.inner.add_(out, packed, weights)

    def reduce(self, packed: Tensor, n: int, residual: Tensor | None = None, key: int = 0) -> Tensor:
        return self.inner.reduce(packed, n, residual, key)

    def __repr__(self) -> str:
        return repr(self.inner)


@dataclass(frozen=True, repr=False, eq=False)
class WatchedStage(Stage):
    """A lossy stage without a compressor that tells what it loses."""

    inner: Any
    tally: Tally

    def __call__(self, x: Tensor, state: State, comm: Comm, residual: Tensor | None = None) -> Tensor:
        lost = torch.empty_like(x, dtype=torch.float32) if residual is None else residual
        given = norm(x)
        result: Tensor = self.inner(x, state, comm, residual=lost)
        self.tally.note(given, norm(lost))
        return result
