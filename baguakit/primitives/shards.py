"""The compressed mean in two hops: every rank averages a shard for all the others, piece by piece."""

import torch
from torch import Tensor

from ..comm import Comm
from ..compressors.base import Unchecked
from .pieces import pieces
from .transports import bytes_for, gathered, scattered


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
    parts = [(x[run].view(n, -1), None if residual is None else residual[run].view(n, -1)) for run in pieces(x, n)]
    # Of each piece come this rank's shard as each rank sees it, and the averaged shard of each rank.
    shards, means = ([bytes_for(n, rows.shape[1], codec, x.device) for rows, _ in parts] for _ in range(2))

    def packed(i: int, ranks: slice) -> Tensor:
        rows, lost = parts[i]
        return codec.compress(rows[ranks], None if lost is None else lost[ranks], comm.key(i * n + (ranks.start or 0)))

    def mean(i: int) -> Tensor:
        rows, lost = parts[i]
        own = None if lost is None else lost[rank]
        return codec.reduce(shards[i], rows.shape[1], own, comm.key((len(parts) + i) * n))

    comm.settled()
    averaged = map(mean, scattered(comm, shards, packed))
    for ranks, i in gathered(comm, means, averaged, tag=len(parts)):
        rows = parts[i][0][ranks]
        codec.decompress(means[i][ranks], rows.shape[1], rows.dtype, rows)
    return x
