"""Values from one rank to another: between the stages of a pipeline."""

import torch
from torch import Tensor

from ...comm import Comm, check_comm, check_peer
from ...compressors import Compressor
from ...compressors.base import check_dense, check_dtype
from ..compressed import compresses
from ..flat import check_averageable
from ..pieces import row_pieces
from .rows import bytes_for, values_in


@torch.no_grad()
def compressed_send(x: Tensor, compressor: Compressor, comm: Comm, peer: int) -> None:
    """Send `x` to `peer`, compressed: c(N) bytes of N values. Wait until it has been sent.

    The peer calls `compressed_receive_` with a tensor of as many values in the same dtype, and the same compressor.
    Where c(N) would be more than N values are, `x` travels as it is.

    Args:
        x: a floating tensor of any shape. It is only read.
        compressor: such as `compressors.MinMaxUInt8()`.
        comm: the group.
        peer: another rank of it.

    Raises:
        TypeError: `x` is not floating, or is sparse; `compressor` keeps some places only.
        ValueError: `peer` is not another rank of the group.
    """
    values, codec = values_in(x, compressor, comm), compressor._unchecked(x)
    check_peer(peer, comm.group)
    if not compresses(values.numel(), x.dtype, compressor, codec, comm, rows=1):
        works = [comm.send_later(values, peer)] if values.numel() else []
    else:
        works = []
        for i, part in enumerate(row_pieces(values.numel(), 1, x.is_cuda)):
            works.append(comm.send_later(codec.compress(values[part].view(1, -1), None, comm.key(i)), peer, i))
    for work in works:
        work.wait()


@torch.no_grad()
def compressed_receive_(x: Tensor, compressor: Compressor, comm: Comm, peer: int) -> Tensor:
    """Overwrite `x` with what `peer` sends by `compressed_send`, rounded:  x ← Q(x_peer).

    Args:
        x: a floating tensor of as many values and of the same dtype as the one that is sent; overwritten.
        compressor: the one that the peer sends with.
        comm: the group.
        peer: another rank of it.

    Returns:
        `x`.

    Raises:
        TypeError: `x` is not floating, or is sparse; `compressor` keeps some places only.
        ValueError: `peer` is not another rank of the group.
    """
    check_comm(comm)
    check_dense("compressor", compressor)
    check_averageable(x)
    check_dtype("x", x.dtype)
    check_peer(peer, comm.group)
    codec, N = compressor._unchecked(x), x.numel()
    values = x.detach().view(-1) if x.is_contiguous() else x.new_empty(N)
    if not compresses(N, x.dtype, compressor, codec, comm, rows=1):
        if N:
            comm.receive_later(values, peer).wait()
    else:
        parts = [values[part].view(1, -1) for part in row_pieces(N, 1, x.is_cuda)]
        packed = [bytes_for(1, part.numel(), codec, x.device) for part in parts]
        works = [comm.receive_later(each, peer, i) for i, each in enumerate(packed)]
        for part, each, work in zip(parts, packed, works, strict=True):
            work.wait()
            codec.decompress(each, part.numel(), x.dtype, part)
    if not x.is_contiguous():
        x.detach().copy_(values.view(x.shape))
    return x
