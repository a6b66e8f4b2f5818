"""A user's program outside the checkout: it runs, and mypy and pyright find the types of all that it uses.

`user.py` holds the program. The package is seen as it is installed: here, an editable install.
"""

import json
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.slow,  # each begins with an empty cache, and reads or compiles much of torch: about 15 s
    pytest.mark.skipif(find_spec("mypy") is None, reason="needs mypy: pip install 'baguakit[test]'"),
]


@pytest.fixture
def user(tmp_path, monkeypatch):
    """A copy of the program in a folder from which nothing leads to the checkout."""
    for name in ("PYTHONPATH", "MYPYPATH"):
        monkeypatch.delenv(name, raising=False)
    return Path(shutil.copy(Path(__file__).with_name("user.py"), tmp_path))


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
    pytest.importorskip("basedpyright", reason="needs basedpyright: pip install 'baguakit[release]'")
    settings = {"typeCheckingMode": "strict", "include": [user.name]}  # a type that is unknown is an error
    (user.parent / "pyrightconfig.json").write_text(json.dumps(settings))
    status, text = output(user, sys.executable, "-m", "basedpyright", "--pythonpath", sys.executable)
    assert (status, text.splitlines()[-1]) == (0, "0 errors, 0 warnings, 0 notes"), text
