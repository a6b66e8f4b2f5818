"""The four exchanges, compressed or, without a compressor, over flows. Equal bits where ranks get equal values."""

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from ..comm import Comm
from ..compressors import Compressor
from ..primitives import compressed_all_gather, compressed_all_to_all, compressed_mean_, compressed_reduce_scatter

HALVES = (torch.float16, torch.bfloat16)


def all_reduce(x: Tensor, average: bool, compressor: Compressor | None, comm: Comm) -> None:
    """Compute x ← Σ_r Q(x_r), or the mean. The sum is n times a mean: in fp32, where halves would round it to 0."""
    y = x.float() if compressor is not None and x.dtype in HALVES else x.contiguous()
    if compressor is None:
        comm.all_reduce(y.view(-1))
        y.mul_(1 / comm.size if average else 1)
    else:
        compressed_mean_(y, compressor, comm).mul_(1 if average else comm.size)
    if y is not x:
        x.copy_(y)


def reduce_scatter(
    out: Tensor, x: Tensor | Sequence[Tensor], average: bool, compressor: Compressor | None, comm: Comm
) -> None:
    """Compute out ← Σ_r Q(this rank's part of x_r), or the mean; `x` has a part for each rank."""
    flat = x.reshape(-1) if isinstance(x, Tensor) else torch.cat([part.reshape(-1) for part in x])
    if compressor is None:
        out.copy_(comm.reduce_scatter(flat).mul_(1 / comm.size if average else 1).view(out.shape))
    elif lands_in(out, flat):
        compressed_reduce_scatter(flat, compressor, comm, average=average, out=out)
    else:
        out.copy_(compressed_reduce_scatter(flat, compressor, comm, average=average).view(out.shape))


def all_gather(out: Tensor | Sequence[Tensor], x: Tensor, compressor: Compressor | None, comm: Comm) -> None:
    """Compute out ← [Q(x_0); …; Q(x_{n−1})], one tensor or one for each rank."""
    flat, outs = x.reshape(-1), [out] if isinstance(out, Tensor) else out
    if compressor is not None and isinstance(out, Tensor) and lands_in(out, x):
        compressed_all_gather(flat, compressor, comm, out)
        return
    landed = comm.all_gather(flat) if compressor is None else compressed_all_gather(flat, compressor, comm)
    for each, values in zip(outs, landed.chunk(len(outs)), strict=True):
        each.copy_(values.view(each.shape))


def all_to_all(outs: Sequence[Tensor], ins: Sequence[Tensor], compressor: Compressor | None, comm: Comm) -> None:
    """Send `ins[r]` to rank r, and fill `outs[r]` with what it sends, compressed where that is fewer bytes."""
    flat = torch.cat([x.reshape(-1) for x in ins])
    there, here = ([x.numel() for x in rows] for rows in (outs, ins))
    if compressor is not None:
        landed = compressed_all_to_all(flat, compressor, comm, there, here)
    else:
        landed = flat.new_empty(sum(there))
        coming, leaving = (
            [x[i:j] for i, j in pairwise(accumulate(sizes, initial=0))] for x, sizes in ((landed, there), (flat, here))
        )
        coming[comm.rank].copy_(leaving[comm.rank])
        others = [r for r in range(comm.size) if r != comm.rank]
        outgoing, incoming = ({r: rows[r] for r in others if rows[r].numel()} for rows in (leaving, coming))
        comm.exchange_each(outgoing, incoming, flat.device)
    for out, values in zip(outs, landed.split(there), strict=True):
        out.copy_(values.view(out.shape))


def lands_in(out: Tensor, x: Tensor) -> bool:
    """Return whether what comes of `x` can be written to `out` as it arrives."""
    return out.is_contiguous() and out.dtype == x.dtype
