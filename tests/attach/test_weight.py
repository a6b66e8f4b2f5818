"""`weight=` of attach: ranks count by their tokens, in every algorithm, window and way of training."""

import math

import pytest
import torch
import torch.distributed as dist
from everything import ALGORITHMS, made, others_slow, repeats
from pool import ranks
from saying import said
from torch import nn
from training import batch, close, flat, loss, net, run_steps, sgd

import baguakit as bk

ROWS = [8, 3, 5]  # of each rank's batch


def summed(model, rank, step, rows):
    x, y = batch(rank, step, torch.float64, rows)
    return (model(x) - y).square().sum()


@pytest.mark.parametrize("micro", [1, 2])
def test_ranks_with_batches_of_different_size_train_as_one_with_all_of_them(micro):
    """A loss is the mean over a rank's own rows, also of all its micro-batches: then weight=rows."""

    def run():
        rank, model = dist.get_rank(), net(torch.float64)
        optimizer, asked = sgd(model.parameters()), []
        rows = lambda step: ROWS[(rank + step) % 3]  # noqa: E731

        def weight():
            asked.append(micro * rows(len(asked)))
            return asked[-1]

        with bk.attach(model, optimizer, bk.algorithms.gradient_allreduce(), bucket_bytes=200, weight=weight) as att:
            for step in range(6):
                optimizer.zero_grad()
                for part in range(micro):
                    mean = summed(model, rank, 10 * part + step, rows(step)) / (micro * rows(step))
                    if part < micro - 1:
                        with att.no_sync():
                            mean.backward()
                    else:
                        mean.backward()
                optimizer.step()
        assert len(asked) == 6
        return flat(model)

    alone = net(torch.float64)
    optimizer = sgd(alone.parameters())
    for step in range(6):
        optimizer.zero_grad()
        for part in range(micro):
            for rank in range(3):
                rows = ROWS[(rank + step) % 3]
                (summed(alone, rank, 10 * part + step, rows) / (micro * sum(ROWS))).backward()
        optimizer.step()
    for weights in ranks(3, run):
        torch.testing.assert_close(weights, flat(alone), rtol=0, atol=1e-13)


@pytest.mark.parametrize("name", others_slow([each for each in ALGORITHMS if repeats(made(each))]))
def test_equal_weights_are_the_bits_of_none(name):
    def run():
        ends = []
        constant = any(getattr(each, "constant_weights", False) for r in made(name).rules for each in r.stage.whole())
        for weight in (None, 7, *([] if constant else [lambda: torch.tensor(3)])):
            model = net()
            optimizer = sgd(model.parameters())
            with bk.attach(model, optimizer, made(name), bucket_bytes=200, weight=weight):
                run_steps(model, optimizer, range(8))
            ends.append(flat(model))
        return all(torch.equal(each, ends[0]) for each in ends)

    assert all(ranks(2, run))


RULES = {
    "after_step(Mean(), every=3)": (3, 0),
    "after_step(Mean(), every=3, delay=1)": (3, 1),
    "during_backward(Mean(), stop=2) + after_step(Mean(), every=2, start=2)": (2, 0),
    "diloco(every=3, optimizer=torch.optim.SGD, lr=1.0)": (3, 0),
}


@pytest.mark.parametrize("name", RULES)
def test_rules_on_weights_count_the_steps_since_their_last_exchange(name):
    """Every exchange is Σ W x / Σ W, with W the tokens of all steps of a rank since the exchange before."""
    every, delay = RULES[name]
    begin = 2 if "start" in name else 0

    def tokens(rank, step):
        return [5, 1, 2][(rank + step) % 3] * (step + 1)

    def run():
        rank, model = dist.get_rank(), net(torch.float64)
        optimizer, comm, step = sgd(model.parameters()), bk.Comm(), 0
        errors, since, launched = [], 0, None
        with bk.attach(model, optimizer, made(name), weight=lambda: tokens(rank, step)):
            hook = optimizer.register_step_pre_hook(lambda *_: None)
            for step in range(begin + 3 * every + delay):
                before = flat(model)
                optimizer.zero_grad()
                loss(model, rank, step).backward()
                grads = torch.cat([p.grad.flatten() for p in model.parameters()])
                buffers = [optimizer.state[p].get("momentum_buffer") for p in model.parameters()]
                old = 0 if buffers[0] is None else torch.cat([b.flatten() for b in buffers])
                optimizer.step()
                stepped = before - 0.05 * (0.9 * old + grads)
                since += tokens(rank, step) if step >= begin else 0
                if launched is not None:  # lands in this step: x + (result − before)
                    expected, launched = stepped + launched[1] - launched[0], None
                    errors.append((flat(model) - expected).abs().max())
                if step >= begin and (step - begin + 1) % every == 0:
                    everyone = comm.gather_objects((since, flat(model) if delay else stepped))
                    total = sum(w for w, _ in everyone)
                    mean, since = sum(w / total * x for w, x in everyone), 0
                    if delay:
                        launched = flat(model), mean
                    else:
                        errors.append((flat(model) - mean).abs().max())
            hook.remove()
        return errors

    for errors in ranks(3, run):
        assert len(errors) >= 3 and max(errors) < 1e-13


