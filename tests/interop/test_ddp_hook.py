"""Any stage as the communication hook of `DistributedDataParallel`: what is computed, and when."""

import threading
import time

import pytest
import torch
import torch.distributed as dist
from hooking import SMALL, compressed, feedback, hooked
from pool import ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from training import batch, flat, loss, net, run_steps, sgd

import baguakit as bk


@pytest.mark.parametrize("n, view", [(2, False), (3, False), (4, False), (2, True)])
def test_mean_is_ddp_bit_for_bit(n, view):
    options = {"gradient_as_bucket_view": view}
    ours = ranks(n, lambda: hooked(lambda bk: bk.stages.Mean(), **options)[0])
    theirs = ranks(n, lambda: hooked(None, **options)[0])
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("n", (2, 3))
@pytest.mark.parametrize("option", ["static_graph", "find_unused_parameters"])
def test_static_graphs_and_unused_parameters(n, option):
    """A layer that no rank uses, and one that only rank 0 uses, are DDP's as before."""

    def run(hook):
        class Branches(nn.Module):
            def __init__(self):
                super().__init__()
                self.body, self.first, self.never = net(), nn.Linear(6, 1), nn.Linear(2, 2)

            def forward(self, x, here):
                return self.body(x) + (self.first(x) if here else 0)

        torch.manual_seed(1)
        module = Branches() if option == "find_unused_parameters" else net()
        ddp = nn.parallel.DistributedDataParallel(module, bucket_cap_mb=SMALL, **{option: True})
        optimizer = sgd(module.parameters())
        handle = bk.interop.ddp(ddp, bk.stages.Mean()) if hook else None
        for step in range(5):
            x, y = batch(dist.get_rank(), step)
            out = ddp(x, dist.get_rank() == 0) if option == "find_unused_parameters" else ddp(x)
            optimizer.zero_grad()
            (out - y).square().mean().backward()
            optimizer.step()
        if handle is not None:
            handle.detach()
        return flat(module), [name for name, p in module.named_parameters() if p.grad is None]

    for (ours, without), (theirs, expected) in zip(ranks(n, run, True), ranks(n, run, False), strict=True):
        assert torch.equal(ours, theirs) and without == expected
        assert without == (["never.weight", "never.bias"] if option == "find_unused_parameters" else [])


def whole_lines():
    """768 values in two layers: no bucket of them has padding, which `attach` would add and DDP does not."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 64, bias=False), nn.Tanh(), nn.Linear(64, 6, bias=False))


@pytest.mark.parametrize("n", (2, 3))
@pytest.mark.parametrize("stage", [compressed, feedback])
def test_stages_are_what_attach_makes_of_them_in_equal_buckets(n, stage):
    """A stage of `attach` and the same in DDP's hook: one bucket each, its parameters in one order."""

    def attached():
        module = whole_lines()
        optimizer = sgd(module.parameters())
        with bk.attach(module, optimizer, bk.during_backward(stage(bk))):
            run_steps(module, optimizer, range(6))
        return flat(module)

    def in_ddp():
        """DDP orders parameters forwards until its first backward has ended, and backwards from then on."""
        module = whole_lines()
        ddp = nn.parallel.DistributedDataParallel(module)
        loss(ddp, dist.get_rank(), 0).backward()
        optimizer = sgd(module.parameters())
        with bk.interop.ddp(ddp, stage(bk)):
            run_steps(ddp, optimizer, range(6))
        return flat(module)

    assert all(torch.equal(a, b) for a, b in zip(ranks(n, attached), ranks(n, in_ddp), strict=True))


def test_no_sync_accumulates():
    """J micro-batches under DDP's no_sync are one flight, of their sum."""

    def run(attached):
        module = net()
        model = module if attached else nn.parallel.DistributedDataParallel(module)
        optimizer = sgd(module.parameters())
        rule = bk.during_backward(compressed(bk))
        work = bk.attach(module, optimizer, rule) if attached else bk.interop.ddp(model, rule.stage)
        with work as handle:
            for step in range(4):
                optimizer.zero_grad()
                with handle.no_sync() if attached else model.no_sync():
                    loss(model, dist.get_rank(), 10 * step).backward()
                loss(model, dist.get_rank(), 10 * step + 1).backward()
                optimizer.step()
            assert handle.step == 4
        return flat(module)

    # The first bucket of DDP is in another order, so blocks differ there: near, and replicas are equal.
    ours, theirs = ranks(2, run, False), ranks(2, run, True)
    assert torch.equal(ours[0], ours[1])
    assert (ours[0] - theirs[0]).norm() < 1e-2 * theirs[0].norm()


def test_hierarchical_stages_know_the_nodes():
    def run():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("inter", "intra"))
        module = net()
        ddp = nn.parallel.DistributedDataParallel(module)
        optimizer = sgd(module.parameters())
        with bk.interop.ddp(ddp, bk.stages.Hierarchical(bk.stages.Mean()), bk.Comm(mesh=mesh)) as handle:
            run_steps(ddp, optimizer, range(4))
            sent = handle.report().rows[0].bytes
        return flat(module), sorted(sent)

    results = ranks(4, run)
    exact = ranks(4, lambda: hooked(None, 4)[0])
    for weights, parts in results:
        torch.testing.assert_close(weights, exact[0], rtol=0, atol=1e-6)
        assert parts == ["inter", "intra"]


def test_flights_overlap_backward():
    """The hook returns before its flight is over: DDP goes on with backward."""

    def run():
        seen = []

        class Slow(bk.stages.Mean):
            def __call__(self, x, state, comm):
                seen.append(("begins", threading.current_thread() is threading.main_thread()))
                time.sleep(0.2)
                seen.append(("ends", False))
                return super().__call__(x, state, comm)

        module = net()
        ddp = nn.parallel.DistributedDataParallel(module, bucket_cap_mb=SMALL)
        with bk.interop.ddp(ddp, Slow()):
            for step in range(2):
                seen.clear()
                module[0].weight.register_hook(lambda _: seen.append(("backward goes on", True)))
                loss(ddp, dist.get_rank(), step).backward()
        return seen

    for seen in ranks(2, run):
        assert not any(main for what, main in seen if what == "begins")
        assert seen.index(("backward goes on", True)) < seen.index(("ends", False))


def test_scaled_gradients_are_seen_without_their_factor():
    def run():
        module = net()
        ddp = nn.parallel.DistributedDataParallel(module)
        optimizer = sgd(module.parameters())
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        with bk.interop.ddp(ddp, feedback(bk), scaler=scaler) as handle:
            for step in range(6):
                optimizer.zero_grad()
                scaler.scale(loss(ddp, dist.get_rank(), step)).backward()
                scaler.step(optimizer)
                scaler.update()
            held = handle.state_dict()["rules"]["0"]["parameters"]
        return flat(module), max(float(each["residual"].abs().max()) for each in held.values())

    plain = ranks(2, lambda: hooked(feedback, 6, bucket_cap_mb=25)[0])
    for weights, residual in ranks(2, run):
        torch.testing.assert_close(weights, plain[0], rtol=0, atol=1e-4)
        assert 0 < residual < 1
