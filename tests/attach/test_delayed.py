"""Delayed gradients:  x_{t+1} = x_t − γ u(s_{t−d}),  s_t = stage(g_t(x_t)),  s_t = 0 for t < 0."""

import math
import threading

import pytest
import torch
import torch.distributed as dist
from everything import made
from pool import ranks
from tiers import slow_after
from torch import nn
from training import flat, loss, net_and_sgd, run_steps

import baguakit as bk
from baguakit.buckets import split
from baguakit.flights.runner import padded_multiple

MEAN, FEEDBACK = "Mean()", "ErrorFeedback(CompressedMean(MinMaxUInt8(block=64)))"
ONE_BUCKET, BUCKETS = 25 << 20, 200


def by_hand(stage, d, steps=7, bad=(), micro=1, bucket_bytes=ONE_BUCKET, skipped=()):
    """Train this rank by the equation, with one flight after another. Return the weights.

    In the steps `bad` rank 1 has a gradient that is not finite: nothing of it is kept, and no rank steps with it. After
    the backward passes `skipped` no rank steps.
    """
    model, optimizer = net_and_sgd()
    comm, stage = bk.Comm(), made(stage)
    groups = split(list(model.parameters()), bucket_bytes)
    buckets = [bk.Bucket(group, padded_multiple(stage.multiple_of(comm), group)) for group in groups]
    states = [stage.init(bucket, comm) for bucket in buckets]
    air = [[torch.zeros_like(bucket.flat) for bucket in buckets] for _ in range(d)]
    for step in range(steps):
        optimizer.zero_grad()
        for part in range(micro):
            loss(model, dist.get_rank(), step + 100 * part).backward()
        flying = [bucket.load("grad").clone() for bucket in buckets]
        if step not in bad:
            flying = [stage(x, state, comm.at(step)) for x, state in zip(flying, states, strict=True)]
        air.append(flying)
        for bucket, landed in zip(buckets, air.pop(0), strict=True):
            bucket.flat.copy_(landed)
            bucket.store("grad")
        if step - d not in bad and step not in skipped:
            optimizer.step()
    return flat(model)


