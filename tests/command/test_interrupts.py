"""Ctrl-C in each subcommand: status 130, no traceback, and no process, namespace or temporary file is left."""

import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RUN = [sys.executable, "-m", "baguakit"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", "baguakit"]
MARK = "BAGUAKIT_TEST_MARK"

# Every one imports torch in fresh processes, which takes seconds.
pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="processes are found in /proc")]


def marked(mark):
    """The processes that have inherited an environment variable."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if f"{MARK}={mark}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                found.append(int(pid))
        except OSError:  # it has ended
            pass
    return found


def interrupted(command, words, tmp_path, everyone=False):
    """Start a command, wait until it has printed `words`, interrupt it, and return its status and output."""
    mark, folder = uuid.uuid4().hex, tmp_path / "tmp"
    folder.mkdir()
    environment = {**os.environ, MARK: mark, "TMPDIR": str(folder), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path / "cache")  # which torch keeps on purpose
    for name in ("RANK", "WORLD_SIZE"):
        environment.pop(name, None)
    process = subprocess.Popen(
        command,
        env=environment,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    said = ""
    while words not in said:
        line = process.stdout.readline()
        assert line, said
        said += line
    if everyone:  # as a terminal does
        os.killpg(process.pid, signal.SIGINT)
    else:
        process.send_signal(signal.SIGINT)
    said += process.communicate(timeout=100)[0]
    until = time.monotonic() + 30
    while left := marked(mark):
        assert time.monotonic() < until, left
        time.sleep(0.02)
    left = [path.name for path in folder.iterdir() if not path.name.startswith("torchelastic_")]  # torchrun's logs
    assert left == []
    return process.returncode, said


@pytest.mark.parametrize(
    "words, after",
    [
        (["doctor"], "gloo"),
        (["demo", "--ranks", "2", "--steps", "100000"], "----"),
        (["demo", "--ranks", "2", "--steps", "100000", "--rate", "50mbit"], "----"),
        (["compare", "--hosts", "2", "--steps", "100000", "--against", ""], "0%: DDP"),
    ],
    ids=["doctor", "demo", "demo --rate", "compare"],
)
def test_an_interrupt_ends_all(words, after, tmp_path):
    status, said = interrupted([*RUN, *words], after, tmp_path, everyone=False)
    assert status == 130 and "Traceback" not in said and "Error" not in said


@pytest.mark.parametrize("words", [["probe"], ["plan", "model_of_a_user:model"]])
def test_an_interrupt_ends_the_ranks_of_torchrun(words, tmp_path):
    (tmp_path / "model_of_a_user.py").write_text("import torch\ndef model():\n    return torch.nn.Linear(3, 3)\n")
    command = [*TORCHRUN, *words, "--seconds", "1000"]
    assert "baguakit/command" not in interrupted(command, "Measuring", tmp_path, everyone=True)[1]
