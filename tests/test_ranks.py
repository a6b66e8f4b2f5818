"""Live ranks: what they return, show and refuse; calls have limits, and nothing outlives whoever made them."""

import linecache
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
from baguakit.ranks import RankError, live, serving
from baguakit.ranks.serving import Launcher

pytest.importorskip("cloudpickle")


@pytest.fixture(scope="module")
def ranks():
    with bk.Ranks(3) as ranks:
        yield ranks


def gone(pid, within=10.0):
    """Return whether a process has ended, or ends in time."""
    until = time.monotonic() + within
    while time.monotonic() < until:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


def test_a_closure_runs_on_every_rank_and_its_values_come_back_in_order(ranks):
    factor = 10

    def total(offset):
        comm = bk.Comm()
        return comm.rank, comm.size, float(comm.all_reduce(torch.tensor(factor * comm.rank + offset)))

    assert ranks.run(total, 0.5) == [(rank, 3, 31.5) for rank in range(3)]


def test_without_cloudpickle_what_the_program_defines_is_refused(ranks, monkeypatch):
    """The ranks would import another `__main__`, and not find it there."""

    class Mine:
        __module__, __qualname__ = "__main__", "Mine"

    monkeypatch.setattr(sys.modules["__main__"], "Mine", Mine, raising=False)
    for module in (live, serving):
        monkeypatch.setattr(module, "takes_closures", lambda: False)
    with pytest.raises(TypeError, match="what the program itself defines must stand in a module; for clos"):
        ranks.run(repr, Mine())
    assert ranks.run(str.upper, "__main__") == ["__MAIN__"] * 3  # which is only a word


def test_ranks_are_processes_of_their_own_and_stay(ranks):
    pids = ranks.run(os.getpid)
    assert len({*pids, os.getpid()}) == 4 and ranks.run(os.getpid) == pids


def test_what_ranks_print_is_shown_with_the_rank_in_front(ranks, capsys):
    def speak(rank_of):
        rank = rank_of()
        print("one\ntwo")
        print(f"loss {rank}", end="")
        print("50 %\r100 %", file=sys.stderr)
        os.system("echo from a child")  # not through Python at all

    ranks.run(speak, lambda: bk.Comm().rank)
    out, err = capsys.readouterr()
    for rank in range(3):
        said = [line for line in out.splitlines() if line.startswith(f"[{rank}] ")]
        assert said == [f"[{rank}] one", f"[{rank}] two", f"[{rank}] loss {rank}from a child"] or said == [
            f"[{rank}] one",
            f"[{rank}] two",
            f"[{rank}] from a child",
            f"[{rank}] loss {rank}",
        ]
    assert sorted(err.splitlines()) == [f"[{rank}] 100 %" for rank in range(3)]


def test_an_error_has_the_rank_and_its_own_traceback_and_nobody_hangs(ranks):
    def fail():
        if bk.Comm().rank == 1:
            raise ValueError("my own mistake")
        bk.primitives.mean_(torch.ones(1), bk.Comm())  # for ever, without rank 1

    before = ranks.run(os.getpid)
    began = time.monotonic()
    with pytest.raises(RankError) as caught:
        ranks.run(fail)
    assert time.monotonic() - began < 30
    assert caught.value.failures[1].startswith("Traceback (most recent call last):")
    assert 'raise ValueError("my own mistake")' in str(caught.value)
    assert "serving.py" not in str(caught.value)
    assert "on ranks 0, 2: it was still running 2 s after another rank failed" in str(caught.value)
    assert all(gone(pid) for pid in before)
    assert set(ranks.run(os.getpid)).isdisjoint(before)


def test_alike_errors_are_told_once(ranks):
    with pytest.raises(RankError, match=r"^on ranks 0, 1, 2: Traceback") as caught:
        ranks.run(lambda: 1 / 0)
    assert str(caught.value).count("ZeroDivisionError: division by zero") == 1


def test_tracebacks_show_the_source_of_code_that_is_in_no_file(ranks):
    cell = "def fail():\n    raise KeyError('in a cell')  # seen\n"
    linecache.cache["<cell 1>"] = (len(cell), None, cell.splitlines(True), "<cell 1>")
    namespace = {"__name__": "__main__"}
    exec(compile(cell, "<cell 1>", "exec"), namespace)
    with pytest.raises(RankError, match="# seen"):
        ranks.run(namespace["fail"])


def test_a_late_rank_shows_where_it_stands(ranks, capsys):
    def sleepy():
        if bk.Comm().rank == 2:
            time.sleep(100)

    with pytest.raises(RankError, match=r"^on rank 2: it was still running after 0.5 s$"):
        ranks.run(sleepy, limit=0.5)
    shown = capsys.readouterr().err.splitlines()
    assert any(line.startswith("[2]") and line.endswith(" in sleepy") for line in shown)
    assert not any(line.startswith(("[0]", "[1]")) for line in shown)


def test_a_rank_that_dies(ranks):
    def die():
        if bk.Comm().rank == 0:
            os._exit(7)
        return bk.Comm().rank

    ranks.run(os.getpid)  # all are connected then: another may not be yet when rank 0 is, and would fail as well
    with pytest.raises(RankError, match=r"^on rank 0: its process has ended$"):
        ranks.run(die)
    ranks.run(os.getpid)
    assert ranks.run(die, lost=[0]) == [None, 1, 2]
    assert ranks.run(lambda: bk.Comm().rank) == [0, 1, 2]  # made anew


