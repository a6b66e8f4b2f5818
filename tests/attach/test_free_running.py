"""Averaging that nobody waits for."""

import random
import time

import pytest
import torch
import torch.distributed as dist
from pool import ranks
from tiers import slow_after
from torch import nn
from training import loss, net, net_and_sgd, sgd

import baguakit as bk


def test_every_bucket_keeps_its_own_mean():
    """Three buckets of equal length, lr 0, random paces: the sum over ranks of each stays what it was.

    A rank takes 1,000 steps, and on a busy machine more, until six flights have landed.
    """

    def run():
        rank = dist.get_rank()
        model = nn.ParameterList([nn.Parameter(torch.full((8,), 10.0**i * (rank + 1))) for i in range(3)])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        pace = random.Random(rank)
        with bk.attach(model, optimizer, bk.free_running(bk.stages.Mean()), broadcast=False, bucket_bytes=1) as att:
            for step in range(100_000):
                sum(p.sum() for p in model).backward()
                optimizer.step()
                if pace.random() < 0.05:
                    time.sleep(0.002 * pace.random() * (1 + rank))
                if step >= 1000 and min(flights := [row.flights for row in att.report().rows]) > 5:
                    break
        return [p.detach()[0].item() for p in model], flights

    results = ranks(3, run)
    for i in range(3):
        for values, flights in results:
            assert values[i] == pytest.approx(2.0 * 10**i, rel=1e-5)
            assert flights[i] > 5 and len(set(flights)) == 1


def test_ranks_that_stop_at_different_steps():
    """A rank that has finished has weight 0: the rest go on averaging, with the mean of the rest."""

    def run():
        rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
        pair, leaves = dist.new_group([1, 2]), "test_ranks_that_stop_at_different_steps: rank 0 leaves"
        model = nn.Linear(1, 1, bias=False)
        nn.init.constant_(model.weight, float(rank))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

        def train_until(happened, steps=20_000):
            for step in range(steps):
                model(torch.ones(1, 1)).sum().backward()
                optimizer.step()
                time.sleep(0.001)
                if step >= 100 and happened():
                    return True
            return False

        def meets(value):
            return lambda: model.weight.item() == pytest.approx(value)

        with bk.attach(model, optimizer, bk.free_running(bk.stages.Mean()), broadcast=False) as att:
            if rank == 0:
                train_until(meets(1.0))
                store.set(leaves, "")
            else:
                train_until(lambda: store.check([leaves]))
                for _ in range(20):  # it may have a weight for a moment yet
                    dist.barrier(group=pair)
                    model.weight.data.fill_(10.0 * rank)  # a mean of their own
                    dist.barrier(group=pair)
                    met = torch.tensor(train_until(meets(15.0), 500))
                    dist.all_reduce(met, dist.ReduceOp.MIN, group=pair)
                    if met:
                        break
            flights = att.report().rows[0].flights
        dist.destroy_process_group(pair)
        return model.weight.item(), flights

    (first, few), (second, many), (third, also) = ranks(3, run)
    assert first == pytest.approx(1.0) and second == pytest.approx(15.0) and third == pytest.approx(15.0)
    assert min(many, also) > few


@pytest.mark.parametrize("dtype", slow_after(1, [torch.float32, torch.bfloat16, torch.float16]))
def test_models_agree_after_merge(dtype):
    def run():
        model = net(dtype)
        optimizer = sgd(model.parameters(), lr=0.01)
        losses = []
        with bk.attach(model, optimizer, bk.algorithms.async_model_average(warmup_steps=5)):
            for step in range(60 + 20 * dist.get_rank()):
                optimizer.zero_grad()
                value = loss(model, dist.get_rank(), step)
                value.backward()
                optimizer.step()
                losses.append(value.item())
        with bk.attach(model, optimizer, bk.algorithms.gradient_allreduce(), broadcast=False) as att:
            att.merge()
            return att.consensus_distance(), losses[0], losses[-1]

    for apart, first, last in ranks(3, run):
        assert apart < 1e-6 and last < first


def test_the_interval_is_kept():
    """Between two flights there is the interval at least, and there are several."""

    def run():
        model, optimizer = net_and_sgd()
        began = time.monotonic()
        with bk.attach(model, optimizer, bk.free_running(bk.stages.Mean(), interval=0.2)) as att:
            while (flights := att.report().rows[0].flights) < 3:
                loss(model, 0, 0).backward()
                optimizer.step()
            return flights, time.monotonic() - began

    assert all(0.2 * (flights - 1) <= seconds for flights, seconds in ranks(2, run))


def test_nobody_waits_for_a_rank_that_makes_no_steps():
    """Two ranks make a hundred steps while the third stands still until they have."""

    def run():
        rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
        model, name = net(), "test_nobody_waits_for_a_rank_that_makes_no_steps"
        optimizer = sgd(model.parameters())
        with bk.attach(model, optimizer, bk.algorithms.async_model_average()) as att:
            for step in range(100):
                if rank == 0 and step == 1:
                    store.wait([f"{name}: 1", f"{name}: 2"])
                loss(model, rank, step).backward()
                optimizer.step()
            store.set(f"{name}: {rank}", "")
            return att.step

    assert ranks(3, run) == [100] * 3
