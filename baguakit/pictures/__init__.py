"""Draw plots. Each function returns a matplotlib Figure. `draw(size)` of every topology draws its graph and its matrix.

The functions import matplotlib when they are called. They do not use pyplot: save a figure by `.savefig("decay.png")`;
a notebook displays figures after `%matplotlib inline`. Lines differ in colour (Okabe and Ito's), marker and dashes.
"""

import re
import zlib
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..arguments import checked, describe, tensor
from ..compressors import Compressor
from ..expressions import show_public
from ..topology import Topology

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["consensus_decay", "error_histogram"]

LONGEST = 4096  # rounds of the longest period for which the spectral gap is computed
ROUNDING = 1e-8  # relative to the first distance: smaller distances are rounding errors of fp32
ACROSS, BINS = 3, 81  # the histograms in a row of a figure, and the bars in a histogram

# These are Okabe and Ito's colours, dark and light in turn, with grey for yellow, which is hard to see on white.
COLOURS = ("#0072B2", "#D55E00", "#000000", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#7F7F7F")
MARKERS = "osD^v<>P"
DASHES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (6, 2)), (0, (3, 1, 1, 1, 1, 1)), (0, (1, 3)), (0, (8, 2, 1, 2)))
PALE = "#8a8a8a"

# Of algorithms: the most frequent ones have Okabe and Ito's colours, the others some of Tol's and ColorBrewer's.
ALGORITHMS = {
    "DDP": "#000000", "no communication": "#7F7F7F", "bytegrad": "#0072B2", "diloco": "#D55E00",
    "local_sgd": "#E69F00", "power_sgd": "#009E73", "choco": "#CC79A7", "decentralized": "#56B4E9",
    "MuLoCo": "#882255", "top_k": "#999933", "signum": "#332288", "async_model_average": "#44AA99",
    "Streaming DiLoCo": "#AA4499", "decoupled_momentum": "#117733", "lion_vote": "#661100", "NoLoCo": "#A6761D",
    "SparseLoCo": "#E7298A", "low_precision_decentralized": "#6699CC", "qadam": "#7570B3", "push_sum": "#66A61E",
    "ef21": "#A6CEE3", "hivemind": "#8C6D31", "torchft": "#9C9EDE",
}  # fmt: skip
OTHERS = ("#E31A1C", "#1F3FFF", "#00B050", "#B000E0")  # of names that are not listed, such as those of users
SAME = {"gradient_allreduce": "DDP", "ddp": "DDP", "DeMo": "decoupled_momentum"}


