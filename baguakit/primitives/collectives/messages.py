"""Values from one rank to another: between the stages of a pipeline."""

import torch
from torch import Tensor

from ...comm import Comm, check_peer
from ...compressors import Compressor
from ..flat import check_averageable
from ..pieces import row_pieces
from ..transports import bytes_for
from .rows import check_arguments, codec_of, values_in


@torch.no_grad()
def compressed_send(x: Tensor, compressor: Compressor | None, comm: Comm, peer: int) -> None:
    """Send `x` to `peer`, compressed: c(N) bytes of N values. Wait until it has been sent.

    The peer calls `compressed_receive_` with a tensor of as many values in the same dtype, and the same compressor.
    Where c(N) would be more than N values are, `x` travels as it is.

    Args:
        x: a floating tensor of any shape. It is only read.
        compressor: such as `compressors.MinMaxUInt8()`; None sends values as they are.
        comm: the group.
        peer: another rank of it.

    Raises:
        TypeError: `x` is not floating, or is sparse; `compressor` keeps some places only.
        ValueError: `peer` is not another rank of the group.
    """
    values = values_in(x, compressor, comm)
    check_peer(peer, comm.group)
    codec = codec_of(x, compressor, comm, rows=1)
    if codec is None:
        works = [comm.send_later(values, peer)] if values.numel() else []
    else:
        works = []
        for i, part in enumerate(row_pieces(values.numel(), 1, x.is_cuda)):
            works.append(comm.send_later(codec.compress(values[part].view(1, -1), None, comm.key(i)), peer, i))
    for work in works:
        work.wait()


@torch.no_grad()
def compressed_receive_(x: Tensor, compressor: Compressor | None, comm: Comm, peer: int) -> Tensor:
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
    check_arguments(x, compressor, comm)
    check_averageable(x)
    check_peer(peer, comm.group)
    codec, N = codec_of(x, compressor, comm, rows=1), x.numel()
    values = x.detach().view(-1) if x.is_contiguous() else x.new_empty(N)
    if codec is None:
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
