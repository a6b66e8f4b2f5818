"""The mean of compressed values."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..arguments import said, shown
from ..comm import Comm, check_comm
from ..compressors import Compressor
from ..compressors.base import Unchecked, check_dense
from ..kernels.cpu.units import COMPILED_VALUES
from .flat import on_flat
from .means import mean_
from .shards import mean_of_shards
from .transports import bytes_for, gathered

# A rank that sends no more than this sends it at once: at 100 Mb/s it takes 2.6 ms, about what a second hop would.
ONE_HOP_BYTES = 1 << 15


@on_flat
def compressed_mean_(x: Tensor, compressor: Compressor, comm: Comm, residual: Tensor | None = None) -> Tensor:
    """Average `x` over all ranks, sending only compressed values.

    Of N values on n ranks, c(N) being the bytes of N packed values:

        few     (n − 1) c(N) ≤ 32 KiB and n N < 2¹⁶. In one hop: every rank sends all its values, compressed, to all
                others, and averages in fp32, in the order of the ranks, what all of them decompress to. Each sends
                (n − 1) c(N) bytes.
        many    In two hops: each rank averages one shard for all the others. Shards are compressed and scattered,
                decompressed, averaged in fp32 and compressed again, and gathered. Each sends 2 (n − 1) c(N/n) bytes:
                with an 8-bit compressor 2 (n − 1)/n a value, and its ranges.

    Every rank decodes the same bytes, so the results are bitwise equal. Where packed shards would be more bytes than
    the values themselves (a handful of them), this is `mean_`.

    Args:
        x: a floating tensor of any shape, or a list of them in one dtype; overwritten.
        compressor: such as `compressors.MinMaxUInt8()`.
        comm: the group. With one rank nothing happens and nothing is lost.
        residual: fp32, as long as `x`; overwritten by what compression lost of this rank's contribution, such that
            Σ_r residual_r = Σ_r x_r − n · result, up to the rounding of the result. In one hop it is x − Q(x); in two
            the owner of a shard adds n times the loss of the second compression.

    Returns:
        `x`.

    Raises:
        TypeError: a tensor is not floating, or is sparse; `compressor` keeps some places only.
        ValueError: `residual` is not contiguous, not fp32, or not as long as `x`.
    """
    check_comm(comm)
    check_dense("compressor", compressor)
    if residual is not None:
        check_residual(residual, x)
        residual = residual.view(-1)
    codec, n = compressor._unchecked(x), comm.size
    if not compresses(x.numel(), x.dtype, compressor, codec, comm) or n == 1:
        if residual is not None:
            residual.zero_()
        return mean_(x, comm)
    if in_one_hop(x.numel(), codec, n):
        return _mean_of_rows(x, codec, comm, residual)
    return mean_of_shards(x, codec, comm, residual)


def check_residual(residual: Tensor, x: Tensor) -> None:
    """Raise unless `residual` is a contiguous fp32 tensor as long as `x`."""
    if not isinstance(residual, Tensor):
        raise TypeError(said("residual", "a tensor", residual))
    if residual.dtype != torch.float32 or residual.numel() != x.numel() or not residual.is_contiguous():
        raise ValueError(
            f"residual is a contiguous float32 tensor of {x.numel()} values, as many as are averaged; "
            f"this one has {residual.numel()} of {residual.dtype}: {shown(residual)}"
        )


def pays(values: int, value_bytes: int, compressor: Compressor | Unchecked, size: int) -> bool:
    """Return whether `values`, in `size` messages of equal length, are no more bytes packed than as they are."""
    shard = -(-values // size)
    return values > 0 and compressor.row_bytes(shard) <= shard * value_bytes


class Fewer(NamedTuple):
    """The reason for which values travel as they are."""

    values: int
    ranks: int

    def __str__(self) -> str:
        some = "1 value" if self.values == 1 else f"{self.values:,} values"
        return f"{some} on {self.ranks} ranks {'is' if self.values == 1 else 'are'} fewer bytes uncompressed"


class Longer(NamedTuple):
    """The reason for which a format saves nothing."""

    sent: int
    plain: int

    def __str__(self) -> str:
        return f"{self.sent:,} bytes, and {self.plain:,} uncompressed"


def compresses(
    values: int,
    dtype: torch.dtype,
    compressor: Compressor,
    codec: Compressor | Unchecked,
    comm: Comm,
    rows: int | None = None,
) -> bool:
    """Return whether so many values of a dtype are sent compressed, as they are if that pays, and note it.

    Args:
        compressor: the one that was asked for.
        codec: its operations.
        rows: in how many messages of equal length they are sent; None for one for each rank.
    """
    if pays(values, dtype.itemsize, codec, comm.size if rows is None else rows):
        comm.note(compressor, compressor)
        return True
    if values:
        comm.note(compressor, dtype, Fewer(values, comm.size))
    return False


def in_one_hop(values: int, compressor: Compressor | Unchecked, size: int) -> bool:
    """Return whether a compressed mean of `values` over `size` ranks is small enough to be sent to all at once."""
    sent, decompressed = (size - 1) * compressor.row_bytes(values), size * values
    return sent <= ONE_HOP_BYTES and decompressed < COMPILED_VALUES  # else a first step would wait for a compiler


def _mean_of_rows(x: Tensor, codec: Unchecked, comm: Comm, residual: Tensor | None) -> Tensor:
    """Average in one hop:  x ← (1/n) Σ_r Q(x_r), and residual ← x − Q(x)."""
    n, N = comm.size, x.numel()
    rows, lost = bytes_for(n, N, codec, x.device), None if residual is None else residual.view(1, N)
    comm.settled()
    for _ in gathered(comm, [rows], [codec.compress(x.view(1, N), lost, comm.key())]):
        pass
    total, *others = codec.decompress(rows, N, torch.float32, None).unbind()
    for row in others:  # one by one, because torch's sums have an order of their own
        total += row
    return x.copy_(total.div_(total.new_full((1,), n)))
