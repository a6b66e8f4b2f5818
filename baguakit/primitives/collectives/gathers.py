"""The values of all ranks, on all ranks."""

import torch
from torch import Tensor

from ...comm import Comm
from ...compressors import Compressor
from ..pieces import row_pieces
from ..transports import bytes_for, gathered
from .rows import codec_of, output, values_in


@torch.no_grad()
def compressed_all_gather(x: Tensor, compressor: Compressor | None, comm: Comm, out: Tensor | None = None) -> Tensor:
    """Return the tensors `x` (k, …) of all ranks, concatenated and rounded: (size · k, …).

        out = [Q(x_0); Q(x_1); … ; Q(x_{n−1})]

    Every rank decodes the same bytes, those of its own values included, so the results are bitwise equal. Each sends
    (n − 1) c(N) bytes of its N values, in pieces: one is compressed or decompressed while another is on the wire. Where
    c(N) would be more than N values are, `x` travels as it is.

    Args:
        x: a floating tensor, of one shape and dtype on all ranks. It is only read, and may be a part of `out`.
        compressor: such as `compressors.MinMaxUInt8()`; None sends values as they are.
        comm: the group. With one rank nothing is sent and nothing is lost.
        out: a contiguous tensor of n N values in the dtype of `x` to write to, instead of a new one.

    Returns:
        `out`; a new tensor of shape (size · k, …), or (size,) for a scalar, without it.

    Raises:
        TypeError: `x` is not floating, or is sparse; `compressor` keeps some places only.
        ValueError: `out` does not fit.
    """
    mine, n = values_in(x, compressor, comm), comm.size
    shape = (n * x.shape[0], *x.shape[1:]) if x.dim() else (n,)
    result = output(out, x, shape)
    if not mine.numel():
        return result
    rows, codec = result.detach().view(n, -1), codec_of(x, compressor, comm, n * mine.numel())
    if codec is None:
        rows.copy_(comm.all_gather(mine).view(n, -1))
        return result
    parts = row_pieces(mine.numel(), n, x.is_cuda)
    incoming = [bytes_for(n, part.stop - part.start, codec, x.device) for part in parts]
    packed = (codec.compress(mine[part].view(1, -1), None, comm.key(i)) for i, part in enumerate(parts))
    comm.settled()
    for ranks, i in gathered(comm, incoming, packed):
        out_rows = rows[ranks, parts[i]]
        codec.decompress(incoming[i][ranks], out_rows.shape[1], x.dtype, out_rows)
    return result
