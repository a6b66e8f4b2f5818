"""Kernels of tutorials run as a stranger would run them: a file of tests, the plugin, and nothing of the repository."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
HERE = Path(__file__).parent


@pytest.mark.slow  # compiles kernels
@pytest.mark.timeout(900)
@pytest.mark.parametrize("arch", [80, 90, 100])
def test_kernels_of_tutorials(arch, tmp_path):
    shutil.copy(HERE / "kernels_of_tutorials.py", tmp_path / "test_kernels.py")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "TRITON_"))}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "ptx.plugin", "--ptx", str(arch), "test_kernels.py"],
        cwd=tmp_path,
        env=environment | {"PYTHONPATH": str(HERE.parents[1])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert f"sm_{arch} executed 8 launches" in done.stdout
