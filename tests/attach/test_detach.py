"""An attachment leaves nothing behind; `test_parts.py` has the check `detach` of every algorithm."""

import gc
import os
import threading
import time

import pytest
import torch.distributed as dist
from everything import made, of_each_kind, usual, windows
from pool import ranks
from torch.distributed.device_mesh import init_device_mesh
from training import loss, net_and_sgd, run_steps

import baguakit as bk


def belongings():
    """Return how many descriptors and threads this process has."""
    gc.collect()
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), threading.active_count()


@pytest.mark.parametrize(
    "ending, some",
    [
        pytest.param("refusal", of_each_kind(kind_of=windows), marks=pytest.mark.slow),
        ("exception", ["gradient_allreduce()", "after_step(Mean(), delay=1)"]),
        pytest.param("refusal", usual().values(), marks=pytest.mark.slow),
    ],
    ids=["refusal", "exception", "refusal of any"],
)
def test_cycles_leave_nothing(ending, some):
    """Two rounds; where ranks raise, which they wait for, with one algorithm for gradients and one for weights."""
    some, rounds = list(some), 2

    def run():
        model, optimizer = net_and_sgd()

        def cycle(algorithm):
            if ending == "refusal":
                with pytest.raises(ValueError):
                    bk.attach(model, optimizer, made(algorithm), bucket_bytes=0)
                return
            try:
                with bk.attach(model, optimizer, made(algorithm)):
                    run_steps(model, optimizer, range(3))
                    if ending == "exception":
                        raise KeyError("mine")
            except KeyError:
                # Where ranks raise, nobody waits for anybody: give the slowest time before groups are made again.
                bk.Comm().gather_objects(0)

        for algorithm in some:
            cycle(algorithm)
        before, known = belongings(), len(dist.distributed_c10d._world.pg_map)
        for algorithm in some * rounds:
            cycle(algorithm)
        for _ in range(500):  # threads and sockets end a moment after they are told to
            if all(now <= then for now, then in zip(belongings(), before, strict=True)):
                break
            time.sleep(0.01)
        hooks = [len(p._post_accumulate_grad_hooks or {}) for p in model.parameters()]
        hooks += [len(optimizer._optimizer_step_pre_hooks), len(optimizer._optimizer_step_post_hooks)]
        return before, belongings(), sum(hooks), len(dist.distributed_c10d._world.pg_map) - known

    for before, after, hooks, groups in ranks(2, run):
        assert all(now <= then for now, then in zip(after, before, strict=True)), (before, after)
        assert hooks == 0 and groups == 0


def test_groups_and_threads_are_counted():
    """One lane has one group, or three if a rule works in nodes; one that flies on has another; none for more rules."""

    def run():
        model, optimizer = net_and_sgd()
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("inter", "intra"))
        counts = []
        for comm in (None, bk.Comm(mesh=mesh)):
            for rules in (
                [bk.algorithms.bytegrad()],
                [bk.algorithms.bytegrad(), bk.algorithms.local_sgd()],
                [bk.algorithms.bytegrad(), bk.after_step(bk.stages.Mean(), delay=1)],
                *([[bk.hierarchical(bk.algorithms.bytegrad())]] if comm else []),
            ):
                with bk.attach(model, optimizer, *rules, comm=comm) as att:
                    counts.append(att.report().groups)
        return counts

    assert ranks(2, run) == [[1, 1, 2, 1, 1, 2, 3]] * 2


def test_detach_may_be_called_twice_and_training_goes_on_alone():
    def run():
        model, optimizer = net_and_sgd()
        att = bk.attach(model, optimizer, bk.algorithms.decentralized())
        loss(model, dist.get_rank(), 0).backward()
        optimizer.step()
        att.detach()
        att.detach()
        if dist.get_rank() == 0:
            loss(model, 0, 1).backward()
            optimizer.step()

    ranks(3, run)


def test_a_report_keeps_no_weights():
    """Flights are remembered for their times, and not with the tensors that they carried."""

    def run():
        model, optimizer = net_and_sgd()
        rules = (bk.algorithms.decentralized(), bk.after_step(bk.stages.Mean(), every=2, delay=1))
        with bk.attach(model, optimizer, *rules) as att:
            run_steps(model, optimizer, range(6))
            report = att.report()
        flights = [flight for row in report.rows for flight in row._flights]
        assert all(flight.before is None and flight.flight.value is None for flight in flights)
        return len(flights), all(row.seconds > 0 and row.exposed >= 0 for row in report.rows)

    assert ranks(2, run) == [(8, True)] * 2
