"""The cells: each by its name, with a function that measures it."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from .crowd import crowd

SIZES = (8, 64, 512)
COUNTED = 15.0  # seconds in which requests are counted
SLOW, SLOWER, MINUTES = 512, 10, 10
LOST, JUDGE = "a rank", "the judge"

Cell = dict[str, Any]


def cells() -> list[tuple[Cell, Callable[[], dict[str, Any]]]]:
    """Return the cells that take a quiet machine."""
    return [
        ({"ranks": size, "lost": lost}, lambda size=size, lost=lost: measured(size, lost))  # type: ignore[misc]
        for size in SIZES
        for lost in (LOST, JUDGE)
    ]


def measured(size: int, lost: str, seconds: float = COUNTED) -> dict[str, Any]:
    """Let ranks agree, count their requests while they wait, then lose one."""
    with crowd(size) as ranks:
        ranks.start()
        ranks.forget()
        agreed = ranks.agree()
        rates = ranks.rates(seconds)
        judge = ranks.judge()
        known = ranks.lose(judge if lost == JUDGE else (judge + size // 2) % size)
    return {"agreement": max(agreed), **rates, "first": known[0], "named": known[len(known) // 2], "last": known[-1]}


def slow_cell() -> tuple[Cell, Callable[[], dict[str, Any]]]:
    """Return the cell of the slow store."""
    return {"ranks": SLOW, "slower": SLOWER, "minutes": MINUTES}, lambda: slowly(SLOW, 60.0 * MINUTES, SLOWER)


def slowly(size: int, seconds: float, slower: float) -> dict[str, Any]:
    """Let ranks wait for so long with a slower store; count those that give up."""
    with crowd(size, slower) as ranks:
        for monitor in ranks.monitors:
            monitor.limit = lambda: timedelta(seconds=seconds + 600)  # no flight is late
        ranks.start()
        rates = ranks.rates(seconds)
        said = sorted({str(monitor.error) for monitor in ranks.monitors if monitor.error})
        return {**rates, "alarms": len(ranks.named), "said": said}
