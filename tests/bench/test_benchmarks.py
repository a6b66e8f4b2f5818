"""`pytest --benchmark` ends in a table of a few columns, and a failure is a few lines.

Each test starts pytest in a folder of its own, which imports torch: hence `slow`.
"""

import os
import re
import shutil
import subprocess
import sys

import pytest
from laboratory import ROOT

BENCHMARKS = """
import logging
import pytest
import torch
from bench.measuring import measure


def bench_right(benchmark):
    x = torch.zeros(1000)
    measure(benchmark, lambda: x.zero_(), 1000, 4000)


def bench_without_a_peer(benchmark):
    benchmark.pedantic(lambda: None, rounds=3)


def bench_wrong(benchmark):
    for _ in range(5000):  # as torch's compiler does
        logging.getLogger("torch.__trace").debug("a line of a trace")
    assert torch.equal(torch.zeros(1000), torch.ones(1000)), "zeros are not ones"


def bench_skipped(benchmark):
    pytest.skip("not here")


def bench_has_no_limit(benchmark, request):
    assert request.node.get_closest_marker("timeout").args == (0,)
    benchmark.pedantic(lambda: None, rounds=1)
"""


@pytest.mark.slow
@pytest.mark.parametrize("plugin", ["with pytest-benchmark", "without"])
def test_a_run_is_readable_also_when_it_fails(tmp_path, plugin):
    for name in ("conftest.py", "pyproject.toml", "bench/conftest.py", "bench/measuring.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "tests").mkdir()  # pyproject.toml names it
    (tmp_path / "bench/bench_all.py").write_text(BENCHMARKS)
    command = [sys.executable, "-m", "pytest", "--benchmark", "-p", "no:cacheprovider"]
    command += ["-p", "no:benchmark"] if plugin == "without" else []
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}  # of pytest-xdist
    ran = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert ran.returncode == 1 and "1 failed, 3 passed, 1 skipped" in ran.stdout, ran.stdout
    lines = ran.stdout.splitlines()
    assert len(lines) < 60 and "a line of a trace" not in ran.stdout
    assert "E   AssertionError: zeros are not ones" in ran.stdout
    (start,) = [at for at, line in enumerate(lines) if line.startswith("benchmark  ")]
    head, *table = lines[start : start + 6]
    assert head.split("  ")[0] == "benchmark" and head.endswith("verified")
    assert re.fullmatch(r"right +[\d.,]+ [µm]s  [\d.]+ of the bytes a second of a copy +yes", table[0])
    assert re.fullmatch(r"without_a_peer +[\d.,]+ [µm]s  – +yes", table[1])
    assert re.fullmatch(r"wrong +–  – +NO: failed", table[2])
    assert re.fullmatch(r"skipped +–  – +skipped", table[3])
    assert re.fullmatch(r"has_no_limit +[\d.,]+ [µm]s  – +yes", table[4])
    assert max(map(len, (head, *table))) <= 100
