"""Backward passes as scripts run them: twice, in parts, failing, with gradients kept or missing."""

import threading

import pytest
import torch
import torch.distributed as dist
from everything import ALGORITHMS, delayed, made, on_weights, others_slow, runs_free
from pool import ranks
from saying import TIMEOUT, Fails, said
from torch import nn
from training import attached, batch, close, flat, loss, mean_loop, net, net_and_sgd, sgd

import baguakit as bk
from baguakit.rules import rules_of
from baguakit.testing.training import Course

GOSSIP = [lambda bk: bk.algorithms.decentralized(), lambda bk: bk.algorithms.decentralized(order="atc")]


def test_gradients_kept_as_zeros():
    def run():
        m, o = net_and_sgd()
        addresses = set()
        with bk.attach(m, o, bk.algorithms.gradient_allreduce()):
            for step in range(4):
                o.zero_grad(set_to_none=False)
                loss(m, dist.get_rank(), step).backward()
                addresses.add(tuple(p.grad.data_ptr() for p in m.parameters()))
                o.step()
        return flat(m), len(addresses)

    expected = flat(mean_loop(3, lambda m, r, s: loss(m, r, s).backward()))
    for x, addresses in ranks(3, run):
        close(x, expected)
        assert addresses == 1


def test_a_gradient_that_nobody_touched_stays_as_it_was():
    def run():
        m = nn.Linear(3, 3)
        extra = nn.Parameter(torch.ones(5))
        m.register_parameter("extra", extra)
        o = sgd(m.parameters())
        with bk.attach(m, o, bk.algorithms.bytegrad(error_feedback=True)):
            (m(torch.ones(1, 3)).sum() + (extra * torch.arange(5.0) / 3).sum()).backward()
            held = extra.grad.clone()
            for p in (m.weight, m.bias):
                p.grad = None
            m(torch.ones(1, 3)).sum().backward()
            return torch.equal(held, extra.grad)

    assert all(ranks(3, run))


def test_an_exception_in_backward_is_forgotten_by_the_next():
    def backward(m, rank, step):
        if step == 1:
            x, y = batch(rank, 77)
            hidden = m[2](m[1](Fails.apply(m[0](x))))
            with pytest.raises(MemoryError):
                (m[4](m[3](hidden)) - y).square().mean().backward()
            m.zero_grad()
        loss(m, rank, step).backward()

    def run():
        return attached(backward, bucket_bytes=100)

    expected = flat(mean_loop(2, lambda m, r, s: loss(m, r, s).backward()))
    for x in ranks(2, run):
        close(x, expected)


def test_what_a_failed_backward_has_launched_is_read_as_it_was():
    """The user drops the gradients while a flight has yet to load them: a lane must not read `p.grad`."""

    def run():
        model = net()
        held = threading.Event()
        with bk.attach(model, None, bk.during_backward(bk.stages.Mean()), bucket_bytes=100) as att:
            runner = att._life.runners[0]
            runner.channel.lane.run(held.wait)
            x, y = batch(dist.get_rank(), 77)
            hidden = model[2](model[1](Fails.apply(model[0](x))))
            with pytest.raises(MemoryError):
                (model[4](model[3](hidden)) - y).square().mean().backward()
            launched = runner.buckets[0].params
            grads = [p.grad.clone() for p in launched]
            model.zero_grad()
            held.set()
            runner.air[0].flight.result()
            brought = [view.clone() for view in runner.buckets[0].views]
            loss(model, dist.get_rank(), 0).backward()
            return grads, brought

    (one, brought), (other, _) = ranks(2, run)
    for a, b, mean in zip(one, other, brought, strict=True):
        close(mean, (a + b) / 2)


def test_gradient_rules_need_no_optimizer():
    def run():
        m = net()
        with bk.attach(m, None, bk.during_backward(bk.stages.Mean(), stop=2)) as att:
            equal = []
            for step in range(3):
                m.zero_grad()
                loss(m, dist.get_rank(), step).backward()
                equal.append(bk.Comm().gather_objects(m[0].weight.grad.tolist()))
            return [all(g == each[0] for g in each) for each in equal], att.step

    assert all(result == ([True, True, False], 3) for result in ranks(2, run))


@pytest.mark.parametrize("algorithm", GOSSIP)
def test_micro_batches_under_gossip_are_one_batch(algorithm):
    """An exchange in the air lands when the optimizer steps, so that both micro-batches see the same weights."""

    def run(parts):
        m = net(torch.float64)
        o = sgd(m.parameters())
        with bk.attach(m, o, algorithm(bk)):
            for step in range(6):
                o.zero_grad()
                x, y = batch(dist.get_rank(), step, torch.float64)
                for rows in torch.arange(8).chunk(parts):
                    ((m(x[rows]) - y[rows]).square().mean() / parts).backward()
                o.step()
        return flat(m)

    for a, b in zip(ranks(3, run, 1), ranks(3, run, 4), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


WITH_GRADIENTS = [  # of which a rule acts on gradients at the step that fails, and lands them in it
    each
    for each in ALGORITHMS
    if not runs_free(made(each))
    and not delayed(made(each))
    and not on_weights(made(each))
    and any(rule.what == "grad" and rule.acts(3) for rule in rules_of(made(each)))
]


@pytest.mark.parametrize("algorithm", others_slow(WITH_GRADIENTS))
def test_a_failed_backward_costs_all_ranks_the_same_step_with_a_gradient_scaler(algorithm):
    def run(**options):
        return Course(6, scale=1024.0, **options).run(made(algorithm))

    for found, wanted in ranks(2, lambda: (run(fails=(3,)), run(without=(3,)))):
        assert found.keys() == wanted.keys() and all(found[name].equal(wanted[name]) for name in found)
        assert found["the number of steps"] == 5


@pytest.mark.parametrize(
    "delay, to_none, advice",
    [
        (0, False, "use zero_grad(set_to_none=True)"),  # its gradients lie in the buckets
        (1, True, "they step with delayed gradients; let the exception end this rank, and resume from a checkpoint"),
    ],
)
def test_a_failed_backward_is_told_to_all(own_pools, delay, to_none, advice):
    def run():
        model, optimizer = net_and_sgd()
        rule = bk.during_backward(bk.stages.Mean(), delay=delay)
        with bk.attach(model, optimizer, rule, timeout=TIMEOUT, bucket_bytes=200):
            for step in range(5):
                optimizer.zero_grad(set_to_none=to_none)
                hidden = model[1](model[0](torch.ones(2, 6)))
                hidden = Fails.apply(hidden) if step == 2 and dist.get_rank() == 1 else hidden
                try:
                    model[4](model[3](model[2](hidden))).sum().backward()
                except MemoryError:
                    continue
                optimizer.step()

    for sentence in own_pools(3).run(said, run):
        assert sentence.startswith("PeerError: a backward failed on rank 1 after "), sentence
        assert sentence.endswith(advice)
