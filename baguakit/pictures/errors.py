"""Plots of the errors of compressors."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..arguments import checked, shown, tensor
from ..compressors import Compressor
from .style import COLOURS, blank, set_frame

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ACROSS = 3
BINS = 81


@checked
def error_histogram(x: Tensor, *compressors: Compressor) -> "Figure":
    """Draw a histogram of the errors Q(x) − x of each compressor Q, in units of the root mean square of x.

    Each panel has its own scale, three times the root mean square of the error on both sides. Its title has the bits
    per value on the wire and the relative error  ‖Q(x) − x‖ / ‖x‖.

    Args:
        x: a floating tensor of any shape, on any device; it is compressed as one row.
        compressors: compressors such as `compressors.MinMaxUInt8(), compressors.TopK(0.01)`.

    Returns:
        A `matplotlib.figure.Figure`.

    Raises:
        ValueError: there is no compressor, or x is empty or has only zeros.
    """
    tensor("x", x)
    norm = float(torch.linalg.vector_norm(x.float()))
    if not compressors or not norm > 0:
        raise ValueError(
            f"x has values, not all of them 0, and compressors names one or more; not {shown(x)} and {compressors!r}"
        )
    rows = -(-len(compressors) // ACROSS)
    columns = min(ACROSS, len(compressors))
    figure = blank(2.9 * columns + 0.4, 2.3 * rows + 0.2)
    panels = figure.subplots(rows, columns, squeeze=False).flatten()
    for left_over in panels[len(compressors) :]:
        left_over.set_axis_off()
    for i, (compressor, axes) in enumerate(zip(compressors, panels, strict=False)):
        error, bits = loss(x, compressor)
        size = float(torch.linalg.vector_norm(error)) / norm
        unit = norm / x.numel() ** 0.5
        reach = max(3 * size, 1e-9)
        axes.hist((error / unit).numpy(), bins=BINS, range=(-reach, reach), color=COLOURS[i % len(COLOURS)])
        axes.set_title(f"{compressor!r}\n{bits:.3g} bits a value, error {size:.2%}", fontsize=9)
        axes.set(xlim=(-reach, reach), yticks=[])
        axes.locator_params(axis="x", nbins=5)
        set_frame(axes)
        axes.spines["left"].set_visible(False)
    figure.supxlabel("error, in units of the root mean square of the values", fontsize=9)
    return figure


def loss(x: Tensor, compressor: Compressor) -> tuple[Tensor, float]:
    """Return Q(x) − x, flat, in fp32 and on the CPU, and the bits per value."""
    row = x.detach().reshape(1, -1)
    packed = compressor.compress(row)
    error = compressor.decompress(packed, row.shape[1]).float() - row.float()
    return error.flatten().cpu(), 8 * packed.numel() / row.shape[1]
