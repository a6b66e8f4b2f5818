"""Our kernels, compiled for GPUs that are not here and executed, equal their definitions.

`pytest --ptx 90 tests/kernels` runs all tests of kernels so. Triton decides once in a process whether kernels are
interpreted, so it is another process that executes them.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tiers import slow_after

pytest.importorskip("triton")
ROOT = Path(__file__).parents[2]
KERNELS = Path(__file__).parent
ARCHS = (80, 90, 100)
# They launch no kernel; or have tests of their own below.
OTHERS = ("ahead_of_time", "launches", "host_time", "libraries", "blockwise_numpy", "executed", "forms")
FILES = sorted(
    path.name for path in KERNELS.glob("test_*.py") if not path.stem.removeprefix("test_").startswith(OTHERS)
)
MEANS, ROWS = (
    tuple(f"test_executed_{name}.py" for name in names)
    for names in (("exchange", "primitives", "virtual"), ("rows", "rows_primitives", "traffic"))
)


def executed(arch, *files, marks=""):
    """Run files of tests with `--ptx`; return what pytest says at its end."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--ptx", str(arch)]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [*command, "--tb=short", "--show-capture=no", "-m", marks, *(f"tests/kernels/{file}" for file in files)],
        cwd=ROOT, env=environment | {"PYTHONPATH": path}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow  # compiling takes a minute where nothing is cached
@pytest.mark.timeout(600)
@pytest.mark.parametrize("arch", ARCHS)
def test_planted_faults_are_found_and_few_sectors_are_touched(arch):
    assert "skipped" not in executed(arch, "test_executed_faults.py", "test_executed_sectors.py", marks="not slow")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("files", slow_after(1, [[MEANS[0]], [*MEANS[1:], *ROWS[:2]]]), ids=["means", "others"])
def test_exchanges_between_ranks_in_one_kernel(files):
    assert "skipped" not in executed(90, *files, marks="not slow")


@pytest.mark.slow
@pytest.mark.release
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("files", [MEANS, ROWS], ids=["means", "rows"])
@pytest.mark.parametrize("arch", ARCHS)
def test_exchanges_between_ranks_of_all_kinds_in_one_kernel(arch, files):
    assert re.search(r"[1-9]\d* orders of \d+ exchanges", executed(arch, *files, marks="slow"))


@pytest.mark.slow
@pytest.mark.release
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("file", ["test_executed_orders.py", "test_executed_rows_orders.py"])
def test_exchanges_between_ranks_in_every_order(file):
    executed(90, file, marks="slow")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_faults_of_ordering_are_found_and_no_rank_waits_for_one_that_is_late():
    files = "test_executed_misordered.py", "test_executed_misordered_rows.py", "test_executed_late.py"
    executed(90, *files, marks="slow")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_sectors_at_lengths_that_were_drawn():
    executed(90, "test_executed_sectors.py", marks="slow")


@pytest.mark.slow  # compiles a hundred variants
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("arch", ARCHS)
def test_every_variant_equals_its_definition(arch):
    """Without a cache, compiling takes two minutes of it."""
    said = executed(arch, "test_executed_variants.py")
    assert "skipped" not in said
    tests, launches, variants = (
        int(re.search(rf"(\d+) {word}", said)[1]) for word in ("passed", "launches", "variants")
    )
    assert 100 < tests <= variants < launches  # a test is of a variant


@pytest.mark.slow
@pytest.mark.release
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("file", FILES)
def test_tests_of_kernels_pass_where_they_are_executed(file, arch):
    assert " passed" in executed(arch, file)
