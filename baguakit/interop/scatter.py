"""The first half of a mean: each rank gets its own shard of it, and sends only what the others need.

s_r ← (1/n) Σ_q shard r of x_q                      Mean()
s_r ← (1/n) Σ_q Q(shard r of x_q)                   CompressedMean(Q): one loss, where an all-reduce has two
y ← x + e;  s_r ← one of these of y;  e ← y − Q(y)  ErrorFeedback(CompressedMean(Q))
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..comm import Comm
from ..keeping import finite, update_if_finite_
from ..primitives import compressed_reduce_scatter
from ..stages import CompressedMean, ErrorFeedback, Mean, Stage, State


def check_scatter(stage: Stage) -> None:
    """Raise a TypeError unless `stage` has a first half."""
    inner = stage.inner if isinstance(stage, ErrorFeedback) else stage
    if not isinstance(inner, Mean | CompressedMean):
        raise TypeError(
            f"a sharded model needs only its own shard of the mean, and {stage!r} has no half that makes one; use "
            "Mean(), CompressedMean() or ErrorFeedback(CompressedMean()), or shard within nodes and give "
            "comm=bk.Comm(mesh.get_group('inter')) for any stage between them"
        )


def scatter(stage: Stage, x: Tensor, state: State, comm: Comm) -> Tensor:
    """Return this rank's shard (n / size,) of the result of `stage` for `x` (n,), n being a multiple of the ranks."""
    if not isinstance(stage, ErrorFeedback):
        return _scatter(stage, x, comm, None)
    e = state["residual"]
    lost = torch.empty_like(e)
    shard = _scatter(stage.inner, x + e, comm, lost)
    # A shard that is not finite is known to one rank only, and all must keep what they had.
    is_finite = finite(shard).float()
    update_if_finite_(e, lost, where=comm.all_reduce(is_finite, dist.ReduceOp.MIN) > 0)
    return shard.to(x.dtype)


def _scatter(stage: Any, x: Tensor, comm: Comm, lost: Tensor | None) -> Tensor:
    if not isinstance(stage, Mean):
        return compressed_reduce_scatter(x, stage.compressor, comm, residual=lost, average=True)
    if lost is not None:
        lost.zero_()
    return comm.reduce_scatter(x.mul_(1 / comm.size))
