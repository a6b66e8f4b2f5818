"""Figures of the measurements: throughput by bandwidth, scaling by hosts, stragglers, exchanges.

Contenders are drawn by families, so that no panel has more than six curves. The name of a curve stands beside its end,
in its colour, which an algorithm has in all pictures.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .collectives import COLLECTIVES
from .contenders import ALONE, FOUR_BITS
from .exchanges import EXCHANGES
from .panels import COLOURS, DDP, GREY, MOST, WIDTH, Curves, Panel, multiples, tidy
from .reports import line_of, names_with, throughput
from .steps import HOSTS, RATES, SCALED_RATE, SLOWNESS
from .table import Table
from .tasks import TASKS, task

THEIRS = (DDP, "DDP, bf16 hook", "DDP, PowerSGD hook", "hivemind")
FAMILIES = {
    "DDP, its hooks, hivemind": (ALONE, *THEIRS, "gradient_allreduce"),
    "Compressed gradients": (DDP, "bytegrad", "bytegrad, BFloat16", "qadam", "power_sgd", "top_k"),
    "Gossip": (
        *(DDP, "decentralized, AWC", "decentralized, ATC"),
        *("low_precision_decentralized", "choco", "choco, one peer"),
    ),
    "Local steps, asynchrony": (
        *(ALONE, DDP, "local_sgd", "diloco"),
        *("async_model_average", "async_model_average, 0.5 s"),
    ),
}
NICE = {"100mbit": "100 Mb/s", "500mbit": "500 Mb/s", "1gbit": "1 Gb/s", "unshaped": "unshaped"}
TEXT = {"font.size": 9, "axes.titlesize": 9, "figure.titlesize": 9.5, "axes.labelsize": 8.5}
TEXT |= {"xtick.labelsize": 8, "ytick.labelsize": 8}

Cells = list[tuple[dict[str, Any], Any]]


def draw(trained: Table, exchanged: Table, collected: Table, folder: Path) -> list[Path]:
    """Draw what there is to draw; return the pictures."""
    cells = longest(trained)
    made: list[tuple[str, Callable[[Figure], bool]]] = [
        ("network-throughput", lambda figure: by_bandwidth(figure, cells)),
        ("network-scaling", lambda figure: by_hosts(figure, cells)),
        ("network-straggler", lambda figure: with_straggler(figure, cells)),
        ("network-exchanges", lambda figure: of_exchanges(figure, exchanged, EXCHANGES)),
        ("network-collectives", lambda figure: of_exchanges(figure, collected, COLLECTIVES)),
    ]
    paths = []
    for name, paint in made:
        with rc_context(TEXT):
            figure = Figure(figsize=(WIDTH, 4), layout="constrained")
            if paint(figure):
                path = folder / f"{name}.png"
                figure.savefig(path, dpi=150)
                paths.append(path)
    return paths


def longest(table: Table) -> Cells:
    """Of cells that differ in the number of steps alone, such as those of `--quick`, the one with the most."""
    found: dict[tuple[Any, ...], tuple[dict[str, Any], Any]] = {}
    for cell, result in sorted(table, key=lambda row: row[0]["steps"]):
        found[tuple(cell[key] for key in ("task", "rate", "hosts", "straggler", "algorithm"))] = (cell, result)
    return list(found.values())


def families(cells: Cells) -> dict[str, Sequence[str]]:
    """Return the names of each family; those in the cells that are in none come last, a few at a time.

    Those of four bits are in the table only.
    """
    known = {*itertools.chain(*FAMILIES.values()), *(each.name for each in FOUR_BITS)}
    others = [name for name in names_with(cells) if name not in known]
    return FAMILIES | {f"Others{', more' * (at > 0)}": others[at : at + MOST] for at in range(0, len(others), MOST)}


def chosen(cells: Cells, **asked: Any) -> Iterator[tuple[dict[str, Any], Any]]:
    """The cells that are as asked."""
    return ((cell, r) for cell, r in cells if all(cell[key] == value for key, value in asked.items()))


def by_bandwidth(figure: Figure, cells: Cells) -> bool:
    """Images a second at each rate: panels for each task and family."""
    panels = []
    ticks = {float(place): NICE[rate] for place, rate in enumerate(RATES)}
    for family, each in itertools.product(families(cells), TASKS):
        curves: Curves = {}
        for cell, r in chosen(cells, task=each.name, straggler=False, hosts=HOSTS):
            curves.setdefault(cell["algorithm"], {})[RATES.index(cell["rate"])] = throughput(r)
        curves = {name: curves[name] for name in families(cells)[family] if name in curves}
        title, place = f"{family}\n{each.about.split(':')[0]}", f"link of each of {HOSTS} hosts"
        if set(curves) - {DDP, ALONE}:
            panels.append(Panel(title, place, "images a second", curves, each.name, ticks))
    panels.sort(key=lambda panel: panel.like == TASKS[-1].name)  # the last has two families, which stand side by side
    return bool(multiples(figure, panels))


def by_hosts(figure: Figure, cells: Cells) -> bool:
    """Throughput by the number of hosts, as a share of that of as many hosts with nothing to exchange."""
    asked = {"task": "wide", "rate": SCALED_RATE, "straggler": False}
    alone = {cell["hosts"]: throughput(r) for cell, r in chosen(cells, algorithm=ALONE, **asked)}
    shares: Curves = {}
    beyond: Curves = {}
    for cell, r in sorted(chosen(cells, **asked), key=lambda row: row[0]["hosts"]):
        if cell["hosts"] in alone and cell["algorithm"] != ALONE:
            shares.setdefault(cell["algorithm"], {})[cell["hosts"]] = throughput(r) / alone[cell["hosts"]]
            beyond.setdefault(cell["algorithm"], {})[cell["hosts"]] = 1e3 * (r["step"] - r["compute"])
    panels = []
    ticks = {float(hosts): str(hosts) for hosts in sorted(alone)}
    for (family, names), (curves, words) in itertools.product(
        families(cells).items(), ((shares, "throughput / without exchange"), (beyond, "ms a step beyond computing"))
    ):
        found = {name: curves[name] for name in names if len(curves.get(name, ())) > 1}
        if set(found) - {DDP}:
            panels.append(Panel(family, f"hosts, each on {NICE[SCALED_RATE]}", words, found, words, ticks))
    figure.suptitle(
        f"{headline('wide')}\nAll hosts share two cores: more hosts compute slower, so exchanges weigh less"
    )
    return bool(multiples(figure, panels))


def headline(name: str) -> str:
    """Say what a task is, as a title."""
    about = task(name).about
    return about[0].upper() + about[1:]


def with_straggler(figure: Figure, cells: Cells) -> bool:
    """Speed that the other hosts keep when the last one is slow: a panel for each rate, a mark for each task."""
    slowed = list(chosen(cells, straggler=True, hosts=HOSTS))
    rates = [rate for rate in RATES if any(chosen(slowed, rate=rate, algorithm=ALONE))]
    names = [name for name in names_with(slowed) if name != ALONE and any(chosen(slowed, algorithm=name))]
    high = max(1, (len(rates) + 1) // 2)
    figure.set_size_inches(WIDTH, 1 + high * (0.6 + 0.15 * len(names)))
    panels = figure.subplots(high, 2, sharex=True, sharey=True, squeeze=False).flat
    for axes, rate in zip(panels, rates, strict=False):
        for each, colour, marker in zip(TASKS, COLOURS, "sDo", strict=False):
            kept = speeds_kept({cell["algorithm"]: r for cell, r in chosen(slowed, rate=rate, task=each.name)})
            at = [y for y, name in enumerate(names) if name in kept]
            if at:
                axes.plot([kept[names[y]] for y in at], at, marker, color=colour, markersize=4.5, label=each.about)
        axes.axvline(1, color="black", linewidth=0.8)
        axes.set_title(NICE[rate])
        axes.tick_params(labelbottom=True)
        tidy(axes)
    for axes in panels[len(rates) :]:
        axes.set_visible(False)
    panels[0].set_yticks(range(len(names)), names)
    panels[0].invert_yaxis()
    figure.suptitle(
        f"One of {HOSTS} hosts computes {SLOWNESS} times slower: speed that the others keep (without exchange: 1)"
    )
    return named(figure, panels[0])


def speeds_kept(results: dict[str, Any]) -> dict[str, float]:
    """Of each algorithm, the speed of the hosts that are not slow, of theirs when nothing is exchanged."""
    if ALONE not in results:
        return {}
    return {name: others(results[ALONE]) / others(result) for name, result in results.items() if name != ALONE}


def others(result: Any) -> float:
    """Seconds a step on the hosts that are not slow, the mean."""
    quick = result["step_by_rank"][:-1]
    return float(sum(quick) / len(quick))


def of_exchanges(figure: Figure, exchanged: Table, names: Iterable[str]) -> bool:
    """Times to their ideal lines, a panel for each size and number of hosts."""
    panels = []
    ticks = {float(place): NICE[rate] for place, rate in enumerate(RATES[:-1])}
    for hosts, mib in sorted({(cell["hosts"], cell["mib"]) for cell, _ in exchanged}):
        curves: Curves = {}
        for cell, result in sorted(exchanged, key=lambda row: RATES.index(row[0]["rate"])):
            for name in names:
                carried = result[name].get("busiest", result[name]["formula"]) if name in result else None
                line = line_of(carried, cell["rate"])
                if (cell["hosts"], cell["mib"]) == (hosts, mib) and line:
                    at = RATES.index(cell["rate"])
                    curves.setdefault(name, {})[at] = result[name]["seconds"] / line
        panels.append(
            Panel(f"{hosts} hosts, {mib} MiB", "each host's link", "time / (bytes / rate)", curves, "", ticks, "linear")
        )
    drawn = multiples(figure, panels)
    for axes in drawn:
        axes.axhline(1514 / 1448, color=GREY, linewidth=0.8, linestyle=":")
    figure.suptitle("Exchanges beside their ideal lines; headers of frames alone cost the dotted line")
    return bool(drawn)


def named(figure: Figure, axes: Axes) -> bool:
    """Put one legend below all panels; False if nothing has been drawn."""
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside lower center", frameon=False)
    return bool(handles)