def test_free_running_and_elsewhere():
    """Ranks that stand still come to the weighted mean in the first flight; in DDP; in a round that is resumed."""

    def run():
        rank, model = dist.get_rank(), nn.Linear(3, 1, bias=False, dtype=torch.float64)
        found = []
        for weight in (rank + 1, lambda: rank + 1):
            nn.init.constant_(model.weight, float(rank))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
            rule = bk.free_running(bk.stages.Mean())
            with bk.attach(model, optimizer, rule, broadcast=False, weight=weight) as att:
                while att._life.runners[0].round < 2 or att._life.runners[0].air:
                    optimizer.zero_grad()
                    model(torch.ones(1, 3, dtype=torch.float64)).sum().backward()
                    optimizer.step()
            found.append(float(model.weight.detach()[0, 0]))  # Σ (r + 1) r / Σ (r + 1)

        for weight in (rank + 1, lambda: rank + 1):  # each rank moves by r in its first step, and counts once
            nn.init.zeros_(model.weight)
            optimizer, steps = torch.optim.SGD(model.parameters(), lr=1.0), iter([-float(rank)])
            rule = bk.algorithms.decoupled_diloco(1, optimizer=torch.optim.SGD, lr=1.0)
            with bk.attach(model, optimizer, rule, weight=weight) as att:
                while att._life.runners[0].round < 2 or att._life.runners[0].air:
                    optimizer.zero_grad()
                    (model(torch.ones(1, 3, dtype=torch.float64)).sum() * next(steps, 0.0)).backward()
                    optimizer.step()
            found.append(float(model.weight.detach()[0, 0]))

        gradients = []
        for weight in (rank + 1, lambda: rank + 1):
            nn.init.constant_(model.weight, 1.0)
            model.zero_grad()
            wrapped = nn.parallel.DistributedDataParallel(model)
            with bk.interop.ddp(wrapped, bk.stages.Mean(), weight=weight):
                (wrapped(torch.ones(1, 3, dtype=torch.float64)).sum() * rank).backward()
            gradients.append(float(model.weight.grad[0, 0]))

        ends = []
        for saves in (False, True):
            model, steps = net(torch.float64), iter([0, 3, 1, 5])
            optimizer, rule = torch.optim.SGD(model.parameters(), lr=0.05), bk.algorithms.local_sgd(4)
            weight = lambda steps=steps: 1 + rank * next(steps)  # noqa: E731
            att = bk.attach(model, optimizer, rule, weight=weight)
            for step in range(4):
                run_steps(model, optimizer, [step])
                if saves and step == 1:
                    state = att.state_dict()
                    att.detach()
                    att = bk.attach(model, optimizer, rule, weight=weight, broadcast=False)
                    att.load_state_dict(state)
            att.detach()
            ends.append(flat(model))
        return found, gradients, torch.equal(*ends)

    for found, gradients, resumed in ranks(3, run):
        assert found == pytest.approx([8 / 6] * 4, abs=1e-12) and gradients == pytest.approx([8 / 6] * 2, abs=1e-12)
        assert resumed


def test_a_sharded_model():
    def run():
        from torch.distributed.fsdp import fully_shard

        rank, grads = dist.get_rank(), []
        for stage in (bk.stages.Mean(), bk.stages.CompressedMean(bk.compressors.MinMaxUInt8())):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(64, 64, dtype=torch.float32), nn.Linear(64, 1, dtype=torch.float32))
            fully_shard(model)
            with bk.interop.fsdp(model, stage, weight=lambda: rank * 3 + 1):
                loss = model(torch.full((1, 64), 1.0 + rank, dtype=torch.float32)).sum()
                loss.backward()
            grads.append(model[1].bias.grad.full_tensor().clone())
            grads.append(model[1].weight.grad.full_tensor().clone())
        mine = torch.full((64,), 1.0 + rank, dtype=torch.float32)
        with torch.no_grad():
            hidden = torch.nn.functional.linear(mine, model[0].weight.full_tensor(), model[0].bias.full_tensor())
        return hidden, grads

    there = ranks(2, run)
    expected = (there[0][0] + 4 * there[1][0]) / 5
    for _, (bias, weight, bias_8, weight_8) in there:
        close(bias, torch.ones(1))
        close(weight.flatten(), expected)
        torch.testing.assert_close(bias_8, torch.ones(1), rtol=0, atol=0.05)
        torch.testing.assert_close(weight_8.flatten(), expected, rtol=0, atol=0.05)


