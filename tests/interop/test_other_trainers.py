"""docs/with_other_trainers.md: its programs run on two ranks, where accelerate and transformers are installed."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAMS = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "with_other_trainers.md").read_text(), re.S)
ALIKE = """
weights = bk.Comm().gather_objects([p.tolist() for p in model.parameters()])
assert weights[0] == weights[1]
print("alike")
"""


@pytest.mark.slow  # two processes import them
@pytest.mark.timeout(300)
@pytest.mark.parametrize("program", PROGRAMS, ids=["accelerate", "weights", "transformers"])
def test_replicas_are_alike(program, tmp_path):
    for module in ("accelerate", "transformers"):
        if module in program and not find_spec(module):
            pytest.skip(f"{module} is not installed")
    script = tmp_path / "train.py"
    script.write_text(program + ALIKE)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(script)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("alike") == 2
