"""docs/backend.md: its programs run on two ranks, and fly compressed."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAMS = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs" / "backend.md").read_text(), re.MULTILINE | re.DOTALL)
NAMES = ["DDP", "exact", "policy", "FSDP2", "tensor parallel", "transformers", "lightning"]


@pytest.mark.slow  # two processes import torch, and other libraries
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name, program", list(zip(NAMES, PROGRAMS, strict=True)), ids=NAMES)
def test_programs_fly(name, program, tmp_path):
    if f"import {name}" in program.replace("from ", "import ") and not find_spec(name):
        pytest.skip(f"{name} is not installed")
    (tmp_path / "train.py").write_text(program)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "train.py"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    if "print(" in program:
        assert "MinMaxUInt8()" in done.stdout
        assert done.stderr.count("baguakit: Policy(MinMaxUInt8()) on 2 ranks") == 1
