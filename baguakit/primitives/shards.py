"""The compressed mean in two hops: every rank averages a shard for all the others, piece by piece."""

import torch
from torch import Tensor

from ..comm import Comm
from ..compressors.base import Unchecked
from .pieces import pieces
from .transports import row_transport


def mean_of_shards(x: Tensor, codec: Unchecked, comm: Comm, residual: Tensor | None) -> Tensor:
    """Average the flat `x` over all ranks, of any length: the last shard is filled with zeros."""
    if x.numel() % comm.size == 0:
        return _mean_of_even_shards(x, codec, comm, residual)
    length = x.numel()
    padded = torch.cat([x, x.new_zeros(-length % comm.size)])
    lost = None if residual is None else torch.empty_like(padded, dtype=torch.float32)
    x.copy_(_mean_of_even_shards(padded, codec, comm, lost)[:length])
    if residual is not None and lost is not None:
        residual.copy_(lost[:length])
    return x


def _mean_of_even_shards(x: Tensor, codec: Unchecked, comm: Comm, residual: Tensor | None) -> Tensor:
    n, rank = comm.size, comm.rank
    # Of each piece: its values in one row for each rank, and their residual.
    parts: list[tuple[Tensor, Tensor | None]] = []
    # Of each piece come this rank's shard as each rank sees it, and the averaged shard of each rank.
    incoming: list[Tensor] = []
    for run in pieces(x, n):
        rows = x[run].view(n, -1)
        parts.append((rows, None if residual is None else residual[run].view(n, -1)))
        for _ in range(2):
            incoming.append(torch.empty(n, codec.row_bytes(rows.shape[1]), dtype=torch.uint8, device=x.device))
    transport = row_transport(comm, incoming)
    # All ranks write to all others at once. In turns, each with one to write to and one to hear until both are done,
    # messages alone come nearer to their line (4 hosts, 16 MiB, 100 and 500 Mb/s: 1.05 and 1.07 × it, not 1.13 and
    # 1.20), but all wait for whoever computes longest: with the codec, on shared cores, 1.12 and 1.29 × beside 1.13 and
    # 1.22, and a step of training gains nothing.
    for i, (rows, lost) in enumerate(parts):
        transport.scatter(2 * i, codec.compress(rows, lost, comm.key(2 * i)))
    for i, (rows, lost) in enumerate(parts):
        own = None if lost is None else lost[rank]
        mean = codec.reduce(transport.arrived(2 * i), rows.shape[1], own, comm.key(2 * i + 1))
        transport.gather(2 * i + 1, mean)
    for i, (rows, _) in enumerate(parts):
        codec.decompress(transport.arrived(2 * i + 1), rows.shape[1], rows.dtype, rows)
    transport.close()
    return x
