"""A rank dies, sleeps, raises or leaves: the others end in time, and the message names it."""

import os
import signal
import time

import pytest
from pool import Pool
from training import loss, net, sgd

TIMEOUT = 3.0
RULES = {
    "gradients": lambda bk: bk.algorithms.gradient_allreduce(),
    "awc": lambda bk: bk.algorithms.decentralized(bk.topology.Ring()),
    "local": lambda bk: bk.algorithms.local_sgd(every=2),
}


@pytest.fixture
def pool():
    pool = Pool(3)
    yield pool
    pool.close()


def train(rule, mishap, steps=6):
    """Train; `mishap(rank, step)` happens in the middle. Returns what was raised, and how long after the mishap."""
    import torch.distributed as dist

    import baguakit as bk

    rank = dist.get_rank()
    model = net()
    optimizer = sgd(model.parameters())
    began = time.monotonic()
    try:
        with bk.attach(model, optimizer, rule(bk), timeout=TIMEOUT):
            for step in range(steps):
                if step == 3:
                    began = time.monotonic()
                    mishap(rank, step)
                optimizer.zero_grad()
                loss(model, rank, step).backward()
                optimizer.step()
                time.sleep(0.2)  # a step that heartbeats (every 0.3 s here) can keep up with
    except Exception as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - began
    return "", time.monotonic() - began


@pytest.mark.parametrize("rule", RULES)
def test_a_rank_that_raises(pool, rule):
    def mishap(rank, step):
        if rank == 1:
            raise KeyError("my own mistake")

    said = pool.run(train, RULES[rule], mishap)
    assert said[1][0] == "KeyError: 'my own mistake'" and said[1][1] < TIMEOUT - 0.5
    for sentence, seconds in (said[0], said[2]):
        assert sentence.startswith("PeerError: rank 1 raised KeyError: 'my own mistake' after")
        assert "waits for it in" in sentence and "round" in sentence and "bucket 0" in sentence
        assert seconds < TIMEOUT + 2


def test_a_rank_asleep(pool):
    def mishap(rank, step):
        if rank == 2:
            time.sleep(2 * TIMEOUT + 2)

    said = pool.run(train, RULES["gradients"], mishap)
    for sentence, seconds in said[:2]:
        assert sentence.startswith(
            "PeerError: rank 2 is late: it has not launched during_backward(Mean()), bucket 0, round 3 within 3 s; "
            "its latest launch known is during_backward(Mean()), bucket 0, round 2"
        )
        assert TIMEOUT - 0.5 < seconds < TIMEOUT + 2


@pytest.mark.parametrize("victim", [1, 2])
def test_a_rank_killed(pool, victim):
    def mishap(rank, step):
        if rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)

    said = pool.run(train, RULES["gradients"], mishap, lost=(victim,))
    for sentence, seconds in (said[0], said[3 - victim]):
        assert sentence.startswith(f"PeerError: rank {victim} is dead: no sign of it for"), sentence
        assert "launch known is during_backward(Mean()), bucket 0, round" in sentence and seconds < TIMEOUT + 2, (
            sentence,
            seconds,
        )


def test_the_rank_that_holds_the_store_is_killed(pool):
    """Nobody can look up who is missing: that is what the sentence says."""

    def mishap(rank, step):
        if rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    said = pool.run(train, RULES["gradients"], mishap, lost=(0,))
    for rank in (1, 2):
        sentence, seconds = said[rank]
        assert sentence.startswith(f"PeerError: rank {rank} cannot reach the store any more: the process that holds it")
        assert "\n" not in sentence and seconds < TIMEOUT + 2


def test_a_rank_that_has_fewer_steps(pool):
    def run():
        import torch.distributed as dist

        return train(RULES["gradients"], lambda rank, step: None, steps=4 if dist.get_rank() == 0 else 6)

    said = pool.run(run)
    assert said[0][0] == ""
    for sentence, _ in said[1:]:
        assert sentence.startswith("PeerError: rank 0 has left after during_backward(Mean()), bucket 0, round 3")
        assert sentence.endswith("give every rank the same number of steps")


def test_threads_end_after_a_failure(pool):
    def run():
        import threading

        def mishap(rank, step):
            if rank == 1:
                raise KeyError

        train(RULES["gradients"], mishap)
        deadline = time.monotonic() + 3 * TIMEOUT
        names = ["?"]
        while names and time.monotonic() < deadline:
            names = [t.name for t in threading.enumerate() if t.name.startswith("baguakit")]
            time.sleep(0.1)
        return names

    assert pool.run(run) == [[], [], []]
