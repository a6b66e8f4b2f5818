"""Kernels against the speed of a copy."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..arguments import checked
from .style import PALE, blank, line_style, quieten

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Row = Mapping[str, Any]


@checked
def roofline(measured: Mapping[str, Any], families: Sequence[str] | None = None) -> "Figure":
    """Draw how near kernels come to the speed of a copy, and how long a call takes, by the number of values.

    A copy is the roof: a kernel that reads and writes as many bytes can hardly be faster. Small tensors may lie above
    it, since they are read from a cache.

    Args:
        measured: what `python -m bench.roofline` writes: a dict with "machine" and "rows", each of them with "family",
            "name", "values", "seconds" and "share" (of the copy's bytes a second).
        families: which to draw; None means all.

    Returns:
        A `matplotlib.figure.Figure`, a line of two panels for each family.

    Raises:
        ValueError: there is no row of a family asked for.
    """
    groups: dict[str, dict[str, list[Row]]] = {}
    for row in measured["rows"]:
        groups.setdefault(row["family"], {}).setdefault(row["name"], []).append(row)
    chosen = list(groups) if families is None else list(families)
    if not chosen or not set(chosen) <= groups.keys():
        raise ValueError(f"nothing was measured of {families!r}; there are {', '.join(groups) or 'no rows'}")
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
        quieten(left)
        quieten(right)
    for axes in panels[-1]:
        axes.set_xlabel("values", fontsize=8)
    machine = measured["machine"]
    figure.suptitle(f"{machine['device']}, {machine['processor']}, {machine['date']}", fontsize=9)
    return figure
