"""A rank dies, sleeps, raises or leaves: the others end in time, and the message names it."""

import os
import signal
import threading
import time
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from everything import made, of_each_kind, runs_free, usual, windows
from pool import Pool
from tiers import slow_after
from training import loss, net_and_sgd, run_steps

import baguakit as bk

TIMEOUT = 3.0
MEAN = "gradient_allreduce()"


@pytest.fixture
def pool():
    with Pool(3) as pool:
        yield pool


def train(algorithm, mishap, steps=6, pace=0.2, timeout=TIMEOUT):
    """Train; `mishap(rank)` happens at step 3. Return the error that was raised, and the seconds since the mishap."""
    rank = dist.get_rank()
    model, optimizer = net_and_sgd()
    began = time.monotonic()
    try:
        with bk.attach(model, optimizer, made(algorithm), timeout=timeout):
            for step in range(steps):
                if step == 3:
                    began = time.monotonic()
                    mishap(rank)
                optimizer.zero_grad()
                loss(model, rank, step).backward()
                optimizer.step()
                time.sleep(pace)  # the default is a step that heartbeats (every 0.3 s here) can keep up with
    except Exception as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - began
    return "", time.monotonic() - began


def raises(rank):
    if rank == 1:
        raise KeyError("my own mistake")


def threads_left(seconds):
    """Return the names of the threads of attachments that have not ended in time."""
    deadline, names = time.monotonic() + seconds, ["?"]
    while names and time.monotonic() < deadline:
        names = [t.name for t in threading.enumerate() if t.name.startswith("baguakit")]
        time.sleep(0.01)
    return names


def test_a_rank_that_raises_is_named_with_its_launches_and_all_threads_end(own_pools):
    def run():
        return *train(MEAN, raises), threads_left(3 * TIMEOUT)

    said = own_pools(3).run(run)
    assert said[1][0] == "KeyError: 'my own mistake'" and said[1][1] < TIMEOUT - 0.5
    for sentence, seconds, _ in (said[0], said[2]):
        assert sentence.startswith("PeerError: rank 1 raised KeyError: 'my own mistake' after")
        assert "waits for it in" in sentence and "round" in sentence and "bucket 0" in sentence
        assert seconds < TIMEOUT + 2
    assert [names for *_, names in said] == [[], [], []]


@pytest.mark.slow
@pytest.mark.parametrize(
    "algorithms",
    [of_each_kind(kind_of=windows), pytest.param(usual().values(), marks=pytest.mark.slow)],
    ids=["one for each choice of windows", "all"],
)
def test_a_rank_that_raises_is_named_whatever_the_algorithm(own_pools, algorithms):
    waiting = [each for each in algorithms if not runs_free(made(each))]

    def run():
        found = {}
        for algorithm in waiting:
            found[algorithm] = train(algorithm, raises, 50, pace=0, timeout=2.0)
            bk.Comm().gather_objects(0)  # where ranks raise, nobody waits for anybody
        return found

    said = own_pools(3).run(run)
    for algorithm in waiting:
        for rank in (0, 2):
            sentence, seconds = said[rank][algorithm]
            assert sentence.startswith("PeerError: rank 1 raised KeyError: 'my own mistake' after"), (
                algorithm,
                sentence,
            )
            assert seconds < TIMEOUT + 2, (algorithm, seconds)


@pytest.mark.parametrize("victim", slow_after(1, [1, 2]))
def test_a_rank_killed(pool, victim):
    def mishap(rank):
        if rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)

    said = pool.run(train, MEAN, mishap, lost=(victim,))
    for sentence, seconds in (said[0], said[3 - victim]):
        assert sentence.startswith(f"PeerError: rank {victim} is dead: no sign of it for"), sentence
        assert "launch known is during_backward(Mean()), bucket 0, round" in sentence and seconds < TIMEOUT + 2, (
            sentence,
            seconds,
        )


