"""examples/elastic.py: whoever is killed, the others go on; if all are, the next go on from the newest checkpoint."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from crew import crew
from elasticity import EVERY, FOR_EVER, PROGRAM, Rank, alone, begins, elastic, leader_of, losses, run, wait_for

pytest.importorskip("sklearn")


@pytest.mark.slow
def test_ranks_come_and_go_and_every_loss_is_that_of_a_run_in_one_process(tmp_path):
    """One of two ranks is killed, another comes and leaves: each step is one of as many ranks as were there."""
    folder, algorithm = tmp_path / "checkpoints", ("--algorithm", "gradient_allreduce()")
    with crew("") as store:
        both = [Rank(store, folder, FOR_EVER, *algorithm) for _ in range(2)]
        leader = leader_of(both, 2)
        victim = next(rank for rank in both if rank is not leader)
        victim.kill()
        leader_of([leader], 1)
        wait_for(lambda: list(elastic().complete(folder)), both)  # which the next one must not load
        new = Rank(store, folder, FOR_EVER, *algorithm)
        leader_of([leader], 2)
        assert new.leave() == 0
        leader_of([leader], 1)
        assert leader.leave() == 0
        steps, found, sizes = zip(*leader.steps, strict=True)
        assert steps == tuple(range(len(steps)))
        assert list(found) == alone(sizes)
        changes = [line for line in leader.lines if line.startswith("Change(")]
        assert len(changes) >= 3 and "ranks have joined" in changes[-2] and "has left" in changes[-1]
        assert len(begins(leader.lines)) == 1 and not begins(new.lines)


@pytest.mark.slow
def test_when_all_are_killed_the_next_go_on_as_if_nothing_had_been(tmp_path):
    """Both ranks are killed, and the store; every loss is that of a run that nobody disturbed."""
    folder, steps = tmp_path / "killed", 60
    with crew("") as store:
        both = [Rank(store, folder, FOR_EVER, "--least", 2) for _ in range(2)]
        leader = leader_of(both, 2)
        wait_for(lambda: leader.steps[-1][0] >= 25, both)
        for each in both:
            each.kill()
        first = leader.lines
    (at, by), *_ = elastic().complete(folder)
    again = run(2, folder, max(steps, at + EVERY), "--least", 2)
    assert (begins(first), by) == (["2 ranks begin at step 0, saved by 0"], 2)
    assert begins(again) == [f"2 ranks begin at step {at}, saved by 2"] and at >= 20
    found = losses(first + again)
    assert all(len(each) == 1 for each in found.values())
    assert found == losses(run(2, tmp_path / "whole", len(found)))


def test_a_checkpoint_counts_once_all_its_files_are_there(tmp_path):
    program = elastic()
    for name in (
        "000010/0-of-1.pt",
        "000020/0-of-2.pt",
        "000020/1-of-2.pt",
        "000030/0-of-2.pt",
        "000030/1-of-2.tmp",
        "000030/1-of-3.pt",
        "000040/1-of-2.pt",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert list(program.complete(tmp_path)) == [(20, 2), (10, 1)]
    assert program.newest(tmp_path) == (20, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["000010", "000020"]


def test_what_is_older_than_the_checkpoints_kept_is_removed(tmp_path):
    """Unfinished ones too, which a change of the group leaves."""
    program = elastic()
    program.save(tmp_path, 10, 0, 1, {})
    program.save(tmp_path, 20, 1, 2, {})  # its other half was lost
    program.save(tmp_path, 30, 0, 1, {})
    program.save(tmp_path, 40, 1, 2, {})
    assert len(list(tmp_path.iterdir())) == 4  # two are complete, 30 and 10
    program.save(tmp_path, 40, 0, 2, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["000030", "000040"]


@pytest.mark.slow
def test_other_numbers_of_ranks_go_on(tmp_path):
    """Four ranks, then two, then three: each begins where the others ended."""
    said = [begins(run(n, tmp_path / "checkpoints", steps)) for n, steps in ((4, 20), (2, 40), (3, 60))]
    assert said == [
        ["4 ranks begin at step 0, saved by 0"],
        ["2 ranks begin at step 20, saved by 4"],
        ["3 ranks begin at step 40, saved by 2"],
    ]


ROOT = Path(__file__).parents[2]


@pytest.mark.slow  # two programs import torch and scikit-learn
def test_the_program_trains_to_the_end_and_leaves_at_sigterm(tmp_path):
    """As a shell starts it: one process trains to the end, another is told to stop, and both end with status 0."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    with crew("") as store:
        command = [sys.executable, PROGRAM, "--endpoint", store.address, "--folder", tmp_path / "saved"]
        options = {"env": environment, "stdout": subprocess.PIPE, "text": True}
        with subprocess.Popen([*command, f"--steps={FOR_EVER}"], **options) as stopped:
            assert any(line.startswith("step 25 ") for line in stopped.stdout)
            stopped.send_signal(signal.SIGTERM)
            stopped.communicate(timeout=90)
            assert stopped.returncode == 0
        ended = subprocess.run([*command, "--steps=60"], capture_output=True, text=True, env=environment, check=True)
    assert "Traceback" not in ended.stderr
    assert begins(ended.stdout.splitlines())[0].startswith("1 ranks begin at step ")
    assert sorted(path.name for path in (tmp_path / "saved").iterdir())[-1] >= "000060"
