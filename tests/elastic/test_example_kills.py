"""examples/elastic.py with ranks that are killed at random moments, and as the program that its docstring starts."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from crew import crew
from elasticity import FOR_EVER, PROGRAM, begins

pytest.importorskip("sklearn")

ROOT = Path(__file__).parents[2]


@pytest.mark.slow  # two programs import torch and scikit-learn
def test_the_program_trains_to_the_end_and_leaves_at_sigterm(tmp_path):
    """As a shell starts it: one process trains to the end, another is told to stop, and both end with status 0."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    with crew("") as store:
        command = [sys.executable, PROGRAM, "--endpoint", store.address, "--folder", tmp_path / "saved"]
        options = {"env": environment, "stdout": subprocess.PIPE, "text": True}
        with subprocess.Popen([*command, f"--steps={FOR_EVER}"], **options) as stopped:
            assert any(line.startswith("step 25 ") for line in stopped.stdout)
            stopped.send_signal(signal.SIGTERM)
            stopped.communicate(timeout=90)
            assert stopped.returncode == 0
        ended = subprocess.run([*command, "--steps=60"], capture_output=True, text=True, env=environment, check=True)
    assert "Traceback" not in ended.stderr
    assert begins(ended.stdout.splitlines())[0].startswith("1 ranks begin at step ")
    assert sorted(path.name for path in (tmp_path / "saved").iterdir())[-1] >= "000060"