def test_the_rank_that_holds_the_store_is_killed(pool):
    """Nobody can look up who is missing: that is what the sentence says."""

    def mishap(rank):
        if rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    said = pool.run(train, MEAN, mishap, lost=(0,))
    for rank in (1, 2):
        sentence, seconds = said[rank]
        assert sentence.startswith(f"PeerError: rank {rank} cannot reach the store any more: the process that holds it")
        assert "\n" not in sentence and seconds < TIMEOUT + 2


def test_a_rank_that_has_fewer_steps(own_pools):
    def run():
        return train(MEAN, lambda rank: None, steps=4 if dist.get_rank() == 0 else 6)

    said = own_pools(3).run(run)
    assert said[0][0] == ""
    for sentence, _ in said[1:]:
        assert sentence.startswith("PeerError: rank 0 has left after during_backward(Mean()), bucket 0, round 3")
        assert sentence.endswith("give every rank the same number of steps")


def test_after_a_flight_has_failed_nothing_more_takes_off_on_its_lane(own_pools):
    """Its messages would meet the rest of those of the flight that has failed, and end the process of another rank."""

    def run():
        began = []

        class Fails(bk.stages.Stage):
            def __call__(self, x, state, comm):
                began.append(comm.rank)
                if comm.rank == 1:
                    raise KeyError("half-way")
                return bk.primitives.mean_(x, comm)

        model, optimizer = net_and_sgd()
        try:
            with bk.attach(model, optimizer, bk.during_backward(Fails()), timeout=TIMEOUT, bucket_bytes=64):
                loss(model, 0, 0).backward()
                optimizer.step()
        except bk.PeerError as error:
            return len(began), str(error)

    said = own_pools(2).run(run)
    assert said[1][0] == 1 and "bucket 0" in said[1][1] and "half-way" in said[1][1]
    assert "half-way" in said[0][1]


def trained(compressors, killed=None):
    """Train with a stage of a reduce-scatter and an all-gather; return what was raised, or the weights.

    Args:
        compressors: of each rank.
        killed: (rank, round): that rank is killed there, between the two collectives.
    """

    @dataclass(frozen=True)
    class InShards(bk.stages.Stage):
        compressor: object

        def __call__(self, x, state, comm):
            n = comm.size
            rows = torch.nn.functional.pad(x, (0, -len(x) % n)).view(n, -1)
            shard = bk.primitives.compressed_reduce_scatter(rows, self.compressor, comm, average=True)
            if killed == (comm.rank, comm.round):
                os.kill(os.getpid(), signal.SIGKILL)
            return bk.primitives.compressed_all_gather(shard, self.compressor, comm).view(-1)[: len(x)]

    rank = dist.get_rank()
    model, optimizer = net_and_sgd()
    rule = bk.during_backward(InShards(eval(compressors[rank], vars(bk.compressors))))
    try:
        with bk.attach(model, optimizer, rule, timeout=TIMEOUT):
            run_steps(model, optimizer, range(4))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return [p.tolist() for p in model.parameters()]


def test_ranks_that_agree_have_equal_weights_and_one_that_differs_is_named(own_pools):
    pool = own_pools(3)
    first, *others = pool.run(trained, ["UInt4()"] * 3)
    assert not isinstance(first, str) and others == [first] * 2
    for said in pool.run(trained, ["UInt4()", "UInt4()", "MinMaxUInt8()"]):
        assert said.startswith("ValueError: ranks must attach the same: rank 0 has rule during_backward(")
        assert "compressor=UInt4()" in said and "where rank 2 has" in said and "compressor=MinMaxUInt8()" in said


def test_a_rank_that_dies_between_two_collectives_of_a_stage_is_named():
    victim = 1
    with Pool(3) as pool:
        said = pool.run(trained, ["UInt4()"] * 3, (victim, 2), lost=(victim,))
    for rank in {0, 1, 2} - {victim}:
        assert said[rank].startswith(f"PeerError: rank {victim} is dead: no sign of it for"), said[rank]
        assert "InShards(compressor=UInt4())), bucket 0, round 2" in said[rank], said[rank]
