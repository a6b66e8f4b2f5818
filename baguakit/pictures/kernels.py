"""Plots of the speed of kernels, compared to a copy."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..arguments import checked
from .style import PALE, blank, line_style, set_frame

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Row = Mapping[str, Any]


@checked
def roofline(measured: Mapping[str, Any], families: Sequence[str] | None = None) -> "Figure":
    """Draw the bandwidth of kernels relative to a copy, and the time of a call, by the number of values.

    A kernel that reads and writes as many bytes as a copy is rarely faster. Small tensors are an exception, since they
    are read from a cache.

    Args:
        measured: the output of `python -m bench.roofline`: a dict with "machine" and "rows". A row has "family",
            "name", "values", "seconds" and "share" (of the bandwidth of a copy).
        families: the families to draw; None for all.

    Returns:
        A `matplotlib.figure.Figure` with two panels for each family.

    Raises:
        ValueError: there is no row of one of the families.
    """
    groups: dict[str, dict[str, list[Row]]] = {}
    for row in measured["rows"]:
        groups.setdefault(row["family"], {}).setdefault(row["name"], []).append(row)
    chosen = list(groups) if families is None else list(families)
    if not chosen or not set(chosen) <= groups.keys():
        raise ValueError(f"measured has no rows of families {families!r}; it has {', '.join(groups) or 'no rows'}")
    figure = blank(8.5, 2.2 * len(chosen) + 0.4)
    panels = figure.subplots(len(chosen), 2, sharex=True, squeeze=False)
    for family, (left, right) in zip(chosen, panels, strict=True):
        for i, (name, rows) in enumerate(groups[family].items()):
            sizes, style = [row["values"] for row in rows], {**line_style(i), "markersize": 3, "linewidth": 1.0}
            left.plot(sizes, [row["share"] for row in rows], label=name, **style)
            right.plot(sizes, [row["seconds"] * 1e6 for row in rows], **style)
        left.axhline(1, color=PALE, linewidth=0.8)
        left.set_xscale("log", base=2)
        left.set_ylim(0, None)
        left.set_ylabel("share of a copy", fontsize=8)
        left.set_title(family, fontsize=9, loc="left")
        right.set(yscale="log")
        right.set_ylabel("µs a call", fontsize=8)
        right.legend(*left.get_legend_handles_labels(), fontsize=7, frameon=False)
        set_frame(left)
        set_frame(right)
    for axes in panels[-1]:
        axes.set_xlabel("values", fontsize=8)
    machine = measured["machine"]
    figure.suptitle(f"{machine['device']}, {machine['processor']}, {machine['date']}", fontsize=9)
    return figure
