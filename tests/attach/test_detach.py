"""What an attachment leaves behind: nothing."""

import os
import threading

import pytest
from pool import ranks
from training import loss, net, sgd


def belongings():
    """Descriptors and threads of this process."""
    import gc

    gc.collect()
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), threading.active_count()


@pytest.mark.parametrize("ending", ["detach", "exception", "refusal"])
def test_two_hundred_cycles_leave_nothing(ending):
    def run():
        import time

        import torch.distributed as dist

        import baguakit as bk

        model = net()
        optimizer = sgd(model.parameters())
        rules = [bk.algorithms.gradient_allreduce(), bk.after_step(bk.stages.Mean(), every=2, delay=1)]

        def cycle():
            if ending == "refusal":
                with pytest.raises(ValueError):
                    bk.attach(model, optimizer, *rules, bucket_bytes=0)
                return
            try:
                with bk.attach(model, optimizer, *rules):
                    loss(model, dist.get_rank(), 0).backward()
                    optimizer.step()
                    if ending == "exception":
                        raise KeyError("mine")
            except KeyError:
                # Where ranks raise, nobody waits for anybody: give the slowest time before groups are made again.
                bk.Comm().gather_objects(0)

        cycle()
        before, known = belongings(), len(dist.distributed_c10d._world.pg_map)
        for _ in range(200 if ending != "exception" else 30):
            cycle()
        for _ in range(100):  # threads and sockets end a moment after they are told to
            if all(now <= then for now, then in zip(belongings(), before, strict=True)):
                break
            time.sleep(0.05)
        hooks = [len(p._post_accumulate_grad_hooks or {}) for p in model.parameters()]
        hooks += [len(optimizer._optimizer_step_pre_hooks), len(optimizer._optimizer_step_post_hooks)]
        return before, belongings(), sum(hooks), len(dist.distributed_c10d._world.pg_map) - known

    for before, after, hooks, groups in ranks(2, run):
        assert all(now <= then for now, then in zip(after, before, strict=True)), (before, after)
        assert hooks == 0 and groups == 0


def test_groups_and_threads_are_counted():
    """One lane has one group, or three if a rule works in nodes; one that flies on has another; none for more rules."""

    def run():
        from torch.distributed.device_mesh import init_device_mesh

        import baguakit as bk

        model = net()
        optimizer = sgd(model.parameters())
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
        import torch.distributed as dist

        import baguakit as bk

        model = net()
        optimizer = sgd(model.parameters())
        att = bk.attach(model, optimizer, bk.algorithms.decentralized())
        loss(model, dist.get_rank(), 0).backward()
        optimizer.step()
        att.detach()
        att.detach()
        if dist.get_rank() == 0:
            loss(model, 0, 1).backward()
            optimizer.step()

    ranks(3, run)


def test_attached_to_some_ranks_only():
    """A group of some ranks attaches, and afterwards everybody can still make groups."""

    def run():
        import torch.distributed as dist

        import baguakit as bk

        pair = dist.new_group([0, 1])
        if dist.get_rank() < 2:
            model = net()
            optimizer = sgd(model.parameters())
            with bk.attach(model, optimizer, bk.algorithms.gradient_allreduce(), comm=bk.Comm(pair)):
                loss(model, dist.get_rank(), 0).backward()
                optimizer.step()
        everybody = dist.new_group([0, 1, 2])
        dist.barrier(group=everybody)
        dist.destroy_process_group(everybody)
        dist.destroy_process_group(pair)

    ranks(3, run)


def test_a_report_keeps_no_weights():
    """Flights are remembered for their times, and not with the tensors that they carried."""

    def run():
        import torch.distributed as dist

        import baguakit as bk

        model = net()
        optimizer = sgd(model.parameters())
        rules = (bk.algorithms.decentralized(), bk.after_step(bk.stages.Mean(), every=2, delay=1))
        with bk.attach(model, optimizer, *rules) as att:
            for step in range(6):
                optimizer.zero_grad()
                loss(model, dist.get_rank(), step).backward()
                optimizer.step()
            report = att.report()
        trips = [trip for row in report.rows for trip in row._trips]
        assert all(trip.before is None and trip.flight._value is None for trip in trips)
        return len(trips), all(row.seconds > 0 and row.exposed >= 0 for row in report.rows)

    assert ranks(2, run) == [(8, True)] * 2