@pytest.mark.parametrize("d", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_delayed_gradients_are_the_equation(d):
    """Bit for bit, with the gradients kept as zeros or dropped before each backward, and accumulated in three parts."""

    def attached(stage, bucket_bytes, to_none, micro):
        model, optimizer = net_and_sgd()
        rule = bk.during_backward(made(stage), delay=d)
        with bk.attach(model, optimizer, rule, bucket_bytes=bucket_bytes) as att:
            for step in range(7):
                optimizer.zero_grad(set_to_none=to_none)
                for part in range(micro - 1):
                    with att.no_sync():
                        loss(model, dist.get_rank(), step + 100 * part).backward()
                loss(model, dist.get_rank(), step + 100 * (micro - 1)).backward()
                optimizer.step()
            return flat(model)

    def run():
        same = []
        for stage in (MEAN, FEEDBACK):
            for bucket_bytes, to_none, micro in ((ONE_BUCKET, True, 1), (BUCKETS, False, 1), (BUCKETS, True, 3)):
                expected = by_hand(stage, d, micro=micro, bucket_bytes=bucket_bytes)
                same.append(torch.equal(attached(stage, bucket_bytes, to_none, micro), expected))
        return same

    assert ranks(3, run) == [[True] * 6] * 3


def test_a_backward_without_a_step_has_a_round_of_its_own():
    """Its gradients land; those that landed with it are lost. In each round the ranks have other peers."""
    stage = "NeighborMean(OnePeerExponential())"

    def run():
        model, optimizer = net_and_sgd()
        with bk.attach(model, optimizer, bk.during_backward(made(stage), delay=1), bucket_bytes=BUCKETS) as att:
            for step in range(7):
                optimizer.zero_grad()
                loss(model, dist.get_rank(), step).backward()
                if step != 3:
                    optimizer.step()
            return att.step, torch.equal(flat(model), by_hand(stage, 1, bucket_bytes=BUCKETS, skipped=(3,)))

    assert ranks(4, run) == [(6, True)] * 4


@pytest.mark.parametrize("d, momentum", slow_after(2, [(1, 0.0), (1, 0.5), (0, 0.0), (2, 0.0)]))
def test_sgd_is_stable_up_to_the_bound(d, momentum):
    """On x² L / 2 it converges for γ L 2 % below 2 sin(π / (2 (2d + 1))), or 1 − β, and does not 2 % above."""
    bound = 1 - momentum if momentum else 2 * math.sin(math.pi / (2 * (2 * d + 1)))

    def largest(step_size, steps=400):
        """Return the largest |x| in the first steps, and in the latest."""
        x = nn.ParameterList([torch.ones((), dtype=torch.float64)])
        optimizer, at = torch.optim.SGD(x.parameters(), lr=step_size / 3, momentum=momentum), []
        with bk.attach(x, optimizer, bk.during_backward(bk.stages.Mean(), delay=d)):
            for _ in range(steps):
                optimizer.zero_grad()
                (1.5 * x[0].square()).backward()
                optimizer.step()
                at.append(x[0].abs().item())
        return max(at[:20]), max(at[-20:])

    def run():
        return largest(0.98 * bound), largest(1.02 * bound)

    ((first, last), (begun, grown)) = ranks(1, run)[0]
    assert last < first / 3 and grown > 3 * begun


@pytest.mark.parametrize("d", [1, 2])
@pytest.mark.parametrize("stage", [MEAN, FEEDBACK])
def test_an_overflow_costs_the_step_in_which_it_would_land(stage, d):
    """And leaves no trace. The scale changes while gradients are in the air, and with them nothing."""

    def run():
        model, optimizer = net_and_sgd()
        scaler, skipped, scales = torch.amp.GradScaler("cpu", init_scale=512.0, growth_interval=2), [], set()
        rule = bk.during_backward(made(stage), delay=d)
        with bk.attach(model, optimizer, rule, scaler=scaler, bucket_bytes=BUCKETS) as att:
            for step in range(9):
                optimizer.zero_grad()
                value = loss(model, dist.get_rank(), step)
                if step in (0, 3) and dist.get_rank() == 1:
                    value = value + model[4].bias[0] * float("inf")  # one value of one bucket
                before = att.step
                scaler.scale(value).backward()
                scaler.step(optimizer)
                scaler.update()
                scales.add(scaler.get_scale())
                if att.step == before:
                    skipped.append(step)
        return skipped, len(scales) > 1, torch.equal(flat(model), by_hand(stage, d, 9, (0, 3), bucket_bytes=BUCKETS))

    assert ranks(2, run) == [([d, d + 3], True, True)] * 2


@pytest.mark.parametrize("stage", [MEAN, FEEDBACK])
def test_the_exchange_overlaps_d_whole_steps(stage):
    """With nothing arriving, d steps end; the decisions on what to keep do not wait, either."""

    def run():
        model, optimizer = net_and_sgd()
        held = threading.Event()
        with bk.attach(model, optimizer, bk.during_backward(made(stage), delay=2), bucket_bytes=BUCKETS) as att:
            att._life.runners[0].channel.lane.run(held.wait)
            run_steps(model, optimizer, range(2))
            held_up = att.step
            report = att.report()
            landed = {(row.flights, row.landed) for row in report.rows}
            held.set()
            run_steps(model, optimizer, range(2, 5))
            rows = att.report().rows
            timeline = att.timeline()
        here = [flight for flight in timeline.flights if flight.rank == dist.get_rank()]
        steps = {span.step: span for span in timeline.spans if span.rank == dist.get_rank() and span.name == "step"}
        lands = all(steps[f.step + 2].start <= f.landed <= steps[f.step + 2].end for f in here)
        return held_up, landed, {(row.flights, row.landed) for row in rows}, {f.step for f in here}, lands

    assert ranks(2, run) == [(2, {(2, 0)}, {(5, 3)}, {0, 1, 2}, True)] * 2
