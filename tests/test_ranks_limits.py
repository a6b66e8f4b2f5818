"""Live ranks: where they listen, how long a call may take, and which arguments are refused."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

import baguakit as bk
from baguakit.ranks import RankError

pytest.importorskip("cloudpickle")


@pytest.fixture(scope="module")
def ranks():
    with bk.Ranks(3) as ranks:
        yield ranks


def listening(pids):
    """Yield the addresses, in hexadecimal, on which processes listen."""
    links = [os.path.basename(os.path.realpath(link)) for pid in pids for link in Path(f"/proc/{pid}/fd").iterdir()]
    own = {link.removeprefix("socket:[").removesuffix("]") for link in links if link.startswith("socket:[")}
    for table in ("tcp", "tcp6"):
        for row in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = row.split()[:10]
            if state == "0A" and inode in own:
                yield local.partition(":")[0]


@pytest.mark.skipif(sys.platform != "linux", reason="sockets are looked up in /proc")
def test_ranks_listen_on_the_loopback_only(monkeypatch):
    """Also where the caller's environment names other interfaces: all ranks are on this machine."""
    if any(name == "eth0" for _, name in socket.if_nameindex()):
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")

    def listen():
        comms = bk.Comm(), bk.Comm(flows=2)
        kept.extend(comms)
        return [float(comm.all_reduce(torch.ones(1))) for comm in comms]

    kept = []
    with bk.Ranks(3) as ranks:
        assert ranks.run(listen) == [[3.0, 3.0]] * 3
        pids = {os.getpid(), *ranks.run(os.getpid), *ranks.run(os.getppid)}
        found = list(listening(pids))
    assert len(found) >= 4 and set(found) == {"0100007F"}


def late(ranks, rank, function, *args):
    """Check that the limit of a call ends it, and that it was this rank that was late."""
    ranks.run(os.getpid)  # they have started
    began = time.monotonic()
    with pytest.raises(RankError) as caught:
        ranks.run(function, *args, limit=1)
    assert caught.value.failures[rank] == "it was still running after 1 s" and time.monotonic() - began < 60


@pytest.mark.slow
def test_a_limit_holds_while_an_answer_is_packed(ranks):
    class Slow:
        def __reduce__(self):
            time.sleep(100)

    late(ranks, 1, lambda: Slow() if bk.Comm().rank == 1 else None)


def test_a_limit_holds_while_a_rank_writes_without_end(ranks):
    late(ranks, 1, lambda: os.system("yes") if bk.Comm().rank == 1 else None)


@pytest.mark.slow
def test_a_limit_holds_while_a_call_is_sent(ranks):
    stopped, text = ranks.run(os.getpid)[2], "x" * (1 << 22)  # more than its line holds
    os.kill(stopped, signal.SIGSTOP)
    with pytest.raises(RankError) as caught:
        ranks.run(len, text, limit=1)
    assert caught.value.failures[2] == "it was still running after 1 s"
    assert ranks.run(len, text) == [1 << 22] * 3


def test_huge_answers_come_whole(ranks):
    answers = ranks.run(lambda: torch.arange(3_000_000) + bk.Comm().rank)
    assert [int(answer[-1]) for answer in answers] == [2_999_999, 3_000_000, 3_000_001]


def test_closed_ranks_say_so():
    with bk.Ranks(1) as one:
        assert repr(one) == "Ranks(1)" and one.run(os.getpid)
        assert repr(one) == "Ranks(1)"
    assert repr(one) == "<Ranks(1), closed: run() starts new processes>"
    assert one.run(os.getpid) and repr(one) == "Ranks(1)"
    one.close()


def test_refusals_are_sentences(ranks):
    for size in (0, -1, 2.0, True, "4", float("nan"), torch.tensor(2)):
        with pytest.raises((TypeError, ValueError), match=r"size is a whole number, 1 or more, not "):
            bk.Ranks(size)
    for late in (0, -1.0, float("nan"), float("inf"), 1e300, True, "4"):
        with pytest.raises((TypeError, ValueError), match=r"timeout is a finite number, .*, not "):
            bk.Ranks(2, timeout=late)
        with pytest.raises((TypeError, ValueError), match=r"limit is a finite number, .*, not "):
            ranks.run(os.getpid, limit=late)
    with pytest.raises(TypeError, match=r"threads is a whole number, 1 to 32768, not 2\.0"):
        bk.Ranks(2, threads=2.0)
    with pytest.raises(TypeError, match="cuda is True or False, not 'no'"):
        bk.Ranks(2, cuda="no")
    with pytest.raises(TypeError, match="keep is True or False, not 1"):
        ranks.run(os.getpid, keep=1)
    with pytest.raises(ValueError, match="a rank in lost is a whole number, 0 to 2, not 3"):
        ranks.run(os.getpid, lost=[0, 3])
    with pytest.raises(TypeError, match="steps is an iterable such as a range or a loader, not 3"):
        bk.ranks.progress(3)
    with pytest.raises(TypeError, match="label is a string, not 3"):
        bk.ranks.progress(range(3), 3)
    with pytest.raises(ValueError, match="total is a whole number, 0 or more, not -1"):
        bk.ranks.progress(range(3), total=-1)
    with pytest.raises(TypeError, match="lost is a sequence of ranks, not 1"):
        ranks.run(os.getpid, lost=1)
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="torch finds none"):
            bk.Ranks(2, cuda=True)
    with pytest.raises(TypeError, match="run takes a function and its arguments, not 3; leave out the parentheses"):
        ranks.run(3)
    with pytest.raises(TypeError, match=r"use bk.Comm\(\).rank and bk.Comm\(\).size there"):
        ranks.run(lambda: ranks.size)
    with pytest.raises(TypeError, match="cannot be sent to the ranks: cannot pickle"):
        ranks.run(print, threading.Lock())
    with pytest.raises(RankError, match=r"the result of the function cannot be sent \(.*\); return tensors"):
        ranks.run(lambda: (i for i in range(3)))


ASKS = """
import importlib, torch
def asked(*args, **options):
    raise AssertionError("a process that has asked CUDA anything cannot be forked for ranks on GPUs")
for name in ("is_available", "device_count", "current_device", "get_device_properties", "_lazy_init"):
    setattr(torch.cuda, name, asked)
from baguakit.ranks.launcher import PRELOADED
for name in PRELOADED:
    importlib.import_module(name)
"""


@pytest.mark.slow
def test_the_launcher_asks_cuda_nothing_before_it_forks():
    done = subprocess.run([sys.executable, "-c", ASKS], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_too_many_ranks_for_the_limit_of_open_files_is_a_sentence():
    """Before any process starts. A limit of this process is inherited by the ranks."""
    import resource

    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (300, before[1]))
    try:
        with bk.Ranks(64) as ranks, pytest.raises(OSError) as caught:
            ranks.run(os.getpid)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert str(caught.value).startswith("64 ranks need up to ")
    assert "and the limit is 300; set it by `ulimit -n " in str(caught.value)
