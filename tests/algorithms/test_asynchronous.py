"""Asynchronous gossip and push-sum: their means, and ranks that stop, end, or make other numbers of steps."""

import contextlib
import os
import threading
import time

import pytest
import torch
import torch.distributed as dist
from everything import made
from pool import ranks
from tiers import slow_after
from torch import nn

import baguakit as bk
from baguakit.compressors import MinMaxUInt8
from baguakit.ranks import Ranks
from baguakit.topology import FromDigraph, OnePeerExact, Ring, SymmetricExponential


def trained(steps, algorithm, before=lambda step: None, lr=0.0, at_first=0.0):
    """Train a layer, whose weights are the number of the rank at first; return its weights.

    They are loaded after the layer has been attached with others, `at_first` more.
    """
    rank = bk.Comm().rank
    model = nn.Linear(30, 4)

    def fill(value):
        for p in model.parameters():
            p.data.fill_(value)

    fill(rank + at_first)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    with bk.attach(model, optimizer, algorithm, broadcast=False) as att:
        fill(float(rank))
        for step in range(steps):
            before(step)
            optimizer.zero_grad()
            model(torch.ones(2, 30)).sum().backward()
            optimizer.step()
        dist.barrier()
    assert att.step == steps
    assert not [each for each in threading.enumerate() if each.name == "baguakit window"]
    return model.weight.detach()


@pytest.mark.slow
@pytest.mark.parametrize("compressor", [None, MinMaxUInt8()], ids=["exact", "MinMaxUInt8"])
@pytest.mark.parametrize("staleness", [2, None, 0])
def test_without_steps_of_the_optimizer_ranks_come_to_agree(compressor, staleness):
    def run():
        return trained(200, bk.algorithms.async_gossip(Ring(), compressor, staleness), lambda step: dist.barrier())

    found = ranks(4, run)
    assert all(float(w.min()) >= 0 and float(w.max()) <= 3 for w in found)
    for w in found:
        torch.testing.assert_close(w, found[0][:1, :1].expand(4, 30), rtol=1e-3, atol=0)


@pytest.mark.parametrize("staleness", slow_after(1, [None, 0, 2]))
@pytest.mark.parametrize("links", [None, [(0, 1), (1, 2), (2, 3), (3, 0), (0, 2)]], ids=["Ring", "one way"])
def test_push_sum_comes_to_the_exact_mean(links, staleness):
    """However many exchanges each rank has made before, and on a graph with links of one way."""

    def run():
        def before(step):
            if step >= 100 + more:
                dist.barrier()

        more = 10 * bk.Comm().rank if staleness is None else 0
        graph = Ring() if links is None else FromDigraph(links)
        return trained(300 + more, bk.algorithms.async_push_sum(graph, staleness), before)

    for w in ranks(4, run):
        torch.testing.assert_close(w, torch.full((4, 30), 1.5), rtol=1e-4, atol=0)


@pytest.mark.parametrize("algorithm", slow_after(1, ["async_push_sum()", "async_gossip()"]))
def test_weights_that_are_loaded_after_attach_are_mixed_and_no_others(algorithm):
    for w in ranks(4, lambda: trained(200, made(algorithm), lambda step: dist.barrier(), at_first=1e6)):
        assert float(w.min()) >= -1e-4 and float(w.max()) <= 3 + 1e-4


@pytest.mark.parametrize("topology", [Ring(), SymmetricExponential()])
def test_old_values_delay_no_mean(topology):
    """All ranks move by 0.2 in each step, and never meet. The mean lacks at most what is under way on each edge."""

    def run():
        pause = 0.001 * bk.Comm().rank
        return trained(200, bk.algorithms.async_gossip(topology), lambda step: time.sleep(pause), lr=0.1)

    moved = 1.5 - torch.stack(ranks(4, run)).mean()
    assert moved == pytest.approx(200 * 0.2, rel=0.02)


@pytest.mark.parametrize("algorithm", slow_after(1, ["async_push_sum()", "async_gossip()"]))
def test_nobody_waits_for_a_rank_that_waits_for_all(algorithm):
    def run():
        rank, store = bk.Comm().rank, dist.distributed_c10d._get_default_store()

        def before(step):
            if rank == 0 and step == 1:
                store.wait([f"async/{r}" for r in range(1, 4)])
            if rank and step == 49:
                store.set(f"async/{rank}", "")

        trained(50, made(algorithm), before)
        dist.barrier()
        if rank == 0:
            for r in range(1, 4):
                store.delete_key(f"async/{r}")
        return True

    assert ranks(4, run) == [True] * 4


NOISE, FEATURES, ROWS = 0.1, 8, 64