def test_a_rank_that_was_to_die_and_does_not_is_ended_with_the_others(ranks):
    def slow():
        time.sleep(bk.Comm().rank)
        return "slow"

    before = ranks.run(os.getpid)
    assert ranks.run(slow, lost=[1, 2]) == ["slow", None, None]
    assert all(gone(pid) for pid in before) and ranks.run(lambda: "next") == ["next"] * 3


def test_ranks_import_what_the_caller_can_at_that_moment(ranks, tmp_path, monkeypatch):
    (tmp_path / "my_module_of_today.py").write_text("def answer():\n    return 42\n")
    monkeypatch.syspath_prepend(tmp_path)
    import my_module_of_today

    assert ranks.run(my_module_of_today.answer) == [42] * 3


def test_ranks_begin_in_the_folder_and_environment_of_the_caller(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MY_OWN", "yes")
    with bk.Ranks(1, threads=2) as one:
        assert one.run(lambda: (os.getcwd(), os.environ["MY_OWN"], torch.get_num_threads())) == [
            (str(tmp_path), "yes", 2)
        ]
        told = one.run(lambda: [os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")])
        assert told == [["0", "1", "0", "1"]]


SCRIPT = """
import os, signal, sys, threading, time
import torch
import baguakit as bk

print("read", flush=True)
ranks = bk.Ranks(2)
everyone = ranks.run(os.getpid) + ranks.run(os.getppid)

def deaf():
    if bk.Comm().rank == 0:
        time.sleep(100)
    bk.primitives.mean_(torch.ones(1), bk.Comm())  # waits in C++, where no signal is heard

threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    ranks.run(deaf)
except KeyboardInterrupt:
    print("interrupted", flush=True)
print("processes", *everyone, *ranks.run(os.getpid), flush=True)
threading.Thread(target=ranks.run, args=(deaf,), daemon=True).start()
time.sleep(0.3)  # the ranks are at work when this process ends
if sys.argv[1] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.timeout(180)  # fresh processes import torch, on a busy machine
@pytest.mark.slow  # five processes import torch, twice
@pytest.mark.parametrize("end, status", [("killed", -signal.SIGKILL), ("ended", 0)])
def test_no_process_outlives_the_script_and_an_interrupt_ends_only_the_call(tmp_path, end, status):
    """However the script ends. And it is read once, without `if __name__ == "__main__"`."""
    script = tmp_path / "script.py"
    pytest.importorskip("cloudpickle")  # which sends what a script defines
    script.write_text(SCRIPT)
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    paths = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run([sys.executable, script, end], env=environment, **options)
    assert done.returncode == status, done.stderr
    read, interrupted, processes = done.stdout.splitlines()
    assert (read, interrupted) == ("read", "interrupted")
    assert "[0]" in done.stderr and " in deaf" in done.stderr  # where they stood
    pids = [int(pid) for pid in processes.split()[1:]]
    assert len(set(pids)) == 5 and all(gone(pid) for pid in pids)  # two ranks, the launcher, two ranks


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


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # sockets of the rank that never was
def test_an_interrupt_in_the_first_fork_leaves_no_rank_and_does_not_hang(monkeypatch, capfd):
    def interrupted(*_):
        raise SystemExit(130)

    monkeypatch.setattr(Launcher, "fork", interrupted)
    with bk.Ranks(2) as fresh, pytest.raises(SystemExit):
        fresh.run(os.getpid)
    monkeypatch.undo()
    with bk.Ranks(1) as fresh:
        assert fresh.run(os.getpid) != [os.getpid()]
    assert "Traceback" not in capfd.readouterr().err


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
    for call, words in (
        (lambda: bk.Ranks(2, threads=2.0), r"threads is a whole number, 1 to 32768, not 2\.0"),
        (lambda: bk.Ranks(2, cuda="no"), "cuda is True or False, not 'no'"),
        *([] if torch.cuda.is_available() else [(lambda: bk.Ranks(2, cuda=True), "torch finds none")]),
        (lambda: ranks.run(os.getpid, lost=[0, 3]), "a rank in lost is a whole number, 0 to 2, not 3"),
        (lambda: ranks.run(os.getpid, lost=1), "lost is a sequence of ranks, not 1"),
        (lambda: ranks.run(3), "run takes a function and its arguments, not 3; leave out the parentheses"),
        (lambda: ranks.run(lambda: ranks.size), r"use bk.Comm\(\).rank and bk.Comm\(\).size there"),
        (lambda: ranks.run(print, threading.Lock()), "cannot be sent to the ranks: cannot pickle"),
        (
            lambda: ranks.run(lambda: (i for i in range(3))),
            r"the result of the function cannot be sent \(.*\); return tensors",
        ),
    ):
        with pytest.raises((TypeError, ValueError, RankError), match=words):
            call()


ASKS = """
import importlib, torch
def asked(*args, **options):
    raise AssertionError("a process that has asked CUDA anything cannot be forked for ranks on GPUs")
for name in ("is_available", "device_count", "current_device", "get_device_properties", "_lazy_init"):
    setattr(torch.cuda, name, asked)
from baguakit.ranks.serving import PRELOADED
for name in PRELOADED:
    importlib.import_module(name)
"""


@pytest.mark.slow
def test_the_launcher_asks_cuda_nothing_before_it_forks():
    done = subprocess.run([sys.executable, "-c", ASKS], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
