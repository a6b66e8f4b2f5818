"""`pytest --benchmark` runs bench/ instead of tests/, and does so where pytest-benchmark is not installed, too."""

import gc
import hashlib
import json
import signal
from datetime import datetime, timezone
from pathlib import Path
from statistics import mean, median, stdev
from time import perf_counter

import pytest

pytest_plugins = ["ptx.plugin"]


def pytest_addoption(parser, pluginmanager):
    parser.addoption("--benchmark", action="store_true", help="run the benchmarks in bench/ instead of the tests")
    parser.addoption(
        "--third", type=third_of_today_or, metavar="1|2|3|today", help="of the tests marked slow, run only this third"
    )
    parser.addoption("--first", action="store_true", help="of the tests chosen, run only the first of each file")
    parser.addoption("--record", type=Path, metavar="PATH", help="append a line of JSON as a test begins and ends")
    parser.addoption("--table", type=Path, metavar="PATH", help="write the table of benchmarks to PATH, as JSON")
    # What pyproject.toml and scripts/gpu name must be known, whichever plugins the machine has.
    if not pluginmanager.hasplugin("benchmark"):
        parser.addoption("--benchmark-json", type=Path, metavar="PATH", help="write the timings to PATH")
    if not pluginmanager.hasplugin("timeout"):
        parser.addini("timeout", "not enforced: pytest-timeout is not installed")


def pytest_configure(config):
    # A shell lets what it runs in the background ignore interrupts, and the processes that tests interrupt inherit it.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    worker = hasattr(config, "workerinput")  # of pytest-xdist: it reports to the process that started it, which writes
    if config.getoption("record") and not worker:
        config.pluginmanager.register(Record(config.getoption("record")), "record")
    if config.getoption("first"):
        config.pluginmanager.register(First(), "first")
    plugin = config.pluginmanager.hasplugin("benchmark")
    if not plugin:
        config.pluginmanager.register(Stopwatch(config.getoption("benchmark_json")), "stopwatch")
    if config.getoption("benchmark"):
        if plugin:
            config.option.benchmark_only = True
            config.option.benchmark_quiet = True  # bench/conftest.py prints a table that fits a terminal
            config.addinivalue_line("filterwarnings", "ignore:Benchmark fixture was not used at all")  # it has failed
        # A failure is short: torch's compiler logs thousands of lines at DEBUG, and pytest would show all of them.
        config.option.log_level = config.option.log_level or "WARNING"
        config.option.tbstyle = "short" if config.option.tbstyle == "auto" else config.option.tbstyle
        if config.args_source is not pytest.Config.ArgsSource.ARGS:
            config.args = [str(config.rootpath / "bench")]


def third_of_today_or(text):
    """Return which third is meant, 1 to 3; `today` is another one every day."""
    if text == "today":
        return datetime.now(timezone.utc).toordinal() % 3 + 1
    if text not in ("1", "2", "3"):
        raise ValueError
    return int(text)


def third_of(nodeid):
    """Return the third, 1 to 3, that the slow test of this name is in."""
    return int(hashlib.sha1(nodeid.encode()).hexdigest(), 16) % 3 + 1


def pytest_report_header(config):
    if third := config.getoption("third"):
        return f"slow tests: third {third} of 3 (--third {third})"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Keep a third of the slow tests, which their names decide: those of a new test move no other.

    Those marked `release` are in none of them.
    """
    if third := config.getoption("third"):
        slow = [item for item in items if item.get_closest_marker("slow")]
        shared = [item for item in slow if not item.get_closest_marker("release")]
        left_out = set(slow) - {item for item in shared if third_of(item.nodeid) == third}
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]


def pytest_collection_finish():
    """Collect no garbage among the modules and tests, which live to the end: there are millions of objects."""
    gc.freeze()


class First:
    """Keep the first test of each file that is not slow, or the first if all are: a trial of how tests start."""

    @pytest.hookimpl(trylast=True)  # when -m and -k have chosen
    def pytest_collection_modifyitems(self, config, items):
        kept = {item.path: item for item in reversed(items)}
        kept |= {item.path: item for item in reversed(items) if item.get_closest_marker("slow") is None}
        config.hook.pytest_deselected(items=[item for item in items if item is not kept[item.path]])
        items[:] = [item for item in items if item is kept[item.path]]


class Record:
    """A line of JSON for each test as it begins and as it ends: it is there even if pytest is killed."""

    def __init__(self, path):
        self.path = path

    def pytest_runtest_logstart(self, nodeid):
        self.write(test=nodeid, outcome="begun")

    def pytest_runtest_logreport(self, report):
        # Set up and torn down, a test has ended only if that did not pass.
        if report.when == "call" or report.outcome != "passed":
            crash = getattr(report.longrepr, "reprcrash", None)
            said = crash.message if crash else report.longreprtext
            if report.skipped and isinstance(report.longrepr, tuple):
                said = report.longrepr[2].removeprefix("Skipped: ")
            self.write(test=report.nodeid, outcome=report.outcome, seconds=report.duration, said=said.strip()[:500])

    def write(self, **line):
        with open(self.path, "a") as file:
            print(json.dumps(line), file=file)


class Stopwatch:
    """The part of pytest-benchmark that bench/ uses, for machines without it: same fixture, same keys in the JSON."""

    def __init__(self, path):
        self.path = path
        self.timings = []

    @pytest.fixture
    def benchmark(self, request):
        timing = Timing(request.node.name, request.node.nodeid)
        yield timing
        if timing.seconds:
            self.timings.append(timing)

    def pytest_terminal_summary(self, terminalreporter):
        rows = [timing.as_json() for timing in self.timings]
        if self.path:
            self.path.write_text(json.dumps({"benchmarks": rows}, indent=2))


class Timing:
    """One benchmark: called with a function, it times it for about a second."""

    def __init__(self, name, fullname):
        self.name, self.fullname, self.group, self.extra_info, self.seconds = name, fullname, None, {}, []

    def __call__(self, function, *args, **kwargs):
        result = function(*args, **kwargs)  # not counted: it may compile
        until = perf_counter() + 1
        while len(self.seconds) < 5 or (perf_counter() < until and len(self.seconds) < 10_000):
            result = self._time(function, args, kwargs)
        return result

    def pedantic(self, target, args=(), kwargs=None, setup=None, rounds=1, warmup_rounds=0, iterations=1):
        for round in range(-warmup_rounds, rounds):
            if setup is not None:
                args, kwargs = setup() or (args, kwargs)
            result = self._time(target, args, kwargs or {}, iterations)
            if round < 0:
                self.seconds.clear()
        return result

    def _time(self, function, args, kwargs, iterations=1):
        start = perf_counter()
        for _ in range(iterations):
            result = function(*args, **kwargs)
        self.seconds.append((perf_counter() - start) / iterations)
        return result

    def as_json(self):
        stats = {
            "min": min(self.seconds),
            "max": max(self.seconds),
            "mean": mean(self.seconds),
            "median": median(self.seconds),
            "stddev": stdev(self.seconds) if len(self.seconds) > 1 else 0.0,
            "rounds": len(self.seconds),
        }
        return {
            "name": self.name,
            "fullname": self.fullname,
            "group": self.group,
            "extra_info": self.extra_info,
            "stats": stats,
        }
