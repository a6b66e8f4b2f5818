"""`scripts/versions`: its environments are those that the package promises, and its table tells what happened."""

import ctypes
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "scripts"))
import without_cuda  # noqa: E402
from versions_list import COMPILED, ENVIRONMENTS, TESTS  # noqa: E402

PROJECT = (ROOT / "pyproject.toml").read_text()
BY_NAME = {each.name: each for each in ENVIRONMENTS}


def test_the_oldest_and_the_newest_versions_are_those_of_the_project():
    floors = dict(re.findall(r'^ *"(numpy|torch|triton)>=([\d.]+)', PROJECT, re.MULTILINE))
    assert {f"{name}=={version}" for name, version in floors.items()} < {*BY_NAME["oldest"].packages}
    assert BY_NAME["triton"].packages == (f"triton=={floors['triton']}",)
    pythons = re.findall(r"Python :: (3\.\d+)", PROJECT)
    assert (BY_NAME["oldest"].python, BY_NAME["newest"].python) == (pythons[0], pythons[-1])
    assert f'requires-python = ">={pythons[0]}"' in PROJECT


def test_the_tests_named_are_there():
    assert all((ROOT / path).exists() for path in TESTS)
    assert all([*ROOT.glob(pattern)] for pattern in COMPILED)


LIBRARY = "int cuOne(void); int cuTwo(void); int three(void) { return cuOne() + cuTwo(); }"


def test_a_library_that_needs_cuda_is_loaded_and_told_of_errors(tmp_path):
    """One function has a version in its name, as those of CUDA have, and one has none."""
    (tmp_path / "real").mkdir()
    (tmp_path / "real.c").write_text("int cuOne(void) { return 0; } int cuTwo(void) { return 0; }")
    (tmp_path / "versions").write_text("libcutest.so.13 { cuOne; };\n")
    (tmp_path / "user.c").write_text(LIBRARY)

    def cc(*words):
        subprocess.run(["cc", "-shared", "-fPIC", *map(str, words)], cwd=tmp_path, check=True)

    cc("real.c", "-Wl,--version-script=versions", "-Wl,-soname=libcutest.so.13", "-o", "real/libcutest.so.13")
    cc("user.c", "-Wl,-rpath,$ORIGIN", "real/libcutest.so.13", "-o", "libuser.so")
    with pytest.raises(OSError, match=r"libcutest\.so\.13"):
        ctypes.CDLL(str(tmp_path / "libuser.so"))
    assert without_cuda.needed([tmp_path / "libuser.so"]) == {
        "libcutest.so.13": {"": {"cuTwo"}, "libcutest.so.13": {"cuOne"}}
    }
    assert without_cuda.main(tmp_path) == 0
    assert ctypes.CDLL(str(tmp_path / "libuser.so")).three() == 2 * without_cuda.ERROR
