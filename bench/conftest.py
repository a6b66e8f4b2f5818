"""Benchmarks run on one thread, without a time limit, and end in a table; `pytest --benchmark` runs them.

On one thread a kernel and the copy beside it have the same means. A benchmark checks its result before it times
anything, so one that has passed is verified. It says in `extra_info["beside"]` how its time compares to a limit or to
a peer.
"""

import json
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import pytest
import torch

VERIFIED = {"passed": "yes", "failed": "NO: failed", "skipped": "skipped"}
ROWS = pytest.StashKey[dict[str, "Row"]]()


@dataclass(frozen=True)
class Row:
    """A line of the table.

    Attributes:
        name: of the benchmark.
        median: time of a call as text.
        beside: how it compares to a limit or to a peer.
        verified: the outcome of the check.
    """

    name: str
    median: str
    beside: str
    verified: str


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Lift the time limit of tests: a large benchmark may take minutes."""
    for item in items:
        if __file__.startswith(str(item.path.parent)) and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(0))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    report = yield
    if report.when == "call" or report.outcome != "passed":
        benchmark = getattr(item, "funcargs", {}).get("benchmark")
        row = Row(item.name.removeprefix("bench_"), median_of(benchmark), beside(benchmark), VERIFIED[report.outcome])
        item.config.stash.setdefault(ROWS, {})[item.nodeid] = row
    return report


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    rows = config.stash.get(ROWS, {})
    if not rows:
        return
    if path := config.getoption("table"):
        path.write_text(json.dumps({"benchmarks": [asdict(row) for row in rows.values()]}))
    terminalreporter.section("benchmarks")
    head = Row("benchmark", "median", "beside a limit or a peer", "verified")
    width = max(len(row.name) for row in (head, *rows.values()))
    beside_width = max(len(row.beside) for row in (head, *rows.values()))
    for row in (head, *rows.values()):
        line = f"{row.name:<{width}}  {row.median:>10}  {row.beside:<{beside_width}}  {row.verified}"
        terminalreporter.write_line(line.rstrip(), red=row.verified == VERIFIED["failed"])


def median_of(benchmark: Any) -> str:
    """Return the median time of a call, as text; a dash where nothing was timed."""
    info = getattr(benchmark, "extra_info", {})
    stats = getattr(benchmark, "stats", None)  # of pytest-benchmark
    readings = getattr(benchmark, "seconds", None)  # of the stopwatch of conftest.py
    if "milliseconds" in info:
        seconds = info["milliseconds"] / 1e3
    elif stats is not None:
        seconds = stats.stats.median
    elif readings:
        seconds = statistics.median(readings)
    else:
        return "–"
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= scale:
            return f"{seconds / scale:,.3f} {unit}"
    return f"{seconds * 1e6:,.1f} µs"


def beside(benchmark: Any) -> str:
    """Return what a benchmark says of its limit or of its peers."""
    return str(getattr(benchmark, "extra_info", {}).get("beside", "–"))
