"""Uneven inputs: a rank that has run out of batches answers the others, which train as if it had zeros."""

import pytest
import torch
import torch.distributed as dist
from everything import others_slow
from pool import ranks
from saying import said
from torch import nn
from training import close, flat, loss, mean_loop, net, sgd
from uneven import BATCHES, GRADIENTS, LONGEST, WEIGHTS, even, everything, same, step_of, uneven

import baguakit as bk


@pytest.mark.parametrize("by_all", [True, False])
def test_weights_are_those_of_ddp(by_all):
    """torch's own join, on the same batches: rank 2 has one, since DDP wants its lazy beginning on all ranks."""
    batches = [5, 2, 1]

    def ddp():
        rank, model = dist.get_rank(), nn.parallel.DistributedDataParallel(net())
        optimizer = sgd(model.parameters())
        with model.join(divide_by_initial_world_size=by_all):
            for step in range(batches[rank]):
                step_of(model, optimizer, rank, step)
        return flat(model)

    def ours():
        return uneven("gradient_allreduce()", batches, divide_by_initial_world_size=by_all)[0][:6]

    for held, expected in zip(ranks(3, ours), ranks(3, ddp), strict=True):
        close(torch.cat([x.flatten() for x in held]), expected)


@pytest.mark.parametrize("name", others_slow([*GRADIENTS, *WEIGHTS]))
def test_who_has_run_out_makes_the_same_launches(name):
    """That its weights and memories are those of a run with zero gradients, or with its weights, is a check."""
    there = ranks(3, uneven, name)
    step, launched, rounds = there[0][2]
    assert step == LONGEST and [facts for *_, facts in there] == [(step, launched, rounds)] * 3


def test_ranks_that_decide_at_different_times_make_the_same_launches():
    """With one bucket, a rank that has run out holds its states until all flights have ended, and others do not."""
    name = "bytegrad(MinMaxUInt8(block=64), error_feedback=True)"
    found = ranks(3, lambda: uneven(name, bucket_bytes=1 << 20)[2])
    assert found == [found[0]] * 3


def test_weights_are_taken_before_a_rule_on_weights_follows():
    """Gradients are averaged in three steps, and weights from then on: old weights do not pull the others back."""
    rules = "local_sgd(every=2, start=3)"
    there = ranks(3, lambda: uneven(rules, [9, 2, 0]))
    expected = ranks(3, lambda: even(rules, lambda step: step >= 3, [9, 2, 0]))
    for (held, _, (step, *_)), (held_even, _, step_even) in zip(there, expected, strict=True):
        assert same(held, held_even) and step == step_even == 9


def test_accumulation_several_optimizers_and_two_joins_in_a_row():
    def run():
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
    """Parameters that nobody at work uses get no gradient; buffers are those of the rank that trained to the end."""

    def run():
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


def frozen_between(model, step):
    """The first layer is frozen in steps 1 and 2."""
    model[0].requires_grad_(step not in (1, 2))


def joined_and_frozen(algorithm):
    rank, model = dist.get_rank(), net()
    optimizer = sgd(model.parameters())
    with bk.attach(model, optimizer, algorithm) as att:
        with att.join():
            for step in range(BATCHES[rank]):
                frozen_between(model, step)
                step_of(model, optimizer, rank, step)
        return flat(model), att.step


def test_layers_are_frozen_and_thawed_inside_join():
    """Rules on gradients: as if a rank that has run out had zeros."""

    def backward(model, rank, step):
        frozen_between(model, step)
        if step < BATCHES[rank]:
            loss(model, rank, step).backward()

    expected = flat(mean_loop(3, backward, LONGEST))
    for weights, steps in ranks(3, lambda: joined_and_frozen(bk.algorithms.gradient_allreduce())):
        assert steps == LONGEST
        close(weights, expected)


def test_layers_are_frozen_and_thawed_inside_join_with_rules_on_weights():
    """A rank that has run out takes part with its weights; a layer that is frozen is averaged in its place."""
    models = [net() for _ in range(3)]
    optimizers = [sgd(model.parameters()) for model in models]
    for step in range(LONGEST):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            frozen_between(model, step)
            if step < BATCHES[rank]:
                step_of(model, optimizer, rank, step)
        if step % 2:
            mean = sum(map(flat, models)) / 3
            for model in models:
                nn.utils.vector_to_parameters(mean.clone(), model.parameters())
    found = ranks(3, lambda: joined_and_frozen(bk.algorithms.local_sgd(every=2)))
    for (weights, steps), model in zip(found, models, strict=True):
        assert steps == LONGEST
        close(weights, flat(model))


def test_a_layer_that_is_new_is_refused_inside_join():
    """Its buckets would be made by the ranks that have batches only."""

    def run():
        model = net()
        model[0].requires_grad_(False)
        optimizer = sgd(model.parameters())
        with bk.attach(model, optimizer, bk.algorithms.gradient_allreduce()) as att, att.join():
            for step in range(2):
                model[0].requires_grad_(step == 1)
                step_of(model, optimizer, dist.get_rank(), step)

    for sentence in ranks(2, said, run):
        assert sentence.startswith("RuntimeError: all ranks make a change of the trainable parameters together")
