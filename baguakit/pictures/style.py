"""The style of all plots."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours without yellow, which is hard to see on white: dark and light in turn.
COLOURS = ("#0072B2", "#D55E00", "#000000", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#7F7F7F")
MARKERS = "osD^v<>P"
DASHES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (6, 2)), (0, (3, 1, 1, 1, 1, 1)), (0, (1, 3)), (0, (8, 2, 1, 2)))
PALE = "#8a8a8a"


def blank(width: float, height: float) -> "Figure":
    """Return an empty figure.

    Args:
        width, height: its size in inches.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError("plots need matplotlib: pip install matplotlib") from missing
    return Figure(figsize=(width, height), layout="constrained")


def line_style(i: int) -> dict[str, Any]:
    """Return the colour, marker and dashes of the i-th line."""
    return {
        "color": COLOURS[i % len(COLOURS)],
        "marker": MARKERS[i % len(MARKERS)],
        "linestyle": DASHES[i % len(DASHES)],
        "markersize": 4.5,
        "markerfacecolor": "white",
        "linewidth": 1.4,
    }


def set_frame(axes: "Axes") -> None:
    """Set a pale grid, and remove the frame at the top and on the right."""
    axes.grid(True, color="#d8d8d8", linewidth=0.5)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)
