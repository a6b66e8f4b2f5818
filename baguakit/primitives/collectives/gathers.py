"""The values of all ranks, on all ranks."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ...comm import Comm
from ...compressors import Compressor
from ...compressors.base import Unchecked
from ..pieces import row_pieces
from ..transports import row_transport
from .rows import bytes_for, codec_of, decompress_rows, output, values_in


@torch.no_grad()
def compressed_all_gather(x: Tensor, compressor: Compressor | None, comm: Comm, out: Tensor | None = None) -> Tensor:
    """Return the tensors `x` (k, …) of all ranks, concatenated and rounded: (size · k, …).

        out = [Q(x_0); Q(x_1); … ; Q(x_{n−1})]

    Every rank decodes the same bytes, those of its own values included, so the results are bitwise equal. Each sends
    (n − 1) c(N) bytes of its N values. Where c(N) would be more than N values are, `x` travels as it is. Long rows pass
    around a ring of the ranks in pieces: one is compressed or decompressed while another is on the wire.

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
    if len(parts) > 1:
        pass_around(mine, rows, codec, comm, parts)
        return result
    transport = row_transport(comm, [bytes_for(n, mine.numel(), codec, x.device)])
    transport.gather(0, codec.compress(mine.view(1, -1), None, comm.key(0)))
    decompress_rows(codec, transport.arrived(0), rows)
    transport.close()
    return result


def pass_around(mine: Tensor, rows: Tensor, codec: Unchecked, comm: Comm, parts: Sequence[slice]) -> None:
    """Fill row q of `rows` (n, N) with Q(x_q) on all ranks, around a ring, in pieces.

    In step s = 0 … n − 2 rank r sends Q(x_{r−s}) to rank r + 1, and receives Q(x_{r−s−1}) from rank r − 1. So a rank
    receives from one other alone: messages of several at once meet in its link, which drops some.
    """
    n, (before, after) = comm.size, ((comm.rank + step) % comm.size for step in (-1, 1))
    sizes = [part.stop - part.start for part in parts]
    packed = [[bytes_for(1, size, codec, mine.device) for size in sizes] for _ in range(1, n)]
    comm.settled()
    tags = range((n - 1) * len(parts))
    receives = [comm.receive_later(packed[tag // len(parts)][tag % len(parts)], before, tag) for tag in tags]
    own, sends = [], []
    for i, part in enumerate(parts):
        own.append(codec.compress(mine[part].view(1, -1), None, comm.key(i)))
        sends.append(comm.send_later(own[i], after, i))
    for each, part in zip(own, parts, strict=True):
        decompress_rows(codec, each, rows[comm.rank : comm.rank + 1, part])
    for tag in tags:
        step, i = divmod(tag, len(parts))
        receives[tag].wait()
        if step < n - 2:
            sends.append(comm.send_later(packed[step][i], after, tag + len(parts)))
        source = (comm.rank - step - 1) % n
        decompress_rows(codec, packed[step][i], rows[source : source + 1, parts[i]])
    for work in sends:
        work.wait()
