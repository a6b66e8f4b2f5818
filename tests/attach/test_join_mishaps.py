"""Inside `att.join()`: ranks that stop, raise, skip or never come, and what cannot be joined."""

import contextlib
import logging
import threading

import pytest
import torch
import torch.distributed as dist
from everything import ALGORITHMS, joins, made, runs_free
from pool import ranks
from saying import TIMEOUT, Fails
from training import close, flat, loss, mean_loop, net, net_and_sgd, sgd
from uneven import step_of, uneven

import baguakit as bk

LOCAL = "local_sgd(every=2)"


def test_throwing_on_all_ranks_and_going_on():
    """All ranks hear it before the same exchange; what follows is as if nobody had come that far."""

    def run(algorithm):
        rank, model = dist.get_rank(), net()
        optimizer = sgd(model.parameters())
        with bk.attach(model, optimizer, made(algorithm)) as att:
            with (
                pytest.raises(RuntimeError, match="rank 1 has run out of batches"),
                att.join(throw_on_early_termination=True),
            ):
                for step in range([3, 1][rank]):
                    step_of(model, optimizer, rank, step)
            with att.join():
                for step in range(2):
                    step_of(model, optimizer, rank, step)
            return flat(model), att.step

    found = ranks(2, run, "bytegrad(MinMaxUInt8(block=64), error_feedback=True)")
    assert torch.equal(found[0][0], found[1][0]) and [step for _, step in found] == [3, 3]
    assert [step for _, step in ranks(2, run, "decentralized(order='atc')")] == [3, 3]


def test_an_exception_in_the_body_is_told_to_those_that_wait():
    def run():
        rank, model, before = dist.get_rank(), net(), set(threading.enumerate())
        optimizer = sgd(model.parameters())
        att = bk.attach(model, optimizer, bk.algorithms.gradient_allreduce(), timeout=TIMEOUT)
        try:
            with att.join():
                for step in range([4, 1][rank]):
                    if (rank, step) == (0, 2):
                        raise KeyError("mine")
                    step_of(model, optimizer, rank, step)
        except (KeyError, RuntimeError) as error:
            said = f"{type(error).__name__}: {error}"
        hooks = sum(len(p._post_accumulate_grad_hooks or {}) for p in model.parameters())
        mine = [thread for thread in set(threading.enumerate()) - before if "monitor" in thread.name]
        for thread in mine:
            thread.join(30)
        return said, hooks, sum(thread.is_alive() for thread in mine)

    mine, theirs = ranks(2, run)
    assert mine == ("KeyError: 'mine'", 0, 0)
    assert "PeerError: rank 0 raised KeyError: 'mine'" in theirs[0] and theirs[1:] == (0, 0)


def test_a_rank_that_never_enters_is_named():
    def run():
        rank, model = dist.get_rank(), net()
        optimizer = sgd(model.parameters())
        with (
            pytest.raises(RuntimeError) as caught,
            bk.attach(model, optimizer, bk.algorithms.bytegrad(), timeout=2 * TIMEOUT) as att,
        ):
            if rank == 1:
                step_of(model, optimizer, rank, 0)
            else:
                with att.join():
                    step_of(model, optimizer, rank, 0)
        return str(caught.value)

    for said in ranks(3, run):
        assert "rank 1" in said and " has diverged from rank" in said and "join(divide_by" in said


def test_a_second_backward_before_a_step():
    """Added to averaged gradients it is refused once somebody has run out; alone, or under no_sync, it is not."""

    def run(by_all, zeroed):
        rank, model = dist.get_rank(), net()
        optimizer = sgd(model.parameters())
        with bk.attach(model, optimizer, bk.algorithms.gradient_allreduce(), timeout=TIMEOUT) as att:
            with att.join(divide_by_initial_world_size=by_all):
                for step in range([3, 1][rank]):
                    optimizer.zero_grad()
                    loss(model, rank, 50 + step).backward()
                    if zeroed:
                        optimizer.zero_grad()
                    loss(model, rank, step).backward()
                    optimizer.step()
            return flat(model)

    def backward(by_all, zeroed):
        def both(model, rank, step):
            if step < [3, 1][rank]:
                for at in (step,) if zeroed else (50 + step, step):
                    (loss(model, rank, at) * (1 if by_all or step == 0 else 2)).backward()

        return both

    for by_all, zeroed in ((True, True), (False, False)):
        expected = flat(mean_loop(2, backward(by_all, zeroed), 3))
        for weights in ranks(2, run, by_all, zeroed):
            close(weights, expected)

    def refused():
        with pytest.raises(RuntimeError) as caught:
            run(True, False)
        return str(caught.value)

    for said in ranks(2, refused):
        assert "a second backward has added gradients to averaged ones" in said


@pytest.mark.parametrize("bucket_bytes", [50, 1 << 20])
def test_a_batch_that_is_skipped_last(bucket_bytes):
    """The last backward of a rank fails, before buckets or after some, and it leaves: the others drop that step."""

    def run():
        logging.getLogger("baguakit").setLevel(logging.ERROR)
        rank, model = dist.get_rank(), net()
        optimizer = sgd(model.parameters())
        with bk.attach(model, optimizer, bk.algorithms.gradient_allreduce(), bucket_bytes=bucket_bytes) as att:
            with att.join():
                for step in range([4, 2][rank]):
                    optimizer.zero_grad()
                    if (rank, step) == (1, 1):
                        y = model[2:](Fails.apply(model[:2](torch.ones(1, 6))))
                        with contextlib.suppress(MemoryError):
                            y.sum().backward()
                        break
                    loss(model, rank, step).backward()
                    optimizer.step()
            logging.getLogger("baguakit").setLevel(logging.NOTSET)
            return flat(model), att.step

    def backward(model, rank, step):
        at = step if step == 0 else step + 1
        if at < [4, 1][rank]:
            loss(model, rank, at).backward()

    expected = flat(mean_loop(2, backward, 3))
    for weights, step in ranks(2, run):
        close(weights, expected)
        assert step == 3


def test_what_cannot_be_joined_is_refused():
    refused = [each for each in ALGORITHMS if not joins(made(each))]

    def run():
        model, optimizer = net_and_sgd()
        said = []
        for algorithm in [*refused, LOCAL]:
            with bk.attach(model, optimizer, made(algorithm)) as att:
                with pytest.raises(ValueError) as caught, att.join(divide_by_initial_world_size=algorithm != LOCAL):
                    pass
                said.append(str(caught.value))
        with bk.attach(model, optimizer, bk.algorithms.gradient_allreduce()) as att:
            pass
        with pytest.raises(RuntimeError, match="this attachment is detached"), att.join():
            pass
        rule = bk.algorithms.gradient_allreduce()
        with pytest.raises(RuntimeError) as caught, bk.attach(model, optimizer, rule) as att, att.join():
            att.merge()
        dist.barrier()
        return [*said, str(caught.value)]

    for *said, local, merged in ranks(2, run):
        for algorithm, sentence in zip(refused, said, strict=True):
            free = runs_free(made(algorithm))
            assert ("needs no join()" if free else "give all ranks the same number of batches") in sentence
        assert "divide_by_initial_world_size=False divides gradients" in local
        assert "all ranks make merge() together, and inside att.join()" in merged


def test_one_rank_alone():
    def run():
        return uneven("(bytegrad(), local_sgd())", [3])[2][0]

    assert ranks(1, run) == [3]
