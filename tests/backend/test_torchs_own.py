"""Torch's own tests of distributed programs, on 4 ranks: what passes over gloo passes over the backend."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "torchs_own.py"
EXACT = "Policy(None)"
UINT8 = "Policy(MinMaxUInt8(), least=0)"

pytestmark = [
    pytest.mark.slow,  # each test of torch forks 4 processes
    pytest.mark.timeout(1800),
    pytest.mark.skipif(importlib.util.find_spec("expecttest") is None, reason="torch's tests need expecttest"),
]

PARTS = ("0/3", "1/3", "2/3")

CANNOT = {
    "test_ddp_logging_data_cpu": "asserts that DDP logs the name gloo",
}
"""Tests that pass over gloo and cannot over the backend, and the reason."""

CANNOT_IN_8_BITS = CANNOT | dict.fromkeys(
    ("test_DistributedDataParallelCPU", "test_DistributedDataParallelCPU_grad_is_view"),
    "takes a second step, from weights that the rounding of the first has moved",
)


def outcomes(policy, folder, names=()):
    """Run torch's tests, all or some; return {name: (outcome, error)}."""
    command = [sys.executable, str(PROGRAM), policy, str(folder), *names]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""})
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"name"')]
    assert rows and done.returncode == 0, done.stderr[-2000:]
    return {row["name"]: (row["outcome"], row["why"]) for row in rows}


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("policy, cannot", [(EXACT, CANNOT), (UINT8, CANNOT_IN_8_BITS)], ids=["exact", "8 bits"])
def test_what_passes_over_gloo_passes_over_the_backend(policy, cannot, part, tmp_path):
    found = outcomes(policy, tmp_path / "ours", [part])
    failed = {name: why for name, (outcome, why) in found.items() if outcome == "failed" and name not in cannot}
    # A test that fails over gloo as well says nothing: torch's versions differ.
    control = outcomes("gloo", tmp_path / "gloo", failed) if failed else {}
    assert {name: why for name, why in failed.items() if control[name][0] == "passed"} == {}
    assert sum(outcome == "passed" for outcome, _ in found.values()) > len(failed)
