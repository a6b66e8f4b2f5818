"""All-reduces with the barriers of public projects are right in every order, and faults planted in them are found.

Triton decides once in a process whether kernels are interpreted, so it is another process that executes them.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
ROOT = Path(__file__).parents[3]
LINE = re.compile(r"(\d) ranks, (.*): found in (\d+) of (\d+) orders, right in (\d+)")
# Whether it is found depends on who comes first.
BY_CHANCE = {"flags: a number that stays"}
CORRECT = {"swap", "flags", "flags: with fences"}
# Faults whose bytes are right in all orders that switch at signals: a test that compares bytes does not find them.
RIGHT = {
    *(f"swap: {each}" for each in ("put without a release", "taken without an acquire", "scope of one GPU")),
    *(f"flags: {each}" for each in ("written without a release", "read without an acquire", "scope of one GPU")),
    *("flags: volatile flags", "flags: plain flags"),
    *(
        f"{kernel}: no barrier of the block {where}"
        for kernel in ("swap", "flags")
        for where in ("before the signal", "after the wait")
    ),
}


def ran(*arguments):
    """Return what the kernels' program prints."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "TRITON_"))}
    environment = {"TRITON_CACHE_DIR": str(ROOT / ".ptx_cache"), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "ptx.tests.ranks.kernels_with_signals", *map(str, arguments)],
        cwd=ROOT, env=kept | environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def counted(arch, orders, *ranks):
    """Return, by the number of ranks and the kernel: orders that find a fault, all, and those with the right bytes."""
    found = {}
    for line in ran(arch, orders, *ranks):
        count, name, *numbers = LINE.fullmatch(line).groups()
        found[int(count), name] = tuple(map(int, numbers))
    return found


def check(found, orders, ranks):
    assert len(found) == len(ranks) * 22
    for (count, name), (finding, all_, right) in found.items():
        what = f"{count} ranks, {name}: {finding} {right}"
        assert count in ranks and all_ == orders
        if name in CORRECT:
            assert (finding, right) == (0, orders), what
        elif name in BY_CHANCE:
            assert finding >= orders // 2, what
        else:
            assert finding == orders, what
        if name in RIGHT:
            assert right == orders, what


@pytest.mark.slow  # compiles 22 kernels
def test_two_ranks_in_two_orders():
    check(counted(90, 2, 2), 2, [2])


@pytest.mark.slow  # some hundred runs; of many ranks they take too long for a third
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("ranks", [2, 3, *(pytest.param(each, marks=pytest.mark.release) for each in (4, 8))])
@pytest.mark.parametrize("arch", [80, 90, 100])
def test_several_ranks_in_many_orders(arch, ranks):
    orders = 20 if arch == 90 else 4
    check(counted(arch, orders, ranks), orders, [ranks])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_ranks_in_every_order():
    assert ran(90, "every") == [
        "2 ranks, swap: right in 220 of 220 orders",
        "2 ranks, flags: right in 142 of 142 orders",
        "2 ranks, flags: with fences: right in 298 of 298 orders",
    ]
