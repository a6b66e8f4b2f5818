"""Random tensors, the same in every process, and what collectives make of them."""

import torch

import baguakit as bk

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SHAPES = [(7, 5), (64,), (), (2, 3, 4), (0,), (1,)]


def draw(rank, n, dtype=torch.float32):
    """The values of a rank."""
    return torch.randn(n, generator=torch.Generator().manual_seed(rank)).to(dtype)


def values(seed=0, dtype=torch.float32, shapes=SHAPES):
    """A list of tensors."""
    source = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=source).to(dtype) for shape in shapes]


def all_of_them(comm, device="cpu"):
    """Results of all primitives that send in pieces, of values whose blocks pieces do not divide."""
    n, byte = comm.size, bk.compressors.MinMaxUInt8(block=64)
    x = draw(comm.rank, 61_440).to(device)  # 64 · 960: shards of 2 to 5 ranks, and their eighths, are whole blocks
    rows, residual = x.view(n, -1), torch.empty_like(x)
    parts = [[64 * (17 * q + 5 * r + 40) * (r != 1 or q == 1) for r in range(n)] for q in range(n)]  # to rank r from q
    values = draw(comm.rank, sum(parts[comm.rank])).to(device)
    place = comm.rank * 7  # of the result within x: not that of a shard
    again = x.clone()
    return [
        bk.primitives.compressed_all_gather(rows[0], byte, comm),
        bk.primitives.compressed_reduce_scatter(rows, byte, comm, residual),
        residual,
        bk.primitives.compressed_reduce_scatter(
            again.view(n, -1), byte, comm, out=again[place:][: len(x) // n].view(1, -1)
        ).clone(),
        bk.primitives.compressed_all_to_all(rows, byte, comm),
        bk.primitives.compressed_all_to_all(values, byte, comm, [each[comm.rank] for each in parts], parts[comm.rank]),
        bk.primitives.compressed_mean_(x.clone(), byte, comm),
    ]
