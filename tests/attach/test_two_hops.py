"""The two hops of a compressed mean are phases: those of several buckets overlap, and nothing else changes."""

import threading
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from everything import made
from pool import ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import baguakit as bk
from baguakit.lanes import CpuLane
from baguakit.primitives import compressed

WAIT = 60.0  # seconds: only a failure takes them
BUCKETS = 110_000  # bytes of a layer, and more than one hop takes
HOPS = (
    "bytegrad()",
    "bytegrad(delay=1)",
    "bytegrad(UInt4(), error_feedback=True)",
    "between_steps(CompressedMean())",
    "after_step(ErrorFeedback(CompressedMean()), every=2, delay=1)",
)


def layers(count=4):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(162, 162) for _ in range(count)))
    torch.manual_seed(dist.get_rank())
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def step(model, optimizer):
    optimizer.zero_grad()
    model(torch.randn(3, 162)).square().mean().backward()
    optimizer.step()


def trained(algorithm, hook):
    model, optimizer = layers()
    if hook:
        wrapped = DistributedDataParallel(model, bucket_cap_mb=BUCKETS / 2**20)
        attached = bk.interop.ddp(wrapped, made(algorithm))
    else:
        wrapped, attached = model, bk.attach(model, optimizer, made(algorithm), bucket_bytes=BUCKETS)
    with attached as att:
        for _ in range(5):
            step(wrapped, optimizer)
        state = att.state_dict()["rules"]["0"]["parameters"]
    return [p.detach() for p in model.parameters()] + [x for held in state.values() for x in held.values()]


def on_one_and_on_two(algorithm, hook):
    two, run = [], CpuLane.run

    def on_one(lane, work, name="", in_phases=False):
        two.append(in_phases)
        return run(lane, work, name)

    found = trained(algorithm, hook)
    with patch.object(CpuLane, "run", on_one):
        same = trained(algorithm, hook)
    return any(two), len(found) == len(same) and all(map(torch.equal, found, same))


@pytest.mark.parametrize("algorithm, hook", [*((each, False) for each in HOPS), (HOPS[2], True)])
def test_two_lanes_change_no_bit(algorithm, hook):
    assert ranks(3, on_one_and_on_two, algorithm, hook) == [(True, True)] * 3


@pytest.mark.parametrize("algorithm", HOPS[:3])
def test_the_first_hop_of_a_bucket_overlaps_the_second_of_the_one_before(algorithm):
    """The second hop of bucket 0 ends only when the first hop of bucket 1 has begun."""

    def run():
        begun, scattered, gathered = threading.Event(), compressed.scattered, compressed.gathered

        def scatter(comm, *given):
            if comm._bucket == 1:
                begun.set()
            return scattered(comm, *given)

        def gather(comm, *given, **options):
            assert comm._bucket or begun.wait(WAIT)
            return gathered(comm, *given, **options)

        model, optimizer = layers(2)
        attached = bk.attach(model, optimizer, made(algorithm), bucket_bytes=BUCKETS)
        with patch.object(compressed, "scattered", scatter), patch.object(compressed, "gathered", gather), attached:
            step(model, optimizer)
            step(model, optimizer)
        return begun.is_set()

    assert ranks(3, run) == [True] * 3


class Doubled(bk.stages.CompressedMean):
    """A subclass with a call of its own, which has no phases."""

    def __call__(self, x, state, comm, residual=None):
        return super().__call__(x, state, comm, residual).mul_(2)


def test_a_subclass_with_another_call_is_called():
    def run(stage):
        model, optimizer = layers(2)
        with bk.attach(model, optimizer, bk.during_backward(stage), bucket_bytes=BUCKETS):
            step(model, optimizer)
        return [p.grad.clone() for p in model.parameters()]

    def both():
        return [torch.equal(2 * a, b) for a, b in zip(run(bk.stages.CompressedMean()), run(Doubled()), strict=True)]

    assert ranks(3, both) == [[True] * 4] * 3
