"""`pytest --benchmark` runs bench/ instead of tests/, and does so where pytest-benchmark is not installed, too."""

import json
import signal
from pathlib import Path
from statistics import mean, median, stdev
from time import perf_counter

import pytest


def pytest_addoption(parser, pluginmanager):
    parser.addoption("--benchmark", action="store_true", help="run the benchmarks in bench/ instead of the tests")
    parser.addoption("--record", type=Path, metavar="PATH", help="append a line of JSON as a test begins and ends")
    # What pyproject.toml and scripts/gpu name must be known, whichever plugins the machine has.
    if not pluginmanager.hasplugin("benchmark"):
        parser.addoption("--benchmark-json", type=Path, metavar="PATH", help="write the timings to PATH")
    if not pluginmanager.hasplugin("timeout"):
        parser.addini("timeout", "not enforced: pytest-timeout is not installed")


def pytest_configure(config):
    # A shell lets what it runs in the background ignore interrupts, and the processes that tests interrupt inherit it.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.getoption("record"):
        config.pluginmanager.register(Record(config.getoption("record")), "record")
    plugin = config.pluginmanager.hasplugin("benchmark")
    if not plugin:
        config.pluginmanager.register(Stopwatch(config.getoption("benchmark_json")), "stopwatch")
    if config.getoption("benchmark"):
        if plugin:
            config.option.benchmark_only = True
        if config.args_source is not pytest.Config.ArgsSource.ARGS:
            config.args = [str(config.rootpath / "bench")]


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
            said = crash.message.strip() if crash else report.longreprtext.strip()
            self.write(test=report.nodeid, outcome=report.outcome, seconds=report.duration, said=said[:500])

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
        for row in rows:
            stats = row["stats"]
            terminalreporter.write_line(f"{row['name']}: {stats['median'] * 1e3:.4f} ms, {stats['rounds']} rounds")
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
