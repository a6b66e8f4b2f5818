"""Kernels of tutorials run as a stranger would run them: a file of tests, the plugin, and nothing of the repository."""

import os
import re
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
    assert f"sm_{arch} executed 8 launches" in tested(tmp_path, arch)


@pytest.mark.slow  # compiles a kernel
@pytest.mark.timeout(900)
def test_the_test_of_the_readme(tmp_path):
    [code] = re.findall(r"^```python\n(.*?)^```$", (HERE.parent / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    shutil.copy(HERE / "kernels_of_tutorials.py", tmp_path)
    names = "import torch\nimport triton\nfrom kernels_of_tutorials import softmax_kernel\n"
    (tmp_path / "test_kernels.py").write_text(names + code)
    assert "sm_90 executed 1 launch" in tested(tmp_path, 90)


def tested(folder, arch):
    """Return what pytest prints of `test_kernels.py` in a folder, where all tests pass."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "TRITON_"))}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "ptx.plugin", "--ptx", str(arch), "test_kernels.py"],
        cwd=folder,
        env=environment | {"PYTHONPATH": str(HERE.parents[1])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout
