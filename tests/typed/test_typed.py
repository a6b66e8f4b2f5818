"""A user's program outside the checkout: it runs, and mypy and pyright find the types of all that it uses.

`user.py` holds the program, and `wrong.py` calls that they refuse. The package is seen as it is installed: here, an
editable install.
"""

import json
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from commands import ROOT, blocks_of

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.slow,  # each begins with an empty cache, and reads or compiles much of torch: about 15 s
    pytest.mark.skipif(find_spec("mypy") is None, reason="needs mypy: pip install '.[test]'"),
]


@pytest.fixture
def user(tmp_path, monkeypatch):
    """A copy of the program in a folder from which nothing leads to the checkout."""
    return outside("user.py", tmp_path, monkeypatch)


@pytest.fixture
def wrong(tmp_path, monkeypatch):
    """A copy of the calls that are refused."""
    return outside("wrong.py", tmp_path, monkeypatch)


def outside(name, folder, monkeypatch):
    for variable in ("PYTHONPATH", "MYPYPATH"):
        monkeypatch.delenv(variable, raising=False)
    return Path(shutil.copy(Path(__file__).with_name(name), folder))


def calls(program):
    """Return the numbers of the lines that call the package."""
    lines = program.read_text().splitlines()
    return [number for number, line in enumerate(lines, start=1) if line.startswith("bk.")]


def pyright(program, **settings):
    """Return the status and the output of pyright in the folder of a program."""
    pytest.importorskip("basedpyright", reason="needs basedpyright: pip install '.[release]'")
    (program.parent / "pyrightconfig.json").write_text(json.dumps({"include": [program.name]} | settings))
    return output(program, sys.executable, "-m", "basedpyright", "--pythonpath", sys.executable)


def output(user, *command):
    """Return the status and the output of a program in the user's folder."""
    ran = subprocess.run(command, cwd=user.parent, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return ran.returncode, ran.stdout


def test_the_program_runs(user):
    status, text = output(user, sys.executable, user.name)
    assert status == 0 and "KeyError: \\'no such name\\'" in text.splitlines()[-2], text


def test_mypy_finds_all_types(user):
    status, text = output(user, sys.executable, "-m", "mypy", "--strict", "--no-incremental", user.name)
    assert (status, text.strip()) == (0, "Success: no issues found in 1 source file")


def test_pyright_finds_all_types(user):
    status, text = pyright(user, typeCheckingMode="strict")  # a type that is unknown is an error
    assert (status, text.splitlines()[-1]) == (0, "0 errors, 0 warnings, 0 notes"), text


def test_mypy_refuses_every_wrong_call(wrong):
    _, text = output(wrong, sys.executable, "-m", "mypy", "--no-incremental", wrong.name)
    assert {int(line) for line in re.findall(r"wrong\.py:(\d+): error", text)} == {*calls(wrong)}, text


def test_pyright_refuses_every_wrong_call(wrong):
    _, text = pyright(wrong, typeCheckingMode="basic")
    assert {int(line) for line in re.findall(r"wrong\.py:(\d+):\d+ - error", text)} == {*calls(wrong)}, text


def test_pyright_finds_nothing_in_the_programs_of_the_readme(user):
    """Among its findings are names that may not have been bound."""
    programs = blocks_of(ROOT / "README.md")
    for i, program in enumerate(programs):
        (user.parent / f"program_{i}.py").write_text(program)
    status, text = pyright(user, typeCheckingMode="standard", include=["program_*.py"])
    assert programs and status == 0, text
