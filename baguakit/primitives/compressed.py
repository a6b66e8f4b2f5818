"""The mean of compressed values."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..comm import Comm, rotated
from ..compressors import Compressor
from .flat import on_flat
from .means import mean_

# A piece of a large tensor is compressed while the one before it is on the wire. Pieces below a mebibyte of values
# would cost more in messages than the overlap gains; more than eight add nothing.
PIECES, PIECE_VALUES = 8, 1 << 18
LINE = 64  # shards are cut at multiples of this many values, so that kernels move whole 128-byte lines


@on_flat
def compressed_mean_(x: Tensor, compressor: Compressor, comm: Comm, residual: Tensor | None = None) -> Tensor:
    """Average `x` over all ranks, sending only compressed values.

    Each rank averages one shard for all the others: shards are compressed and scattered, decompressed, averaged in
    fp32 and compressed again, and gathered. Every rank decodes the same bytes, so the results are bitwise equal. Each
    sends 2 (n − 1)/n bytes a value with an 8-bit compressor, and its ranges. Where compression would send more than
    the values themselves (a handful of them), this is `mean_`.

    Args:
        x: a floating tensor of any shape, or a list of them in one dtype; overwritten.
        compressor: such as `compressors.MinMaxUInt8()`.
        comm: the group. With one rank nothing happens and nothing is lost.
        residual: fp32, as long as `x`; overwritten by what compression lost of this rank's contribution, such that
            Σ_r residual_r = Σ_r x_r − n · result: the owner of a shard adds n times the loss of the second compression.
    """
    if residual is not None:
        check_residual(residual, x)
        residual = residual.view(-1)
    if comm.size == 1 or not pays(x.numel(), x.element_size(), compressor, comm.size):
        if residual is not None:
            residual.zero_()
        return mean_(x, comm)  # type: ignore[no-any-return]
    if x.numel() % comm.size == 0:
        return _mean_of_shards(x, compressor, comm, residual)
    # The last shard is filled with zeros.
    length = x.numel()
    padded = torch.cat([x, x.new_zeros(-length % comm.size)])
    lost = None if residual is None else torch.empty_like(padded, dtype=torch.float32)
    x.copy_(_mean_of_shards(padded, compressor, comm, lost)[:length])
    if residual is not None and lost is not None:
        residual.copy_(lost[:length])
    return x


def check_residual(residual: Tensor, x: Tensor) -> None:
    """Raise unless `residual` is a contiguous fp32 tensor as long as `x`."""
    if residual.dtype != torch.float32 or residual.numel() != x.numel() or not residual.is_contiguous():
        raise ValueError(
            f"a residual is a contiguous float32 tensor of {x.numel()} values, as many as are averaged; "
            f"this one has {residual.numel()} of {residual.dtype}"
        )


def pays(values: int, value_bytes: int, compressor: Compressor, size: int) -> bool:
    """Whether a compressed mean of `values` over `size` ranks sends no more bytes than a plain one."""
    shard = -(-values // size)
    return values > 0 and compressor.row_bytes(shard) <= shard * value_bytes


@dataclass
class _Piece:
    """A run of the tensor, in one row for each rank, and its messages."""

    rows: Tensor  # (size, width) values
    residual: Tensor | None  # (size, width)
    codes: Tensor  # (size, bytes): row r holds this rank's shard as rank r sees it
    means: Tensor  # (size, bytes): row r holds the averaged shard of rank r
    works: list[Any]


def _mean_of_shards(x: Tensor, compressor: Compressor, comm: Comm, residual: Tensor | None) -> Tensor:
    wire = _Collectives(comm) if x.is_cuda else _Messages(comm)
    pieces = list(_cut(x, compressor, comm.size, residual))
    wire.expect(pieces)
    for i, piece in enumerate(pieces):
        packed = compressor.compress(piece.rows, residual=piece.residual, key=comm.key(2 * i))
        wire.scatter(i, piece, packed)
    for i, piece in enumerate(pieces):
        wire.arrived(piece)
        own = None if piece.residual is None else piece.residual[comm.rank]
        packed = compressor.reduce(piece.codes, piece.rows.shape[1], residual=own, key=comm.key(2 * i + 1))
        wire.gather(i, piece, packed)
    for piece in pieces:
        wire.arrived(piece)
        compressor.decompress(piece.means, piece.rows.shape[1], piece.rows.dtype, out=piece.rows)
    wire.close()
    return x


def _cut(x: Tensor, compressor: Compressor, size: int, residual: Tensor | None) -> Iterator[_Piece]:
    count = max(1, min(PIECES, x.numel() // PIECE_VALUES))
    width = -(-x.numel() // (count * size))
    width += -width % LINE
    for start in range(0, x.numel(), size * width):
        run = slice(start, min(start + size * width, x.numel()))
        rows = x[run].view(size, -1)
        lost = None if residual is None else residual[run].view(size, -1)
        room = (size, compressor.row_bytes(rows.shape[1]))
        codes, means = (torch.empty(room, dtype=torch.uint8, device=x.device) for _ in range(2))
        yield _Piece(rows, lost, codes, means, [])


class _Collectives:
    """Pieces over NCCL: its own stream orders the collectives, and the lane's stream waits for them."""

    def __init__(self, comm: Comm) -> None:
        self.comm = comm

    def expect(self, pieces: list[_Piece]) -> None:
        pass

    def scatter(self, i: int, piece: _Piece, packed: Tensor) -> None:
        piece.works = [self.comm.all_to_all_later(piece.codes, packed)]

    def gather(self, i: int, piece: _Piece, packed: Tensor) -> None:
        piece.works = [self.comm.all_gather_later(piece.means, packed)]

    def arrived(self, piece: _Piece) -> None:
        for work in piece.works:
            work.wait()

    def close(self) -> None:
        pass


class _Messages:
    """Pieces over gloo: every receive is posted before any send, and ranks send in rotated order."""

    def __init__(self, comm: Comm) -> None:
        self.comm, self.peers = comm, rotated(set(range(comm.size)) - {comm.rank}, comm.rank)
        self.sends: list[Any] = []

    def expect(self, pieces: list[_Piece]) -> None:
        self.comm.settled()
        self.means_due = []
        for i, piece in enumerate(pieces):
            piece.works = [self.comm.receive_later(piece.codes[p], p, tag=2 * i) for p in self.peers]
            self.means_due.append([self.comm.receive_later(piece.means[p], p, tag=2 * i + 1) for p in self.peers])

    def scatter(self, i: int, piece: _Piece, packed: Tensor) -> None:
        self.sends += [self.comm.send_later(packed[p], p, tag=2 * i) for p in self.peers]
        piece.codes[self.comm.rank].copy_(packed[self.comm.rank])

    def gather(self, i: int, piece: _Piece, packed: Tensor) -> None:
        self.sends += [self.comm.send_later(packed[0], p, tag=2 * i + 1) for p in self.peers]
        piece.means[self.comm.rank].copy_(packed[0])
        piece.works = self.means_due[i]

    def arrived(self, piece: _Piece) -> None:
        for work in piece.works:
            work.wait()

    def close(self) -> None:
        for work in self.sends:
            work.wait()
