"""The picture of `bench.roofline`: kernels beside a copy, by the number of values."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from baguakit.pictures import PALE, blank, line_style, set_frame

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SPIKE = 1.25  # a call that takes so many times as long as one on more values was disturbed
KEY = "× took longer than a call on more values: a disturbance of that run, on no line"

Rows = Sequence[Mapping[str, Any]]


def roofline(measured: Mapping[str, Any], families: Sequence[str] | None = None) -> "Figure":
    """Draw the bandwidth of kernels relative to a copy, and the time of a call, by the number of values.

    A kernel that moves as many bytes as a copy is rarely faster than the copy, unless the tensor fits into a cache.

    Args:
        measured: the output of `python -m bench.roofline`: a dict with "machine" and "rows". A row has "family",
            "name", "values", "seconds" and "share" (of the bandwidth of a copy).
        families: the families to draw; None for all.

    Raises:
        ValueError: `measured` has no row of a family.
    """
    groups: dict[str, dict[str, list[Mapping[str, Any]]]] = {}
    for row in measured["rows"]:
        groups.setdefault(row["family"], {}).setdefault(row["name"], []).append(row)
    chosen = list(groups) if families is None else list(families)
    if not chosen or not set(chosen) <= groups.keys():
        raise ValueError(f"measured has no rows of families {families!r}; it has {', '.join(groups) or 'no rows'}")
    figure = blank(9.0, 2.0 * len(chosen) + 0.6)
    panels = figure.subplots(len(chosen), 2, sharex=True, squeeze=False)
    spikes = 0
    for family, (left, right) in zip(chosen, panels, strict=True):
        for i, (name, rows) in enumerate(groups[family].items()):
            style = {**line_style(i), "markersize": 3, "linewidth": 1.0}
            spikes += draw_curve(left, rows, lambda row: row["share"], style | {"label": name})
            draw_curve(right, rows, lambda row: row["seconds"] * 1e6, style)
        left.axhline(1, color=PALE, linewidth=0.8)
        left.set_xscale("log", base=2)
        left.set(ylim=(0, None))
        left.set_ylabel("share of a copy", fontsize=8)
        left.set_title(family, fontsize=9, loc="left")
        right.set(yscale="log")
        for axis in (right.yaxis.set_major_formatter, right.yaxis.set_minor_formatter):
            axis(lambda value, _: f"{value:,g}" if f"{value:e}"[0] in "125" else "")
        right.set_ylabel("µs a call", fontsize=8)
        handles = left.get_legend_handles_labels()
        right.legend(*handles, fontsize=7, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
        set_frame(left)
        set_frame(right)
        right.tick_params(which="minor", labelsize=8)
    for axes in panels[-1]:
        axes.set_xlabel("values", fontsize=8)
    machine = ", ".join(measured["machine"][name] for name in ("device", "processor", "date"))
    figure.suptitle(f"{machine}\n{KEY}" if spikes else machine, fontsize=9)
    return figure


def draw_curve(axes: Any, rows: Rows, of: Any, style: Mapping[str, Any]) -> int:
    """Draw a value by size: undisturbed calls as a line, disturbed ones as crosses; return how many those are."""
    least = [min((later["seconds"] for later in rows if later["values"] > row["values"]), default=0) for row in rows]
    off = [bool(after) and row["seconds"] > SPIKE * after for row, after in zip(rows, least, strict=True)]
    line, crosses = (
        [(r["values"], of(r)) for r, spike in zip(rows, off, strict=True) if spike == is_] for is_ in (0, 1)
    )
    axes.plot(*zip(*line, strict=True), **style)
    if crosses:
        axes.plot(*zip(*crosses, strict=True), "x", color=style["color"], markersize=4)
    return len(crosses)
