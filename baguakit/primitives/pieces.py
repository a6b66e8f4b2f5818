"""Pieces of a long tensor: one is computed with while another is on the wire."""

from functools import lru_cache

from torch import Tensor

# A piece of a large tensor is compressed while the one before it is on the wire. Pieces of fewer than 2²⁰ values
# would cost more in calls and messages than the overlap gains; more than eight add nothing.
PIECES, PIECE_VALUES = 8, 1 << 20
# Rows of pieces are cut at multiples of so many values: so that no piece but the last has a block that is not full;
# and where they are short, so that kernels move whole lines of memory.
BLOCKS, LINE = 1 << 13, 64


def pieces_of(values: int, gpu: bool) -> int:
    """Return in how many pieces so many values are cut.

    A GPU takes one. There the codec is bound by memory, which is far faster than a network, so that little could be
    hidden; and each piece costs the host three launches and two collectives on the thread that runs backward.
    """
    return 1 if gpu else max(1, min(PIECES, values // PIECE_VALUES))


def pieces(x: Tensor, rows: int = 1) -> tuple[slice, ...]:
    """Return the pieces of a flat tensor, each of so many rows of equal length."""
    return _pieces(x.numel(), rows * width_of_pieces(x.numel(), rows, x.is_cuda))


def row_pieces(length: int, rows: int, gpu: bool) -> tuple[slice, ...]:
    """Return the pieces of one of so many rows, each of `length` values, that travel together."""
    return _pieces(length, width_of_pieces(length * rows, rows, gpu))


def width_of_pieces(values: int, rows: int, gpu: bool) -> int:
    """Return the values of each row in a piece."""
    width = -(-values // (pieces_of(values, gpu) * rows))
    return width + -width % (BLOCKS if width >= 2 * BLOCKS else LINE)


@lru_cache(maxsize=1024)  # the lengths of a model's buckets are few
def _pieces(values: int, width: int) -> tuple[slice, ...]:
    starts = range(0, values, width) if values else ()
    return tuple(slice(start, min(start + width, values)) for start in starts)
