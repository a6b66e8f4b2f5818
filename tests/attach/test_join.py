"""Uneven inputs: a rank that has run out of batches answers the others, which train as if it had zeros."""

import threading

import pytest
import torch
from pool import Pool, ranks
from torch import nn
from training import close, flat, loss, mean_loop, net, sgd

BATCHES = [5, 2, 0]  # by rank
LONGEST = max(BATCHES)


def everything(model, optimizer):
    """Weights, buffers and what the optimizer remembers, as one list of tensors."""
    state = optimizer.state_dict()["state"]
    held = [value for key in sorted(state) for value in state[key].values() if isinstance(value, torch.Tensor)]
    return [*model.state_dict().values(), *held]


def same(a, b):
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def step_of(model, optimizer, rank, step):
    optimizer.zero_grad()
    loss(model, rank, step).backward()
    optimizer.step()


def uneven(algorithms, batches=BATCHES, optimizer=sgd, steps=step_of, bucket_bytes=200, **options):
    """Train inside `join()` on this rank with as many batches as it has."""
    import torch.distributed as dist

    import baguakit as bk

    rank, model = dist.get_rank(), net()
    opt, groups = optimizer(model.parameters()), len(dist.distributed_c10d._world.pg_map)
    with bk.attach(model, opt, *algorithms(bk), bucket_bytes=bucket_bytes) as att:
        with att.join(**options):
            for step in range(batches[rank]):
                steps(model, opt, rank, step)
        engine = att._engine
        launched, rounds = engine.monitor._history.latest(), [route.round for route in engine.routes]
        state = att.state_dict()
    assert sum(len(p._post_accumulate_grad_hooks or {}) for p in model.parameters()) == 0
    assert not opt._optimizer_step_pre_hooks and not opt._optimizer_step_post_hooks
    assert len(dist.distributed_c10d._world.pg_map) == groups
    return everything(model, opt), state, (att.step, launched, rounds)


def even(algorithms, still=lambda step: False, batches=BATCHES, bucket_bytes=200):
    """The run that it stands for: a rank without batches has zero gradients, or none in steps where it stands still."""
    import torch.distributed as dist

    import baguakit as bk

    rank, model = dist.get_rank(), net()
    opt = sgd(model.parameters())
    with bk.attach(model, opt, *algorithms(bk), bucket_bytes=bucket_bytes) as att:
        for step in range(max(batches)):
            opt.zero_grad()
            if step < batches[rank]:
                loss(model, rank, step).backward()
            elif not still(step):
                (0 * loss(model, rank, step)).backward()
            opt.step()
        return everything(model, opt), att.state_dict(), att.step


def equal_states(a, b):
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal_states(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal_states, a, b))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


@pytest.mark.parametrize("by_all", [True, False])
def test_gradients_are_divided_by_all_ranks_or_by_those_at_work(by_all):
    """As one process would: the mean over all ranks counts who has run out as zero; or it is over the others."""
    found = ranks(
        3, lambda: uneven(lambda bk: [bk.algorithms.gradient_allreduce()], divide_by_initial_world_size=by_all)
    )

    def backward(model, rank, step):
        at_work = sum(step < batches for batches in BATCHES)
        if step < BATCHES[rank]:
            (loss(model, rank, step) * (1 if by_all else 3 / at_work)).backward()

    expected = flat(mean_loop(3, backward, LONGEST))
    for held, _, (step, launched, rounds) in found:
        assert same(held, found[0][0]) and (step, launched, rounds) == found[0][2]
        assert step == LONGEST and rounds == [LONGEST]
        close(torch.cat([x.flatten() for x in held[:6]]), expected)


@pytest.mark.parametrize("by_all", [True, False])
def test_weights_are_those_of_ddp(by_all):
    """torch's own join, on the same batches: rank 2 has one, since DDP wants its lazy beginning on all ranks."""
    batches = [5, 2, 1]

    def ddp():
        import torch.distributed as dist

        rank, model = dist.get_rank(), nn.parallel.DistributedDataParallel(net())
        optimizer = sgd(model.parameters())
        with model.join(divide_by_initial_world_size=by_all):
            for step in range(batches[rank]):
                step_of(model, optimizer, rank, step)
        return flat(model)

    def ours():
        rule = [lambda bk: [bk.algorithms.gradient_allreduce()]]
        return uneven(*rule, batches, divide_by_initial_world_size=by_all)[0][:6]

    for held, expected in zip(ranks(3, ours), ranks(3, ddp), strict=True):
        close(torch.cat([x.flatten() for x in held]), expected)


