"""Pictures of the errors of compressors."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..arguments import checked, shown
from ..compressors import Compressor
from .style import COLOURS, blank, quieten

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ACROSS = 3
BINS = 81


@checked
def error_histogram(x: Tensor, *compressors: Compressor) -> "Figure":
    """Draw for each compressor Q how its errors Q(x) − x are spread, in units of the root mean square of x.

    Each panel has its own scale, three times the error's root mean square to either side, and says how many bits a
    value takes on the wire and how large the error is in all:  ‖Q(x) − x‖ / ‖x‖.

    Args:
        x: a floating tensor of any shape, on any device; taken as one row.
        compressors: such as `compressors.MinMaxUInt8(), compressors.TopK(0.01)`.

    Returns:
        A `matplotlib.figure.Figure`.

    Raises:
        ValueError: there is no compressor, or x is empty or zero throughout.
    """
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
        quieten(axes)
        axes.spines["left"].set_visible(False)
    figure.supxlabel("error, in units of the root mean square of the values", fontsize=9)
    return figure


def loss(x: Tensor, compressor: Compressor) -> tuple[Tensor, float]:
    """Q(x) − x, flat, fp32 and on the CPU; and the bits that a value takes."""
    row = x.detach().reshape(1, -1)
    packed = compressor.compress(row)
    error = compressor.decompress(packed, row.shape[1]).float() - row.float()
    return error.flatten().cpu(), 8 * packed.numel() / row.shape[1]
