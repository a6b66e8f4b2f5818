"""`scripts/gpu --dry` and `--report`: every part is tried without a GPU, and a report can be attached to an issue."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "scripts"))
from gpu_parts import PARTS  # noqa: E402


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
    assert {"log.txt", "results.json", "report.txt", "step_profile.json.gz", "benchmarks.json"} <= written
    if not torch.cuda.is_available():
        assert parts["waits"]["found"]["passed"] == 0 and [*parts["waits"]["found"]["reasons"]] == [
            "needs a CUDA device"
        ]
        assert "roofline-cpu.json" in written
    report = (tmp_path / "report.txt").read_text()
    assert all(f"  {part.name:<12}passed" in report for part in PARTS) and str(ROOT) not in report