GRADIENTS = {
    "bytegrad": lambda bk: [bk.algorithms.bytegrad(error_feedback=True)],
    "qadam": lambda bk: [bk.algorithms.qadam(warmup_steps=2, error_feedback=True)],
    "power_sgd": lambda bk: [bk.algorithms.power_sgd(warmup_steps=1)],
    "top_k": lambda bk: [bk.algorithms.top_k(0.3)],
}
WEIGHTS = {
    "awc": lambda bk: [bk.algorithms.decentralized()],
    "awc, every=2": lambda bk: [bk.algorithms.decentralized(every=2)],
    "atc": lambda bk: [bk.algorithms.decentralized(bk.topology.Ring(), order="atc")],
    "dcd": lambda bk: [bk.algorithms.low_precision_decentralized()],
    "choco": lambda bk: [bk.algorithms.choco(bk.topology.OnePeerExact())],
    "push_sum": lambda bk: [bk.algorithms.push_sum(bk.topology.Exponential())],
    "local_sgd": lambda bk: [bk.algorithms.local_sgd(every=2)],
    "diloco": lambda bk: [bk.algorithms.diloco(every=2)],
    "diloco, late": lambda bk: [bk.algorithms.diloco(every=2, delay=2)],
    "diloco, in turns": lambda bk: [bk.algorithms.diloco(every=2, delay=1, fragments=2)],
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_who_has_run_out_counts_as_zero_gradients(name):
    """Bit for bit, weights, optimizers and what is remembered, of all ranks, are those of a run with zero gradients."""
    there, expected = ranks(3, uneven, GRADIENTS[name]), ranks(3, even, GRADIENTS[name])
    for (held, state, (step, launched, rounds)), (held_even, state_even, step_even) in zip(
        there, expected, strict=True
    ):
        assert same(held, held_even) and same(held, there[0][0])
        assert step == step_even and equal_states(state, state_even)
        assert (launched, rounds) == there[0][2][1:]


@pytest.mark.parametrize("name", WEIGHTS)
def test_who_has_run_out_takes_part_with_its_weights(name):
    """Bit for bit, a rank that has run out is one that steps without gradients."""
    there, expected = ranks(3, uneven, WEIGHTS[name]), ranks(3, lambda: even(WEIGHTS[name], lambda step: True))
    for (held, state, (step, launched, rounds)), (held_even, state_even, step_even) in zip(
        there, expected, strict=True
    ):
        assert same(held, held_even)
        assert step == step_even and equal_states(state, state_even)
        assert (launched, rounds) == there[0][2][1:]


def test_weights_are_taken_before_a_rule_on_weights_follows():
    """Gradients are averaged in three steps, and weights from then on: old weights do not pull the others back."""

    def rules(bk):
        return [bk.algorithms.local_sgd(every=2, start=3)]

    there = ranks(3, lambda: uneven(rules, [9, 2, 0]))
    expected = ranks(3, lambda: even(rules, lambda step: step >= 3, [9, 2, 0]))
    for (held, _, (step, *_)), (held_even, _, step_even) in zip(there, expected, strict=True):
        assert same(held, held_even) and step == step_even == 9


def test_accumulation_several_optimizers_and_two_joins_in_a_row():
    def run():
        import torch.distributed as dist

        import baguakit as bk

        rank, model = dist.get_rank(), net()
        optimizers = [sgd(model[0].parameters()), torch.optim.Adam(list(model[2:].parameters()), lr=0.01)]
        with bk.attach(model, optimizers, bk.algorithms.gradient_allreduce(), bucket_bytes=200) as att:
            for batches in ([3, 1], [0, 2]):
                with att.join():
                    for step in range(batches[rank]):
                        model.zero_grad()
                        with att.no_sync():
                            loss(model, rank, 100 + step).backward()
                        loss(model, rank, step).backward()
                        for optimizer in optimizers:
                            optimizer.step()
            assert str(att.report()) and att.timeline().spans
            held = [x for optimizer in optimizers for x in everything(model, optimizer)]
            return held, att.step

    found = ranks(2, run)

    def model_with_two():
        model = net()
        model.both = [sgd(model[0].parameters()), torch.optim.Adam(list(model[2:].parameters()), lr=0.01)]
        return model

    def backward(model, rank, step):
        epoch, at = (0, step) if step < 3 else (1, step - 3)
        if at < [[3, 1], [0, 2]][epoch][rank]:
            loss(model, rank, 100 + at).backward()
            loss(model, rank, at).backward()

    class Both:
        def __init__(self, model):
            self.model = model

        def zero_grad(self):
            self.model.zero_grad()

        def step(self):
            for optimizer in self.model.both:
                optimizer.step()

    expected = mean_loop(2, backward, 5, model_with_two, Both)
    for held, step in found:
        assert step == 5 and same(held, found[0][0])
        close(torch.cat([x.flatten() for x in held[:6]]), flat(expected))


def test_without_an_optimizer_and_with_a_scaler():
    """A scaler's factor is the same on all ranks afterwards; without optimizers each backward is a step."""

    def run(scaled):
        import torch.distributed as dist

        import baguakit as bk

        rank, model = dist.get_rank(), net()
        optimizer = sgd(model.parameters())
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2) if scaled else None
        rules = bk.during_backward(bk.stages.Mean())
        with bk.attach(model, optimizer if scaled else None, rules, scaler=scaler) as att:
            with att.join():
                for step in range([4, 1][rank]):
                    optimizer.zero_grad()
                    if scaler is None:
                        loss(model, rank, step).backward()
                        optimizer.step()
                    else:
                        scaler.scale(loss(model, rank, step)).backward()
                        scaler.step(optimizer)
                        scaler.update()
            return flat(model), scaler and scaler.get_scale(), att.step

    def backward(model, rank, step):
        if step < [4, 1][rank]:
            loss(model, rank, step).backward()

    expected = flat(mean_loop(2, backward, 4))
    for scaled in (False, True):
        found = ranks(2, run, scaled)
        for weights, scale, step in found:
            close(weights, expected)
            assert torch.equal(weights, found[0][0]) and step == 4
            assert scale == (1024.0 if scaled else None)


