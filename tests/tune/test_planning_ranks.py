"""Probing and planning on live ranks: all of them find, and pick, the same."""

import os
import threading
import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from pool import ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import baguakit as bk


def small():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


@pytest.mark.slow
def test_probes_agree_across_ranks_and_leave_nothing_behind():
    def work():
        def held():
            return len(os.listdir("/proc/self/fd")), threading.active_count()

        def more(than):
            return any(now > then for now, then in zip(held(), than, strict=True))

        comm = bk.Comm()
        kinds = [bk.compressors.BFloat16(), bk.compressors.TopK(0.1)]
        bk.tune.probe(comm, flows=(2, 1), compressors=kinds, seconds=0.02)  # what torch opens once and keeps is open
        before = held()
        found = bk.tune.probe(comm, flows=(2, 1), compressors=kinds, seconds=0.2)
        until = time.monotonic() + 20
        while more(before) and time.monotonic() < until:  # threads that have been told to end may take a while
            time.sleep(0.01)
        return found, f"{before} were held, and {held()} are" if more(before) else None

    told = ranks(2, work)
    found = told[0][0]
    assert [left for _, left in told] == [None] * 2
    assert all(each == found for each, _ in told)
    assert [(link.part, link.flows, link.ranks) for link in found.links] == [("flat", 1, 2), ("flat", 2, 2)]
    assert [codec.name for codec in found.codecs] == ["BFloat16()", "TopK(0.1)"]
    for link in found.links:
        for line in (link.exchange, link.all_reduce):
            assert line.alpha >= 0 and 0 < line.beta < 1e-6 and 0 <= line.busy <= line.beta
    assert found.copy > 0 and found.launch > 0 and 0 <= found.crowding <= 1
    assert bk.tune.Network.from_json(found.to_json()) == found


@pytest.mark.slow  # four ranks probe three groups
def test_nodes_have_links_of_their_own():
    def work():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("inter", "intra"))
        comm = bk.Comm(mesh=mesh)
        found = bk.tune.probe(comm, flows=(1, 2), compressors=[bk.compressors.BFloat16()], seconds=0.05)
        algorithms = [bk.algorithms.bytegrad(bk.compressors.BFloat16())]
        return found, bk.tune.plan(small(), comm, found, 0.01, algorithms)

    for found, plan in ranks(4, work):
        links = [(link.part, link.flows, link.ranks) for link in found.links]
        assert links == [("flat", 1, 4), ("intra", 1, 2), ("inter", 1, 2), ("inter", 2, 2)] and found.per_node == 2
        flat = bk.algorithms.bytegrad(bk.compressors.BFloat16())
        assert {row.algorithm for row in plan.rows} == {flat, bk.hierarchical(flat)}
        assert sorted(row.flows for row in plan.rows) == [1, 1, 2]  # further flows are between nodes only


def test_all_ranks_pick_the_same_and_train_with_it():
    def work():
        model = small()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        x = torch.randn(4, 8)

        def step():
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

        kind = bk.compressors.BFloat16()
        algorithms = [bk.algorithms.gradient_allreduce(), bk.algorithms.bytegrad(kind)]
        network = bk.tune.probe(flows=(1, 2), compressors=[kind], seconds=0.05)
        plan = bk.tune.plan(model, None, network, step, algorithms, (1, 1 << 20))
        best = plan.best
        comm = bk.Comm(flows=best.flows)
        with bk.attach(model, optimizer, best.algorithm, comm=comm, bucket_bytes=best.bucket_bytes) as att:
            step()
            return str(plan), plan.compute, best, len(att.report().rows)

    told = ranks(2, work)
    text, compute, best, rows = told[0]
    assert all(each[0] == text and each[1] == compute for each in told)
    assert min(compute.forward, compute.backward, compute.optimizer) > 0 and len(compute.ready) == 4
    # Gradients come from the last layer to the first, and the last of them ends backward.
    assert max(compute.ready[2:]) <= max(compute.ready[:2]) == 1
    assert rows == best.buckets


def test_one_rank_plans_too():
    def work():
        network = bk.tune.probe(seconds=0.02, compressors=[])
        at_no_cost = replace(network, copy=0.0, launch=0.0)
        return network, *(
            bk.tune.plan(small(), None, each, 0.01, [bk.algorithms.gradient_allreduce()]).best
            for each in (network, at_no_cost)
        )

    ((network, best, at_no_cost),) = ranks(1, work)
    assert network.links == () and best.sent == 0
    assert at_no_cost.seconds == pytest.approx(0.01) and best.seconds > 0.01  # its own machine is all it pays for


def test_what_is_refused():
    def work():
        found = []
        for attempt in (
            lambda: bk.tune.probe(flows=(0,)),
            lambda: bk.tune.probe(seconds=0),
            lambda: bk.tune.probe(device="cuda"),
            lambda: bk.tune.plan(small(), algorithms=[]),
            lambda: bk.tune.plan(small(), algorithms=bk.algorithms.bytegrad()),
            lambda: bk.tune.plan(small(), bucket_bytes=()),
            lambda: bk.tune.plan(small(), network=network, step_seconds="1 s"),
            lambda: bk.tune.plan(small(), network=network, step_seconds=lambda: None),
        ):
            try:
                attempt()
            except (TypeError, ValueError) as error:
                found.append(str(error))
        return found

    network = bk.tune.Network(1, 1, "cpu", 1, (), ())
    words = [
        "1 to 64",
        "greater than 0",
        "has no CUDA device",
        "list of the algorithms",
        "is a list",
        "names no size",
        "not '1 s'",
    ]
    for found in ranks(1, work):
        assert all(word in text for word, text in zip([*words, "must call the model"], found, strict=True))


def test_an_error_on_one_rank_is_raised_on_all():
    def work():
        network = bk.tune.Network(1, 1, "cpu", 1, ())
        with pytest.raises(ValueError) as error:
            bk.tune.plan(small(), None, network, 0.01 if dist.get_rank() else -1.0)
        return str(error.value)

    first, second = ranks(2, work)
    assert (
        first.startswith("forward is a finite number, 0 or more")
        and second == f"rank 0 could not plan: ValueError: {first}"
    )