def blank(width: float, height: float) -> "Figure":
    """Return an empty figure of `width` by `height` inches; raise if matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError("plots need matplotlib: pip install matplotlib") from missing
    return Figure(figsize=(width, height), layout="constrained")


def line_style(i: int) -> dict[str, Any]:
    """Return the colour, marker and dashes of the i-th line."""
    styles = {"color": COLOURS, "marker": MARKERS, "linestyle": DASHES}
    own = {key: values[i % len(values)] for key, values in styles.items()}
    return {**own, "markersize": 4.5, "markerfacecolor": "white", "linewidth": 1.4}


def style_of(name: str) -> dict[str, Any]:
    """Return the colour and dashes of an algorithm, which are the same in every picture of the project.

    The part of the name before a comma or parenthesis gives the colour, and the rest gives the dashes, such as in
    "bytegrad, 4 bits". A name that is not in `ALGORITHMS` has one of four other colours, by its checksum.
    """
    family = re.split(r"[,(]", name)[0]
    variant, family = name[len(family) :], SAME.get(family, family)
    colour = ALGORITHMS.get(family, OTHERS[zlib.crc32(family.encode()) % len(OTHERS)])
    dashes = DASHES[1 + zlib.crc32(variant.encode()) % (len(DASHES) - 1)] if variant not in ("", "()") else "-"
    return {"color": colour, "linestyle": dashes}


def set_frame(axes: "Axes", legend: str = "", **options: Any) -> None:
    """Draw a pale grid; hide the top and right frame lines. Put any legend outside the axes, at the place `legend`."""
    axes.grid(True, color="#d8d8d8", linewidth=0.5)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)
    if legend:
        figure: Any = axes.figure
        lines = axes.get_legend_handles_labels()
        figure.legend(*lines, loc=f"outside {legend}", frameon=False, **{"fontsize": 8} | options)


@checked
def consensus_decay(distances: Mapping[Topology, Sequence[float]], size: int) -> "Figure":
    """Draw, for each round, how far the values x_r of n ranks are from their mean x̄, and the spectral gap's bound.

        points   d_t = sqrt( (1/n) Σ_r ‖x_r − x̄‖² )  after t rounds
        line     ρ^t d_0,   ρ = 1 − topology.spectral_gap(n)

    The points of a static symmetric topology lie on or below its line. If a topology reaches the exact mean, the legend
    gives the number of rounds to it, and the line is not drawn. For a period above 4,096 rounds there is no line.

    Args:
        distances: d_0, d_1, d_2 … by topology. Distances below 10⁻⁸ of the largest d_0 are rounding errors and are not
            drawn; a dashed line goes from the point before them to the bottom.
        size: n, the number of ranks.

    Raises:
        ValueError: `distances` is empty, a distance is negative or not a number, or a topology has no spectral gap.
    """
    if not distances or not all(len(d) and all(x >= 0 for x in d) for d in distances.values()):
        raise ValueError(f"distances has numbers, 0 or more, for each topology; not {dict(distances)!r}")
    bottom, smallest = ROUNDING * (max(d[0] for d in distances.values()) or 1.0), min(map(min, distances.values()))
    bottom = bottom if smallest < bottom else smallest / 3
    figure = blank(7.0, 3.9)
    axes = figure.subplots()
    for i, (topology, measured) in enumerate(distances.items()):
        style, label = line_style(i), "no bound for a round"
        if topology.period(size) <= LONGEST and (exact := topology.rounds_to_exactness(size)):
            label = f"exact after {exact}"
        elif topology.period(size) <= LONGEST:
            rate = 1 - topology.spectral_gap(size)
            label = f"ρ = {rate:.3f}"
            promised = [(t, y) for t in range(len(measured)) if (y := measured[0] * rate**t) >= bottom]
            axes.plot(*zip(*promised, strict=True), color=style["color"], linestyle=style["linestyle"], linewidth=1)
            style["linestyle"] = "none"
        points = [x if x >= bottom else float("nan") for x in measured]
        axes.plot(range(len(points)), points, label=f"{topology!r}: {label}", clip_on=False, zorder=3, **style)
        for t, (before, after) in enumerate(pairwise(measured)):
            if before >= bottom > after:
                axes.plot([t, t + 1], [before, bottom], color=style["color"], linestyle="--", linewidth=1)
    axes.set(yscale="log", xlabel="rounds", ylabel="distance from the mean", xlim=(0, None), ylim=(bottom, None))
    axes.set_title(f"{size} ranks: measured (points) and ρᵗ (lines)", fontsize=10)
    axes.locator_params(axis="x", integer=True)
    set_frame(axes, "lower center", ncols=2)
    return figure


@checked
def error_histogram(x: Tensor, *compressors: Compressor) -> "Figure":
    """Draw a histogram of the errors Q(x) − x of each compressor Q, in units of the root mean square of x.

    Each panel shows errors up to three times their root mean square. The panel's title has the bits per value on the
    wire and the relative error  ‖Q(x) − x‖ / ‖x‖.

    Args:
        x: a floating tensor of any shape, on any device; it is compressed as one row.
        compressors: compressors such as `compressors.MinMaxUInt8(), compressors.TopK(0.01)`.

    Raises:
        ValueError: there is no compressor, or x is empty or has only zeros.
    """
    tensor("x", x)
    norm = float(torch.linalg.vector_norm(x.float()))
    if not compressors or not norm > 0:
        raise ValueError(
            f"x has values, not all of them 0, and compressors names one or more; not {describe(x)} and {compressors!r}"
        )
    rows, columns = -(-len(compressors) // ACROSS), min(ACROSS, len(compressors))
    figure = blank(2.9 * columns + 0.4, 2.3 * rows + 0.2)
    panels = figure.subplots(rows, columns, squeeze=False).flatten()
    for left_over in panels[len(compressors) :]:
        left_over.set_axis_off()
    for i, (compressor, axes) in enumerate(zip(compressors, panels, strict=False)):
        row, unit = x.detach().reshape(1, -1), norm / x.numel() ** 0.5
        packed = compressor.compress(row)
        error = (compressor.decompress(packed, x.numel()).float() - row.float()).flatten().cpu()
        bits, size = 8 * packed.numel() / x.numel(), float(torch.linalg.vector_norm(error)) / norm
        reach = max(3 * size, 1e-9)
        axes.hist((error / unit).numpy(), bins=BINS, range=(-reach, reach), color=COLOURS[i % len(COLOURS)])
        axes.set_title(f"{compressor!r}\n{bits:.3g} bits a value, error {size:.2%}", fontsize=9)
        axes.set(xlim=(-reach, reach), yticks=[])
        axes.locator_params(axis="x", nbins=5)
        set_frame(axes)
        axes.spines["left"].set_visible(False)
    figure.supxlabel("error, in units of the root mean square of the values", fontsize=9)
    return figure


show_public(__name__)
