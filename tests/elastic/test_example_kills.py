"""examples/elastic.py with ranks that are killed at random moments, and as the program that its docstring starts."""

import os
import random
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest
from crew import crew
from elasticity import EVERY, FOR_EVER, PROGRAM, Rank, begins, elastic, run, wait_for

pytest.importorskip("sklearn")

ROOT = Path(__file__).parents[2]


@pytest.mark.slow  # twenty-four processes start
@pytest.mark.timeout(900)
def test_twenty_kills_at_random_moments(tmp_path):
    """Half of them while a rank starts, half while all train: every step is made, in order, and training begins once.

    The last step of a rank that is killed may be made again, if no other had made it. For every rank that is killed,
    the line of one step may be missing: rank 0, which prints, was killed before it did, or had not made the step when
    the group broke, and took the state of a rank that had.
    """
    chance, folder, killed = random.Random(0), tmp_path / "killed", []
    with crew("") as store:
        ranks = [Rank(store, folder, FOR_EVER) for _ in range(4)]

        def all_train():
            return all(joined(rank) for rank in ranks) and any(rank.steps and rank.steps[-1][2] == 4 for rank in ranks)

        wait_for(all_train, ranks)
        for kill in range(20):
            if kill % 2:
                wait_for(all_train, ranks)
                time.sleep(chance.random())
            else:
                time.sleep(3 * chance.random())
            trained = [rank for rank in ranks if joined(rank)]
            killed.append(chance.choice([rank for rank in ranks if [rank] != trained]))  # one that has trained lives
            ranks.remove(killed[-1])
            killed[-1].kill()
            ranks.append(Rank(store, folder, FOR_EVER))
        wait_for(all_train, ranks)
        reached = max(rank.steps[-1][0] for rank in ranks if rank.steps)
        wait_for(lambda: next(elastic().complete(folder))[0] > reached + EVERY, ranks)
        for each in ranks:
            each.kill()
        every = killed + ranks

    made = [step for rank in every for step, *_ in (rank.steps[:-1] if rank in killed else rank.steps)]
    last = {rank.steps[-1][0] for rank in killed if rank.steps}
    assert len(set(made)) == len(made)
    assert len(set(range(max(made))) - last.union(made)) <= len(killed)
    assert set(range(max(made))) <= {step for rank in every for step in rank.begun}
    assert all(after in (before, before + 1) for rank in every for before, after in pairwise(rank.begun))
    assert [line.partition(" ranks ")[2] for rank in every for line in begins(rank.lines)] == [
        "begin at step 0, saved by 0"
    ]

    (at, by), *_ = elastic().complete(folder)
    assert begins(run(2, folder, at + 2 * EVERY)) == [f"2 ranks begin at step {at}, saved by {by}"]


def joined(rank):
    """Return whether a rank has begun to train."""
    return any(line.startswith("joined as rank") for line in rank.lines)


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