@pytest.mark.parametrize("how", ["a function", "a number", "nothing"])
def test_a_rank_without_batches_has_weight_0(how):
    batches, weights = [4, 2, 3], [3, 1, 2]

    def run():
        rank, model = dist.get_rank(), net(torch.float64)
        optimizer = sgd(model.parameters())
        weight = {"a function": lambda: weights[rank], "a number": weights[rank], "nothing": None}[how]
        rules = bk.algorithms.bytegrad(bk.compressors.MinMaxUInt8(), error_feedback=True)
        rules = bk.algorithms.gradient_allreduce() if how != "nothing" else rules
        att = bk.attach(model, optimizer, rules, bucket_bytes=200, weight=weight)
        with att, att.join(divide_by_initial_world_size=how == "a function"):
            run_steps(model, optimizer, range(batches[rank]))
        return flat(model)

    alone = net(torch.float64)
    optimizer = sgd(alone.parameters())
    for step in range(4):
        optimizer.zero_grad()
        here = {r: weights[r] if how != "nothing" else 1 for r in range(3) if step < batches[r]}
        for rank, weight in here.items():
            (loss(alone, rank, step) * weight / sum(here.values())).backward()
        optimizer.step()
    for found in ranks(3, run):
        torch.testing.assert_close(found, flat(alone), rtol=0, atol=1e-13 if how != "nothing" else 0.05)


def test_a_rule_on_weights_in_join_and_gossip_before_the_first_step():
    """Over a function's weights: a rank that has run out has its last steps, then 0; AWC mixes first without any."""
    batches = [6, 2, 3]

    def run():
        rank, ends = dist.get_rank(), []
        for rule in ("local_sgd(2)", "decentralized(Ring())", "quasi_global_momentum(Ring())", "push_sum(Ring())"):
            model = net()
            optimizer = sgd(model.parameters())
            with bk.attach(model, optimizer, made(rule), weight=lambda: rank + 1) as att, att.join():
                run_steps(model, optimizer, range(batches[rank]))
            ends.append(flat(model))
        return ends

    first, *others = ranks(3, run)
    assert all(torch.equal(first[0], other[0]) for other in others)
    assert all(bool(end.isfinite().all()) for each in (first, *others) for end in each)


def test_what_cannot_be_a_weight_is_refused():
    def run(bk, weight, rules):
        model = net()
        optimizer = sgd(model.parameters())
        comm = bk.Comm()
        with bk.attach(model, optimizer, rules, weight=weight, comm=comm, timeout=20):
            run_steps(model, optimizer, range(2))

    def wrong():
        rank, a = dist.get_rank(), bk.algorithms
        exact, only = a.gradient_allreduce(), lambda wrong: wrong if rank == 1 else 1
        found = [
            said(lambda: run(bk, only(math.nan), exact)),
            said(lambda: run(bk, only("2"), exact)),
            said(lambda: run(bk, lambda: 1, a.choco())),
            said(lambda: run(bk, lambda: 1, exact + bk.after_step(a.exact_diffusion().stage))),
            said(lambda: run(bk, float(rank != 1), a.decentralized(bk.topology.Exponential()))),
            said(lambda: bk.attach(net(), None, exact, comm=bk.Comm().weighted(1.0 + rank))),
        ]
        return found

    for found in ranks(4, wrong):
        number, text, choco, diffusion, directed, twice = found
        assert "the weight of rank" in number and "finite number, 0 or more, not nan" in number
        assert "weight is a number, such as that of the tokens in a batch, not '2'" in text
        assert "depends on the weights of ranks; weight is a number, not a function" in choco
        assert "ExactDiffusion(Ring()) depends" in diffusion
        assert "rank 1 has the weight 0, with which no ranks mix over Exponential()" in directed
        assert "comm has weights already" in twice


def test_a_function_that_returns_nan_is_named():
    def run():
        rank, model = dist.get_rank(), net()
        optimizer = sgd(model.parameters())

        def train():
            with bk.attach(
                model, optimizer, bk.algorithms.gradient_allreduce(), timeout=20,
                weight=lambda: math.nan if rank == 1 else 1,
            ):  # fmt: skip
                run_steps(model, optimizer, range(2))

        return said(train)

    for sentence in ranks(2, run):
        assert "the weight of rank 1 is a finite number, 0 or more, not nan" in sentence
