"""The relative error of compression, measured in flights.

    ε = √( Σ ‖x − Q(x)‖² / Σ ‖x‖² )

Q(x) is x compressed and decompressed. The sums are over all x, such as gradients or differences of weights, that this
rank compressed in the latest flight of each bucket.

`measured` copies a stage: the compressor of the copy records the norms of inputs and errors. A stage that loses values
without a compressor (`LowRankMean`) is wrapped. Results and sent bytes stay the same. Measuring makes no flight wait.
"""

import copy
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from ..comm import Comm
from ..compressors import Compressor
from ..stages import Stage, State

Tally = list[tuple[Tensor, Tensor]]  # the norms of the tensors compressed in a flight, each with that of its error


def relative_error(tally: Tally) -> float:
    """Return ε, the relative error that the module defines; NaN if nothing was compressed. Waits for the device."""
    if not tally:
        return float("nan")
    given, lost = torch.stack([torch.stack(pair) for pair in tally]).square().sum(0).tolist()
    return float((lost / given) ** 0.5) if given else 0.0


def norm(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dtype=torch.float64)  # type: ignore[no-any-return]


def measured(stage: Stage, tally: Tally) -> Stage:
    """Return a copy of `stage` that gives the same results and adds the norms of inputs and errors to `tally`."""
    held = {f.name: getattr(stage, f.name) for f in fields(stage)}
    changed: dict[str, Any] = {k: _measured(each, tally) for k, each in held.items() if isinstance(each, Compressor)}
    if stage.lossy and not changed:
        return MeasuredStage(stage, tally)
    other = copy.copy(stage)
    vars(other).update(changed, **{name: measured(inner, tally) for name, inner in stage.nested().items()})
    return other


def _measured(compressor: Compressor, tally: Tally) -> Compressor:
    def compress(x: Tensor, residual: Tensor | None = None, key: int = 0) -> Tensor:
        lost = torch.empty(x.shape, dtype=torch.float32, device=x.device) if residual is None else residual
        packed = compressor._unchecked_compress(x, lost, key)
        tally.append((norm(x), norm(lost)))
        return packed

    other = copy.copy(compressor)
    # `reduce` compresses again. The error of this compression is not measured, as its values are of all ranks.
    kept = {"_unchecked_compress": compress, "_unchecked_reduce": compressor._unchecked_reduce}
    vars(other).update(compress=compress, **kept)
    return other


@dataclass(frozen=True, repr=False, eq=False)
class MeasuredStage(Stage):
    """A wrapper that measures the error of `inner`, a lossy stage without a compressor."""

    inner: Any
    tally: Tally

    def __call__(self, x: Tensor, state: State, comm: Comm, residual: Tensor | None = None) -> Tensor:
        lost = torch.empty_like(x, dtype=torch.float32) if residual is None else residual
        given = norm(x)  # the stage may overwrite it
        result: Tensor = self.inner(x, state, comm, residual=lost)
        self.tally.append((given, norm(lost)))
        return result
