"""The network laboratory leaves nothing behind, whoever dies: its body, its owner, or its owner's undertaker."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from laboratory import ROOT, needs_root, within

from bench.netlab import Lab
from bench.netlab.owners import started, sweep


def traces():
    """The laboratories' namespaces, and the interfaces of the machine itself."""
    folder = Path("/run/netns")
    spaces = {path.name for path in folder.glob("netlab.*")} if folder.is_dir() else set()
    return spaces, set(os.listdir("/sys/class/net"))


@pytest.fixture
def nothing_left():
    sweep()
    before = traces()
    yield before
    assert traces() == before


@needs_root
def test_a_laboratory_leaves_nothing(nothing_left):
    with Lab(2, "100mbit") as lab:
        assert len(traces()[0]) == len(nothing_left[0]) + 3  # two hosts and the switch
        assert traces()[1] == nothing_left[1]
        sleeper = lab.start(["sleep", "1000"])
    assert all(process.poll() is not None for process in sleeper.processes)


OWNER = """
import sys
from bench.netlab import Lab
with Lab(2) as lab:
    ranks = lab.start(["sh", "-c", "(sleep 1000 & sleep 1000)"])
    print(*(process.pid for process in ranks.processes), flush=True)
    ranks.wait()
"""


def owner():
    """A process with a laboratory in which commands run; and their numbers."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER], env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    return process, [int(pid) for pid in process.stdout.readline().split()]


@needs_root
@pytest.mark.slow  # the owner imports torch
@pytest.mark.parametrize(
    "number", [signal.SIGINT, signal.SIGKILL, signal.SIGTERM], ids=["interrupted", "killed", "ended"]
)
def test_a_laboratory_goes_with_its_owner(nothing_left, number):
    process, ranks = owner()
    with process:
        assert len(ranks) == 2
        assert len(traces()[0]) == len(nothing_left[0]) + 3
        process.send_signal(number)
        process.wait(30)
    assert within(20, lambda: traces() == nothing_left)
    assert within(20, lambda: not alive(ranks))


def alive(pids):
    """Those that have not ended; a zombie has, and waits for somebody to ask how."""
    return [pid for pid in pids if started(pid) >= 0]