def test_parameters_without_a_gradient_and_buffers():
    """What nobody at work uses keeps no gradient; buffers are those of the rank that trained to the end."""

    def run():
        import torch.distributed as dist

        import baguakit as bk

        rank = dist.get_rank()
        model = nn.ModuleDict(
            {"net": net(), "norm": nn.BatchNorm1d(6), "first": nn.Linear(6, 1), "never": nn.Linear(1, 1)}
        )
        torch.manual_seed(0)
        for p in model.parameters():
            nn.init.normal_(p)
        optimizer = sgd(model.parameters())
        with bk.attach(model, optimizer, bk.algorithms.gradient_allreduce(), bucket_bytes=100) as att:
            with att.join():
                for step in range([3, 1][rank]):
                    optimizer.zero_grad()
                    x = model["norm"](torch.randn(8, 6))
                    y = model["net"](x) + (model["first"](x) if rank == 1 else 0)
                    y.square().mean().backward()
                    used = model["first"].weight.grad is not None, model["never"].weight.grad is not None
                    assert used == (step == 0, False)
                    optimizer.step()
            return everything(model, optimizer), int(model["norm"].num_batches_tracked)

    (held, count), (theirs, count_there) = ranks(2, run)
    assert same(held, theirs) and count == count_there == 3


def test_throwing_on_all_ranks_and_going_on():
    """All ranks hear it before the same exchange; what follows is as if nobody had come that far."""

    def run(algorithms):
        import torch.distributed as dist

        import baguakit as bk

        rank, model = dist.get_rank(), net()
        optimizer = sgd(model.parameters())
        with bk.attach(model, optimizer, *algorithms(bk)) as att:
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

    found = ranks(2, run, GRADIENTS["bytegrad"])
    assert torch.equal(found[0][0], found[1][0]) and [step for _, step in found] == [3, 3]
    assert [step for _, step in ranks(2, run, WEIGHTS["atc"])] == [3, 3]


