"""The picture of the page: error against bits a value, a point for each format."""

import math
from collections.abc import Sequence
from typing import Any

from bench.network.panels import spread

from .claims import Found, bound

SHOWN = ("normal", "Student-t(3)", "transformer, step 600")
LIMITS, FLOOR = (0.7, 11.0), 1.5e-5
MOST = 9.0  # bits of what is drawn
FAMILIES = {  # by the end of a name: the colour and marker of a curve, and the words for it
    "rotate=True)": ("#0072B2", "o", "Uniform, rotated"),
    "rotate=False)": ("#56B4E9", "s", "Uniform, not rotated"),
}
OTHERS = ("#0072B2", "D", "Sign, Float8")
THEIRS = ("#D55E00", "^", "MX and NVFP4")
BESIDE = {  # where the name of a point stands, from it; all others stand in a column on the right
    "MXFP4": (-4, 5, "right"),
    "NVFP4": (5, 3, "left"),
    "MXFP6 e3m2": (0, 6, "center"),
    "MXFP6 e2m3": (0, 6, "center"),
    "Sign()": (5, 3, "left"),
}
COLUMN, LINE = 8.75, 0.034  # bits where it begins; the height of a line of it, to that of a panel


def draw(found: Found) -> Any:
    """Return a figure with a panel for each of three sources."""
    from baguakit.pictures import blank

    figure = blank(11, 4.8)
    panels = figure.subplots(1, len(SHOWN), sharey=True)
    by_name = {source["name"]: source for source in found["sources"]}
    for axes, name in zip(panels, SHOWN, strict=True):
        _panel(axes, found["formats"], by_name[name])
    panels[0].set_ylabel("vNMSE,  Σ (Q(x) − x)² / Σ x²", fontsize=9)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False, fontsize=8)
    return figure


def _panel(axes: Any, formats: Sequence[Found], source: Found) -> None:
    from baguakit.pictures import PALE, set_frame

    axes.set(yscale="log", xlim=LIMITS, ylim=(FLOOR, 1), xticks=range(1, 9))
    axes.set_title(source["name"], fontsize=9)
    axes.set_xlabel("bits a value", fontsize=9)
    set_frame(axes)
    ends = [LIMITS[0], MOST]
    label = "2^(−2 bits), the bound for normal values"
    axes.plot(ends, [bound(bits) for bits in ends], color=PALE, linestyle="--", linewidth=1, label=label)
    left = [each for each in formats if each["bits"] <= MOST]
    for ending, (colour, marker, words) in FAMILIES.items():
        some = [each for each in left if each["name"].endswith(ending)]
        left = [each for each in left if each not in some]
        _points(axes, some, source, colour, marker, words, "-")
    for ours, (colour, marker, words) in ((True, OTHERS), (False, THEIRS)):
        _points(axes, [each for each in left if each["ours"] == ours], source, colour, marker, words, "")
    _names(axes, left, source)


def _points(axes: Any, formats: Sequence[Found], source: Found, colour: str, mark: str, words: str, line: str) -> None:
    places = [each["bits"] for each in formats], [source["vnmse"][each["name"]] for each in formats]
    style = {
        "linestyle": line,
        "linewidth": 1,
        "markersize": 4.5,
        "markerfacecolor": "white" if mark == "s" else colour,
    }
    axes.plot(*places, color=colour, marker=mark, label=words, **style)


def _names(axes: Any, formats: Sequence[Found], source: Found) -> None:
    """Write names beside points, and those of eight bits in a column, each at the height of its point or near it."""
    from matplotlib.patheffects import withStroke

    style = {"fontsize": 6.5, "va": "center", "path_effects": [withStroke(linewidth=2, foreground="white")]}
    column = [each for each in formats if each["name"] not in BESIDE]
    wanted = [1 - math.log(source["vnmse"][each["name"]]) / math.log(FLOOR) for each in column]
    heights = dict(zip((each["name"] for each in column), spread(wanted, [LINE] * len(column)), strict=True))
    for each in formats:
        named = each["name"].replace("()", "").replace('("', " ").replace('")', "")
        point, colour = (each["bits"], source["vnmse"][each["name"]]), (OTHERS if each["ours"] else THEIRS)[0]
        if each["name"] in BESIDE:
            x, y, side = BESIDE[each["name"]]
            axes.annotate(named, point, (x, y), textcoords="offset points", ha=side, color=colour, **style)
        else:
            place = (COLUMN, FLOOR ** (1 - heights[each["name"]]))
            line = {"arrowstyle": "-", "color": colour, "linewidth": 0.5, "shrinkA": 0, "shrinkB": 2}
            axes.annotate(named, point, place, ha="left", color=colour, arrowprops=line, **style)