def regressed(algorithm, optimizer):
    """Fit a line to noisy values, of which each rank has some; return its error on all, over the noise's variance.

    With SGD, what a rank has tells next to nothing of two of the features.
    """
    comm = bk.Comm()
    draw = torch.Generator().manual_seed(1)
    truth = torch.randn(FEATURES, 1, generator=draw, dtype=torch.float64)
    inputs = torch.randn(comm.size, ROWS, FEATURES, generator=draw, dtype=torch.float64)
    for r in range(comm.size) if optimizer == "SGD" else ():  # Adam would not weigh them by their gradients
        inputs[r, :, [2 * r % FEATURES, (2 * r + 1) % FEATURES]] *= 0.01
    values = inputs @ truth + NOISE * torch.randn(comm.size, ROWS, 1, generator=draw, dtype=torch.float64)
    model = nn.Linear(FEATURES, 1, bias=False, dtype=torch.float64)
    nn.init.zeros_(model.weight)  # a start near the truth would hide what a rank does not learn
    made_optimizer = getattr(torch.optim, optimizer)(model.parameters(), lr=0.05)
    rate = torch.optim.lr_scheduler.LinearLR(made_optimizer, 1, 0.02, 400)
    with bk.attach(model, made_optimizer, algorithm) if algorithm else contextlib.nullcontext():
        for step in range(400):
            made_optimizer.zero_grad()
            (model(inputs[comm.rank]) - values[comm.rank]).square().mean().backward()
            made_optimizer.step()
            rate.step()
            if step % 10 == 9:
                dist.barrier()
        with torch.no_grad():
            return float((model(inputs.view(-1, FEATURES)) - values.view(-1, 1)).square().mean()) / NOISE**2


@pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
@pytest.mark.parametrize(
    "algorithm",
    slow_after(2, ["async_gossip()", "async_push_sum(Exponential())", "async_gossip(every=4)", "async_push_sum()"]),
)
def test_they_come_to_the_noise_floor(algorithm, optimizer):
    """As BlueFog's window optimizers must: each rank's error is at most half more than the variance of the noise."""
    for error in ranks(4, lambda: regressed(made(algorithm), optimizer)):
        assert error < 1.5


def test_no_rank_comes_there_alone():
    assert min(ranks(4, regressed, None, "SGD")) > 5


def one_ends(algorithm):
    """Let rank 1 end in its tenth step; all others train on until they know, and 20 steps more."""
    rank = bk.Comm().rank
    model = nn.Linear(30, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with bk.attach(model, optimizer, made(algorithm)) as att:
        (window,) = (state["window"] for runner in att._life.runners for state in runner.states)
        left = 20
        while left:
            if rank == 1 and att.step == 10:
                os._exit(0)
            optimizer.zero_grad()
            model(torch.ones(2, 30)).square().mean().backward()
            optimizer.step()
            left -= (rank == 3 and att.step > 10) or 1 in window.lost
    return sorted(window.lost).count(1), bool(torch.isfinite(model.weight).all())


@pytest.mark.parametrize("algorithm", ["async_gossip()", "async_gossip(staleness=2)", "async_push_sum()"])
def test_a_rank_that_ends_costs_its_edges_only(algorithm):
    with Ranks(4, timeout=60) as live:
        assert live.run(one_ends, algorithm, lost=(1,)) == [(1, True), None, (1, True), (0, True)]


def test_what_cannot_work_is_refused():
    stage = bk.algorithms.asynchronous.WindowMean(Ring())
    with pytest.raises(ValueError, match=r"WindowMean\(Ring\(\)\) is for free_running"):
        bk.after_step(stage)
    with pytest.raises(ValueError, match=r"^WindowMean\(Ring\(\)\) is for free_running alone"):
        bk.after_step(bk.stages.Hierarchical(stage))
    with pytest.raises(ValueError, match=r"WindowMean\(Ring\(\)\) is for free_running"):
        bk.free_running(stage, interval=1.0)
    with pytest.raises(ValueError, match="staleness is a whole number, 0 or more"):
        bk.algorithms.async_gossip(staleness=-1)

    def run():
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for graph in (OnePeerExact(), FromDigraph([(r, (r + 1) % 4) for r in range(4)] + [(0, 2)])):
            with pytest.raises(ValueError, match="same doubly stochastic matrix in all rounds"):
                bk.attach(model, optimizer, bk.algorithms.async_gossip(graph))
        with pytest.raises(ValueError, match="same matrix in all rounds, whose columns sum to 1, for 4 ranks"):
            bk.attach(model, optimizer, bk.algorithms.async_push_sum(OnePeerExact()))
        return True

    assert ranks(4, run) == [True] * 4
