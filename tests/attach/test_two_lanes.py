"""A mean within nodes and between them flies on two lanes: they overlap, and nothing else changes."""

import os
import signal
import threading
import time
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from everything import ALGORITHMS, made
from pool import ranks
from tiers import slow_after
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import baguakit as bk
from baguakit.lanes import CpuLane

WAIT = 60.0  # seconds: only a failure takes them


def nodes():
    return bk.Comm(mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("inter", "intra")))


def trained(algorithm, steps=5, **options):
    """The parameters and the states of the rules after some steps of four layers, a bucket each."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    comm = nodes()
    torch.manual_seed(comm.rank)
    with bk.attach(model, optimizer, bk.hierarchical(made(algorithm)), comm=comm, bucket_bytes=1100, **options) as att:
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.randn(3, 16)).square().mean().backward()
            optimizer.step()
        return [p.detach().clone() for p in model.parameters()], att.state_dict()["rules"]


def same(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def on_one_and_on_two(algorithm):
    flown, run = [], CpuLane.run

    def counted(lane, work, name="", in_phases=False):
        flown.extend([name] * in_phases)
        return run(lane, work, name, in_phases)

    try:
        CpuLane.run = counted
        found = trained(algorithm)
        CpuLane.run = lambda lane, work, name="", in_phases=False: run(lane, work, name)
        return len(flown), same(found, trained(algorithm))
    finally:
        CpuLane.run = run


def hierarchical(algorithm):
    try:
        bk.hierarchical(made(algorithm))
    except (TypeError, ValueError):
        return False
    return "async" not in algorithm  # whose flights come when they come


@pytest.mark.parametrize("algorithm", slow_after(1, filter(hierarchical, ALGORITHMS)))
def test_two_lanes_change_no_bit(algorithm):
    for flown, equal in ranks(4, on_one_and_on_two, algorithm):
        assert flown and equal


WHENS = {
    "during backward": "bk.during_backward(stage)",
    "delayed gradients": "bk.during_backward(stage, delay=1)",
    "between steps": "bk.between_steps(stage)",
    "after step": "bk.after_step(stage)",
    "delayed weights": "bk.after_step(stage, every=2, delay=1)",
    "free": "bk.free_running(stage)",
}


@pytest.mark.parametrize("when", slow_after(1, WHENS))
def test_what_flies_between_nodes_overlaps_what_flies_within_them(when):
    """Each of the two begins only when the other has begun."""

    def run():
        between, within = threading.Event(), threading.Event()
        scatter = bk.Comm.reduce_scatter

        def scattered(comm, x):
            if comm._bucket == 1:
                within.set()
                assert between.wait(WAIT)
            return scatter(comm, x)

        class Met(bk.stages.Mean):
            def __call__(self, x, state, comm):
                if comm._bucket == 0:
                    between.set()
                    assert within.wait(WAIT)
                return super().__call__(x, state, comm)

        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        rule = eval(WHENS[when], {"bk": bk, "stage": bk.stages.Hierarchical(Met())})
        attached = bk.attach(model, optimizer, rule, comm=nodes(), bucket_bytes=300)
        with patch.object(bk.Comm, "reduce_scatter", scattered), attached as att:
            while not min(row.landed for row in att.report().rows):
                model(torch.randn(3, 8)).square().mean().backward()
                optimizer.step()
            timeline, report = att.timeline(), att.report()
        threads = {flight.thread.removeprefix("lane 1").removeprefix("lane 0") for flight in timeline.flights}
        return threads, all(row.seconds > 0 for row in report.rows)

    assert ranks(4, run) == [({"", " beside"}, True)] * 4


@pytest.mark.slow
@pytest.mark.parametrize("dies", [True, False])
def test_a_rank_that_dies_or_fails_between_nodes_is_named(own_pools, dies):
    """Nothing of earlier buckets takes off after that, either."""
    victim = 3 if dies else 1

    def run():
        class Ends(bk.stages.Mean):
            def __call__(self, x, state, comm):
                if dist.get_rank() == victim and comm._bucket == 1 and comm.round == 2:
                    if dies:
                        os.kill(os.getpid(), signal.SIGKILL)
                    raise KeyError("half-way")
                return super().__call__(x, state, comm)

        return failed(bk.during_backward(bk.stages.Hierarchical(Ends())))

    said = own_pools(4).run(run, lost=(victim,) * dies)
    for sentence, names in said[: 4 - dies]:
        words = "rank 3 is dead" if dies else "bucket 1, round 2 failed on rank 1: KeyError: 'half-way'"
        assert words in sentence and not names, said


def failed(rule):
    """The error of a training, and the threads that are left after it."""
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        with bk.attach(model, optimizer, rule, comm=nodes(), bucket_bytes=300, timeout=3.0):
            for _ in range(6):
                optimizer.zero_grad()
                model(torch.randn(3, 8)).square().mean().backward()
                optimizer.step()
    except bk.PeerError as error:
        deadline, names = time.monotonic() + WAIT, ["?"]
        while names and time.monotonic() < deadline:
            names = [thread.name for thread in threading.enumerate() if thread.name.startswith("baguakit")]
            time.sleep(0.01)
        return str(error), names
