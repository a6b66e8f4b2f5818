"""How a long tensor is cut, so that one piece is computed with while another is on the wire."""

from collections.abc import Iterator

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


def cut(x: Tensor, rows: int = 1) -> Iterator[slice]:
    """Yield the pieces of a flat tensor, each of so many rows of equal length."""
    values = x.numel()
    width = -(-values // (pieces_of(values, x.is_cuda) * rows))
    width += -width % (BLOCKS if width >= 2 * BLOCKS else LINE)
    for start in range(0, values, rows * width):
        yield slice(start, min(start + rows * width, values))
