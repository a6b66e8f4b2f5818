"""The goodput that `bk.tune.simulate` gives for a cell with kills, from the undisturbed speed of its ranks."""

from collections.abc import Mapping
from itertools import count, takewhile
from typing import Any

from baguakit.compare.names import algorithm
from baguakit.costs import Timeless
from baguakit.tune import Machine, simulate

from .cells import KILLS
from .task import network


def simulated(cell: Mapping[str, Any], speed: float) -> float:
    """Return the goodput of ranks that make `speed` steps a second with their exchanges, and are replaced at once."""
    kills = takewhile(lambda at: at <= cell["seconds"] - 10, count(KILLS[cell["event"]], KILLS[cell["event"]]))
    hosts = Machine("host", 1 / speed, count=cell["hosts"])
    seconds = float(cell["seconds"])
    everything = Timeless(cell["hosts"], 1, "cpu", 1, ())  # exchanges are in the measured step
    return simulate(
        network(), algorithm(cell["algorithm"]), [hosts], everything, [*map(float, kills)], seconds=seconds
    ).goodput