def test_an_exception_in_the_body_is_told_to_those_that_wait():
    def run():
        import torch.distributed as dist

        import baguakit as bk

        rank, model, before = dist.get_rank(), net(), set(threading.enumerate())
        optimizer = sgd(model.parameters())
        att = bk.attach(model, optimizer, bk.algorithms.gradient_allreduce())
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
        import torch.distributed as dist

        import baguakit as bk

        rank, model = dist.get_rank(), net()
        optimizer = sgd(model.parameters())
        with (
            pytest.raises(RuntimeError) as caught,
            bk.attach(model, optimizer, bk.algorithms.bytegrad(), timeout=20) as att,
        ):
            if rank == 1:
                step_of(model, optimizer, rank, 0)
            else:
                with att.join():
                    step_of(model, optimizer, rank, 0)
        return str(caught.value)

    for said in ranks(3, run):
        assert "rank 1" in said and " has parted from rank" in said and "join(divide_by" in said


@pytest.mark.slow
def test_a_rank_that_dies_is_named_by_those_at_work_and_by_those_that_answer():
    def run():
        import os

        import torch.distributed as dist

        import baguakit as bk

        rank, model = dist.get_rank(), net()
        optimizer = sgd(model.parameters())
        rule = bk.algorithms.gradient_allreduce()
        with pytest.raises(RuntimeError) as caught, bk.attach(model, optimizer, rule, timeout=8) as att, att.join():
            for step in range([9, 9, 1][rank]):
                if (rank, step) == (1, 3):
                    os._exit(1)
                step_of(model, optimizer, rank, step)
        return str(caught.value)

    pool = Pool(3)
    try:
        found = pool.run(run, lost=[1])
    finally:
        pool.close()
    assert all("rank 1 is dead" in said for said in (found[0], found[2])), found


@pytest.mark.slow
def test_ranks_that_train_differently_inside_are_named():
    def run():
        import torch.distributed as dist

        import baguakit as bk

        rank, model = dist.get_rank(), net()
        optimizer = sgd(model.parameters())
        rules = bk.during_backward(bk.stages.Mean()), bk.after_step(bk.stages.Mean())
        with pytest.raises(RuntimeError) as caught, bk.attach(model, optimizer, *rules) as att, att.join():
            for step in range(4):
                if (rank, step) == (1, 2):
                    optimizer.step()
                step_of(model, optimizer, rank, step)
        return str(caught.value)

    for said in ranks(3, run):
        assert said.startswith("rank 1 has ")


def test_a_second_backward_before_a_step():
    """Added to averaged gradients it is refused once somebody has run out; alone, or under no_sync, it is not."""

    def run(by_all, zeroed):
        import torch.distributed as dist

        import baguakit as bk

        rank, model = dist.get_rank(), net()
        optimizer = sgd(model.parameters())
        with bk.attach(model, optimizer, bk.algorithms.gradient_allreduce()) as att:
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

    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x

        @staticmethod
        def backward(ctx, g):
            raise MemoryError("mine")

    def run():
        import contextlib
        import logging

        import torch.distributed as dist

        import baguakit as bk

        logging.getLogger("baguakit").setLevel(logging.ERROR)
        rank, model = dist.get_rank(), net()
        optimizer = sgd(model.parameters())
        with bk.attach(model, optimizer, bk.algorithms.gradient_allreduce(), bucket_bytes=bucket_bytes) as att:
            with att.join():
                for step in range([4, 2][rank]):
                    optimizer.zero_grad()
                    if (rank, step) == (1, 1):
                        y = model[2:](Failing.apply(model[:2](torch.ones(1, 6))))
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
    def run():
        import torch.distributed as dist

        import baguakit as bk

        model = net()
        optimizer = sgd(model.parameters())
        said = []
        for algorithm, options in (
            (bk.algorithms.async_model_average(), {}),
            (bk.algorithms.gradient_tracking(), {}),
            (bk.algorithms.local_sgd(), {"divide_by_initial_world_size": False}),
        ):
            with bk.attach(model, optimizer, algorithm) as att:
                with pytest.raises(ValueError) as caught, att.join(**options):
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

    for said in ranks(2, run):
        assert "needs no join()" in said[0]
        assert "give all ranks the same number of batches" in said[1]
        assert "divide_by_initial_world_size=False divides gradients" in said[2]
        assert "all ranks make merge() together, and inside att.join()" in said[3]


def test_one_rank_alone():
    def run():
        return uneven(lambda bk: [bk.algorithms.bytegrad(), bk.algorithms.local_sgd()], [3])[2][0]

    assert ranks(1, run) == [3]
