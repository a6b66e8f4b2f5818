"""The four exchanges, compressed or, without a compressor, over flows. Equal bits where ranks get equal values."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..comm import Comm
from ..compressors import Compressor
from ..primitives import compressed_all_gather, compressed_all_to_all, compressed_mean_, compressed_reduce_scatter


def all_reduce(x: Tensor, average: bool, compressor: Compressor | None, comm: Comm) -> None:
    """Compute x ← Σ_r Q(x_r), or the mean. The sum is n times a mean: in fp32, where halves would round it to 0."""
    y = x.float() if compressor is not None and x.itemsize < 4 else x.contiguous()
    if compressor is None:
        comm.all_reduce(y.view(-1))
        y.mul_(1 / comm.size if average else 1)
    else:
        compressed_mean_(y, compressor, comm).mul_(1 if average else comm.size)
    x.copy_(y)  # nothing, if it is x


def reduce_scatter(
    out: Tensor, x: Tensor | Sequence[Tensor], average: bool, compressor: Compressor | None, comm: Comm
) -> None:
    """Compute out ← Σ_r Q(this rank's part of x_r), or the mean; `x` has a part for each rank."""
    flat = x.reshape(-1) if isinstance(x, Tensor) else torch.cat([part.reshape(-1) for part in x])
    landed = compressed_reduce_scatter(flat, compressor, comm, average=average, out=room(out, flat))
    spread(landed, [out])


def all_gather(out: Tensor | Sequence[Tensor], x: Tensor, compressor: Compressor | None, comm: Comm) -> None:
    """Compute out ← [Q(x_0); …; Q(x_{n−1})], one tensor or one for each rank."""
    landed = compressed_all_gather(x.reshape(-1), compressor, comm, room(out, x))
    spread(landed, [out] if isinstance(out, Tensor) else out)


def all_to_all(outs: Sequence[Tensor], ins: Sequence[Tensor], compressor: Compressor | None, comm: Comm) -> None:
    """Send `ins[r]` to rank r, and fill `outs[r]` with what it sends, compressed where that is fewer bytes."""
    there, here = ([x.numel() for x in parts] for parts in (outs, ins))
    spread(compressed_all_to_all(torch.cat([x.reshape(-1) for x in ins]), compressor, comm, there, here), outs)


def room(out: Tensor | Sequence[Tensor], x: Tensor) -> Tensor | None:
    """Return `out` if what comes of `x` can be written to it as it arrives, else None."""
    return out if isinstance(out, Tensor) and out.is_contiguous() and out.dtype == x.dtype else None


def spread(landed: Tensor, outs: Sequence[Tensor]) -> None:
    """Copy what has arrived to `outs`, one after another, unless it has been written there."""
    for out, values in zip(outs, landed.view(-1).split([out.numel() for out in outs]), strict=True):
        if out.data_ptr() != values.data_ptr():
            out.copy_(values.view(out.shape))
