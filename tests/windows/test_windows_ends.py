"""Errors of windows, what a window leaves behind, and ranks that end."""

import os
import signal
import threading
import time

import pytest
import torch
from around import meet, neighbours
from pool import ranks

import baguakit as bk
from baguakit.ranks import Ranks
from baguakit.topology import FullyConnected, OnePeerExponential, Ring


def errors():
    comm = bk.Comm()
    x = torch.zeros(3)
    for wrong, kind, words in [
        (lambda: bk.Window(x, OnePeerExponential(), comm), ValueError, "topology is one whose rounds are all the same"),
        (
            lambda: bk.Window(torch.zeros(3, dtype=torch.int64), Ring(), comm),
            TypeError,
            "tensors is float32, bfloat16, float16 or float64",
        ),
        (lambda: bk.Window([], Ring(), comm), ValueError, r"a list of them, with at least one value, not \[\]"),
        (lambda: bk.Window(torch.zeros(0), Ring(), comm), ValueError, "a list of them, with at least one value"),
        (lambda: bk.Window(x, Ring(), 3), TypeError, "comm is a bk.Comm or None, not 3"),
        (lambda: bk.Window(x, Ring(), comm, timeout=0.0), ValueError, "timeout is a finite number, greater than 0"),
        (lambda: bk.Window(torch.zeros(3 + comm.rank), Ring(), comm), ValueError, "differ: .* on rank 0, .* on 1"),
    ]:
        with pytest.raises(kind, match=words):
            wrong()
    with bk.Window(x, Ring(), comm) as w:
        across = (comm.rank + 2) % comm.size
        for wrong, kind, words in [
            (lambda: w.put(dst_weights=[across]), ValueError, f"dst_weights names {across}, which does not hear"),
            (lambda: w.get([across]), TypeError, "src_weights is a dict of a whole number"),
            (lambda: w.get({across: 1.0}), ValueError, f"src_weights names {across}, which this rank does not hear"),
            (lambda: w.fetch(comm.rank), ValueError, f"rank names {comm.rank}"),
            (lambda: w.update(0.5), ValueError, "self_weight=0.5 needs src_weights"),
            (lambda: w.put(torch.zeros(4)), ValueError, "values is tensors with the shapes"),
            (lambda: w.mutex([across]), ValueError, f"ranks names {across}, which is no neighbour"),
            (lambda: w.wait(-1), ValueError, "ahead is a whole number, 0 or more, not -1"),
        ]:
            with pytest.raises(kind, match=words):
                wrong()
        meet(comm)


def test_errors_name_what_is_at_fault():
    ranks(4, errors)


def alone():
    x = torch.ones(3)
    with bk.Window(x, Ring(), bk.Comm()) as w, w.mutex():
        w.put()
        w.accumulate(self_weight=0.5)
        w.get()
        w.update(staleness=0)
        w.collect()
        assert w.versions == w.pending == w.lost == {} and w.p == 0.5 and torch.equal(x, torch.full((3,), 0.5))
    return [each.name for each in threading.enumerate() if each.name == "baguakit window"]


def test_one_rank_is_alone():
    assert ranks(1, alone) == [[]]


def nothing_stays():
    comm, before = bk.Comm(), len(os.listdir("/proc/self/fd"))
    w = bk.Window(torch.zeros(3), Ring(), comm)
    w.put()
    meet(comm)
    del w
    meet(comm)
    left = [each.name for each in threading.enumerate() if each.name == "baguakit window"]
    return left, len(os.listdir("/proc/self/fd")) - before


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="the open files of a process are in /proc on Linux")
def test_a_window_that_nobody_holds_leaves_nothing():
    ranks(4, nothing_stays)  # the first makes what the process keeps
    assert ranks(4, nothing_stays) == [([], 0)] * 4


def closed_at_once():
    comm, left = bk.Comm(), 0
    for i in range(20):
        w = bk.Window(torch.zeros(10), FullyConnected(), comm)
        if i % 2:
            w.put(wait=False)
        w.close()
        left += sum(each.name == "baguakit window" for each in threading.enumerate())
    return left


def test_a_window_that_is_closed_while_it_connects_has_no_thread_left():
    assert ranks(4, closed_at_once) == [0] * 4


# Ranks that end.


def with_one_lost(folder):
    """Let rank 1 end; return what the others are left with."""
    comm = bk.Comm()
    x = torch.full((3,), float(comm.rank), dtype=torch.float64)
    w = bk.Window(x, Ring(), comm, zero=True)
    w.put()
    meet(comm)
    if comm.rank == 1:
        os._exit(0)
    with w._memory.changed:
        at_edge = comm.rank in (0, 2)
        assert w._memory.changed.wait_for(lambda: (1 in w._memory.lost) == at_edge, 30)
    assert list(w.lost) == [1] * at_edge and "has ended" in w.lost.get(1, "has ended")
    with w.mutex(neighbours(comm)):
        w.accumulate(dst_weights=dict.fromkeys(neighbours(comm), 1 / 3), self_weight=1 / 3)
    w.wait()
    p = w.p
    w.update(reset=True)  # by the weights of those that live
    (folder / str(comm.rank)).touch()
    while len(list(folder.iterdir())) < 3:
        time.sleep(0.01)
    w.close()
    return p, x[0].item()


def test_the_edges_of_a_rank_that_ends_are_dropped_and_what_was_for_it_comes_back(tmp_path):
    with Ranks(4, timeout=60) as live:
        found = live.run(with_one_lost, tmp_path, lost=(1,))
    assert found[1] is None
    assert [found[r][0] for r in (0, 2, 3)] == pytest.approx([2 / 3, 2 / 3, 1 / 3])  # with what came back


def one_stopped(folder):
    """Stop rank 1 until all others have dropped it."""
    comm = bk.Comm()
    w = bk.Window(torch.ones(3), FullyConnected(), comm, timeout=3.0)
    w.put()
    (folder / f"pid{comm.rank}").write_text(str(os.getpid()))
    meet(comm)
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        while 1 not in w.lost:  # it may answer until it has stopped
            w.accumulate(dst_weights=[1], wait=True)
        assert "has not answered for 3.0 s" in w.lost[1] and w.pending[1] == 0
        (folder / f"dropped{comm.rank}").touch()
        while len(list(folder.glob("dropped*"))) < comm.size - 1:
            time.sleep(0.01)
        os.kill(int((folder / "pid1").read_text()), signal.SIGCONT)
    meet(comm)
    w.put()  # rank 1 learns that others have dropped it
    meet(comm)
    lost = w.lost
    meet(comm)
    w.close()
    return sorted(lost)


@pytest.mark.slow  # it waits for a timeout
def test_a_rank_that_does_not_answer_in_time_is_dropped(tmp_path):
    with Ranks(3, timeout=60) as live:
        assert live.run(one_stopped, tmp_path) == [[1], [0, 2], [1]]
