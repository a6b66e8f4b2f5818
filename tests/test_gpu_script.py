"""`scripts/gpu`: its parts fit into a call, and what is cut off or fails is told."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "scripts"))
import gpu_run  # noqa: E402
from gpu_parts import FOR_CPUS, PARTS, PYTEST, SECONDS, Part, kernel_tests  # noqa: E402

MACHINE = {"gpu": ["none"], "torch": "-", "triton": "-", "python": "-", "skipped": {}}


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Take parts within some seconds, and return the status and results.json."""
    monkeypatch.setattr(gpu_run, "GRACE", 0.5)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))

    def take(*parts, seconds=100.0):
        status = gpu_run.Run(tmp_path, MACHINE, time.monotonic() + seconds).take(parts)
        return status, json.loads((tmp_path / "results.json").read_text())["parts"]

    return take


def test_every_part_fits_into_a_call_and_what_later_ones_need_comes_first():
    assert SECONDS <= 480 and all(part.seconds + gpu_run.GRACE <= SECONDS for part in PARTS)
    assert len({part.name for part in PARTS}) == len(PARTS)
    assert [part.name for part in PARTS if part.needed] == [PARTS[0].name] == ["compile"]


def test_what_parts_name_is_there():
    words = [word for part in PARTS for word in part.command]
    assert all((ROOT / word).exists() for word in words if word.startswith(("tests/", "scripts/")))
    named = {*kernel_tests()}
    assert named == {str(path.relative_to(ROOT)) for path in ROOT.glob("tests/kernels/test_*.py")} <= {*words}
    assert [Path(path).name.startswith("test_steps") for path in kernel_tests()[:5]] == [True] * 4 + [False]
    assert not [word for word in words if word.startswith("--ignore") and "ahead_of_time" in word]
    tests = "".join(path.read_text() for path in ROOT.glob("tests/**/test_*.py"))
    assert all(re.search(rf"def test_\w*{name}", tests) for name in FOR_CPUS.split(" or "))


def test_tests_are_counted_and_those_that_failed_or_were_cut_off_are_named(run, tmp_path):
    path = tmp_path / "test_some.py"
    path.write_text(
        textwrap.dedent("""
        import os, signal, pytest

        def test_good(): pass
        def test_bad(): assert 1 == 2, "one is not two"
        def test_skipped(): pytest.skip("no reason")
        @pytest.fixture
        def broken():
            yield
            raise KeyError("end")
        def test_ends_badly(broken): pass
        def test_killed(): os.kill(os.getpid(), signal.SIGKILL)
        """)
    )
    shutil.copy(ROOT / "conftest.py", tmp_path)
    _, results = run(Part("tests", "a test run", 60, (*PYTEST, "-c", str(ROOT / "pyproject.toml"), str(path))))
    found = results["tests"]["found"]
    assert results["tests"]["status"] == f"failed with {-signal.SIGKILL}"
    assert (found["passed"], found["skipped"], found["reasons"]) == (1, 1, {"no reason": 1})
    assert [name.rpartition("::")[2] for name in found["failed"]] == ["test_bad", "test_ends_badly"]
    assert "one is not two" in next(iter(found["failed"].values()))
    assert [name.rpartition("::")[2] for name in found["cut off"]] == ["test_killed"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_machine_without_a_gpu_is_refused(tmp_path, capsys):
    assert gpu_run.main([str(tmp_path / "out")]) == 1
    assert "scripts/gpu needs a GPU" in capsys.readouterr().err


@pytest.mark.slow  # every part starts programs that import torch, and ranks
@pytest.mark.timeout(3600)
def test_a_dry_run_takes_every_part(tmp_path):
    """In a process of its own, as a user starts it; what needs a GPU is skipped and says so."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [ROOT / "scripts" / "gpu", tmp_path / "out", "--dry", "--report", tmp_path / "report.txt"]
    ran = subprocess.run(command, env=environment | {"PYTHON": sys.executable}, stdout=subprocess.PIPE, text=True)
    parts = json.loads((tmp_path / "out" / "results.json").read_text())["parts"]
    assert {name: part["status"] for name, part in parts.items()} == {part.name: "passed" for part in PARTS}, ran.stdout
    assert ran.returncode == 0
    written = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"log.txt", "results.json", "report.txt", "step_profile.json.gz"} <= written
    assert {row["verified"] for row in parts["benchmarks"]["found"]["benchmarks"]} == {"yes"}
    if not torch.cuda.is_available():
        assert parts["waits"]["found"]["passed"] == 0 and [*parts["waits"]["found"]["reasons"]] == [
            "needs a CUDA device"
        ]
        assert "roofline-cpu.json" in written
    report = (tmp_path / "report.txt").read_text()
    assert all(f"  {part.name:<12}passed" in report for part in PARTS) and str(ROOT) not in report
