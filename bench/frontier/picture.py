"""The pictures of the front page: loss against seconds, and against bytes, on four hosts and on eight."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes

from baguakit.compare.compose import Row
from baguakit.compare.contenders import DDP
from baguakit.pictures import PALE, blank, set_frame, style_of
from bench.network.panels import plain
from bench.network.table import RESULTS, Table

from . import compose
from .timing import HOSTS
from .trajectories import MORE, SEEDS

NETWORK = "100 Mb/s"
OURS = ("bytegrad", "bytegrad, 4 bits", "power_sgd", "diloco", "diloco, 4 bits", "MuLoCo", "async_gossip")
KEY = "○ torch's DDP, its hooks, torchft, hivemind    × : times less than DDP to its last loss"
KEY += f"    ¹ one seed, not {len(SEEDS)}"
LINE, NAME = 0.072, 8  # the height of a name's line, to that of a panel; points of a name


@dataclass(frozen=True)
class Picture:
    """A picture of losses by what they cost.

    Attributes:
        about: the words for readers who do not see it.
        label: of the axis.
        cost: the cost of a row up to a loss.
        scale: the cost of a step of a row, in the unit of the axis.
        more: a contender that is shown in this picture only.
    """

    about: str
    label: str
    cost: Callable[[Row, float], float]
    scale: Callable[[Row], float]
    more: tuple[str, ...] = ()


PICTURES = {
    "frontier-seconds": Picture(
        f"Validation loss against seconds at {NETWORK}, on four hosts and on eight",
        f"seconds at {NETWORK}, composed",
        Row.seconds,
        lambda row: row.step,
    ),
    "frontier-bytes": Picture(
        "Validation loss against bytes that a rank has sent, on four hosts and on eight",
        "GB sent by a rank",
        Row.bytes,
        lambda row: row.sent / 1e9,
        ("DDP, Muon",),
    ),
}


def draw(losses: Table, timings: Table, folder: Path = RESULTS) -> list[Path]:
    """Draw what there is to draw; return the pictures."""
    found = {hosts: compose.rows(losses, timings, NETWORK, hosts) for hosts in (HOSTS, MORE)}
    found = {hosts: rows for hosts, rows in found.items() if rows and compose.targets(losses, hosts)}
    paths = []
    for name, picture in PICTURES.items() if found else ():
        figure = blank(9, 3.9)
        for axes, (hosts, rows) in zip(figure.subplots(1, len(found), squeeze=False)[0], found.items(), strict=True):
            shown = [row for row in rows if row.contender.name in OURS + picture.more or is_stock(row)]
            axes.set_title(f"{hosts} hosts", fontsize=9)
            panel(axes, shown, picture, compose.targets(losses, hosts)[-1])
        figure.axes[0].set_ylabel("bits per byte, held out", fontsize=8)
        figure.text(0.01, 0.01, KEY, fontsize=8)
        figure.get_layout_engine().set(rect=(0, 0.05, 1, 0.95))
        paths.append(folder / f"{name}.png")
        figure.savefig(paths[-1], dpi=150, facecolor="white")
    return paths


def is_stock(row: Row) -> bool:
    """Return whether a row is of another library, torch's DDP and its hooks among them."""
    return bool(row.contender.peer)


def panel(axes: Axes, found: Sequence[Row], picture: Picture, goal: float) -> None:
    """Draw the curve of each row, and beside it the name and how many times less than DDP it takes to a loss."""
    ddp = next(picture.cost(row, goal) for row in found if row.contender == DDP)
    for row in sorted(found, key=lambda row: not is_stock(row)):
        hollow = {"marker": "o", "markersize": 3.5, "markerfacecolor": "white", "markevery": 3} if is_stock(row) else {}
        name, points = row.contender.name, [(step * picture.scale(row), loss) for step, loss in row.curve()]
        one = "¹" * (len(row.curves) == 1)
        label = f"{name}{one}" if row.contender == DDP else f"{name}: {times(ddp / picture.cost(row, goal))}{one}"
        style = {"linewidth": 1.3} | style_of(name) | hollow
        axes.plot(*zip(*points, strict=True), label=label, **style)
    axes.axhline(goal, color=PALE, linewidth=0.8, linestyle=":")
    axes.set(xscale="log")
    axes.set_xlabel(picture.label, fontsize=8)
    plain(axes.xaxis)
    set_frame(axes)
    name_curves(axes)


def times(factor: float) -> str:
    """Return a factor in words; 0 is that of a loss which was never reached."""
    return f"{factor:.{0 if factor >= 100 else 1}f} ×" if factor else "not reached"


def name_curves(axes: Axes) -> None:
    """Write names at the right: the further right a curve ends the lower, so that few of the lines to them cross."""
    lines = [line for line in axes.lines if not str(line.get_label()).startswith("_")]
    ends = sorted(((line.get_xdata()[-1], line.get_ydata()[-1], line) for line in lines), key=lambda end: -end[0])
    for place, (x, y, line) in enumerate(ends):
        colour = line.get_color()
        arrow = {"arrowstyle": "-", "color": colour, "linewidth": 0.5, "alpha": 0.6, "relpos": (0, 0.5)}
        at = (1.03, 0.03 + LINE * place)
        style = {"fontsize": NAME, "va": "center", "color": colour}
        axes.annotate(line.get_label(), (x, y), at, textcoords="axes fraction", arrowprops=arrow, **style)
