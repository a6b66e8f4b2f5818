"""Live ranks: what they return, show and refuse, and that nothing of them outlives whoever made them."""

import linecache
import os
import signal
import subprocess
import sys
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


def test_what_is_kept_lives_as_long_as_the_process(ranks):
    def count(kept, by):
        kept["n"] = kept.get("n", 0) + by
        return kept["n"]

    first = ranks.run(count, 2, keep=True)[0]
    assert ranks.run(count, 3, keep=True) == [first + 3] * 3
    ranks.close()
    assert ranks.run(count, 2, keep=True) == [2] * 3


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


def test_progress_is_a_bar_for_each_rank(ranks, capsys):
    pytest.importorskip("tqdm")

    def train():
        steps = bk.ranks.progress(range(5), "training") if bk.Comm().rank < 2 else range(5)
        return list(steps)

    assert ranks.run(train) == [[0, 1, 2, 3, 4]] * 3
    shown = capsys.readouterr().err
    assert "[0] training: 100%" in shown and "[1] training: 100%" in shown and "[2]" not in shown
    assert list(bk.ranks.progress(range(3))) == [0, 1, 2]  # elsewhere it only yields
    assert capsys.readouterr().err == ""


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
