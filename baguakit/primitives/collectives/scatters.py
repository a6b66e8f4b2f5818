"""The sum over all ranks, a shard of it on each."""

import torch
from torch import Tensor

from ...arguments import shown, truth
from ...comm import Comm
from ...compressors import Compressor
from ..compressed import check_residual
from ..pieces import row_pieces
from ..transports import bytes_for, scattered
from .rows import codec_of, output, share_memory, values_in


@torch.no_grad()
def compressed_reduce_scatter(
    x: Tensor,
    compressor: Compressor | None,
    comm: Comm,
    residual: Tensor | None = None,
    average: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Return this rank's shard (k, …) of the sum of `x` (size · k, …) over all ranks, sending only compressed values.

        shard_r = Σ_q Q(shard r of x_q)     or, with `average`, (1/n) Σ_q of it

    Values are rounded once, and added in fp32 in the order of the ranks. Each rank sends (n − 1) c(N/n) bytes of its N
    values, in pieces: one is compressed while another is on the wire. Where packed shards would be more bytes than
    their values, `x` travels as it is, and is summed in its dtype.

    Args:
        x: a floating tensor, of one shape and dtype on all ranks. It is only read.
        compressor: such as `compressors.MinMaxUInt8()`; None sends values as they are.
        comm: the group. With one rank nothing is sent and nothing is lost.
        residual: fp32, as long as `x`; overwritten by what compression lost of this rank's contribution, x − Q(x), such
            that Σ_q residual_q = Σ_q x_q − the sum, up to the rounding of the sum.
        average: divide the sum by the number of ranks.
        out: a contiguous tensor of N/n values in the dtype of `x` to write to, instead of a new one; may be a part of
            `x`.

    Returns:
        `out`; a new tensor (k, …) in the dtype of `x` without it.

    Raises:
        TypeError: `x` is not floating, or is sparse; `compressor` keeps some places only.
        ValueError: `x` is not divisible among the ranks; `residual` is not contiguous, not fp32, or not as long as `x`;
            `out` does not fit.
    """
    values, n = values_in(x, compressor, comm), comm.size
    truth("average", average)
    if residual is not None:
        check_residual(residual, x)
    if not x.dim() or x.shape[0] % n:
        raise ValueError(f"x is (size · k, …), its first dimension a multiple of {n} ranks, not {shown(x)}; pad it")
    result, codec = output(out, x, (x.shape[0] // n, *x.shape[1:])), codec_of(x, compressor, comm)
    shard = result.detach().view(-1)
    if codec is None or compressor is None:
        if residual is not None:
            residual.zero_()
        if values.numel():
            shard.copy_(values if n == 1 else comm.reduce_scatter(values * (1 / n) if average else values))
        return result
    rows = values.view(n, -1)
    lost = None if residual is None else residual.detach().view(n, -1)
    parts = row_pieces(rows.shape[1], n, x.is_cuda)
    incoming = [bytes_for(n, part.stop - part.start, codec, x.device) for part in parts]
    apart = shard.dtype != torch.float32 or share_memory(shard, values)  # values are read while others are added
    total = (torch.empty_like(shard, dtype=torch.float32) if apart else shard).zero_()
    weights = torch.full((n,), 1 / n if average else 1.0, dtype=torch.float32, device=x.device)

    def packed(i: int, ranks: slice) -> Tensor:
        loss = None if lost is None else lost[ranks, parts[i]]
        return codec.compress(rows[ranks, parts[i]], loss, comm.key(i * n + (ranks.start or 0)))

    comm.settled()
    for i in scattered(comm, incoming, packed):
        compressor.add_(total[parts[i]], incoming[i], weights)
    if total is not shard:
        shard.copy_(total)
    return result
