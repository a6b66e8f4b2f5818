"""Any stage as the communication hook of `DistributedDataParallel`."""

import gc
import io
import time

import pytest
import torch
from pool import ranks
from torch import nn
from training import batch, flat, loss, net, sgd

SMALL = 2e-4  # MiB: DDP makes two buckets of the toy net after its first backward
BLOCKS = 64  # values in a block of the compressor, so that the toy net has several


def hooked(stage, steps=8, model=net, hook=True, begin=0, saved=None, scaler=None, **options):
    """Train on this rank in DDP with `stage(bk)` in its hook; return the weights, and what a checkpoint holds."""
    import torch.distributed as dist

    import baguakit as bk

    options = {"bucket_cap_mb": SMALL, **options}
    module = model()
    ddp = nn.parallel.DistributedDataParallel(module, **options)
    optimizer = sgd(module.parameters())
    handle = bk.interop.ddp(ddp, stage(bk)) if hook else None
    if saved is not None:
        loaded = torch.load(io.BytesIO(saved), weights_only=True)
        module.load_state_dict(loaded["model"])
        optimizer.load_state_dict(loaded["optimizer"])
        handle.load_state_dict(loaded["handle"])
    for step in range(begin, steps):
        optimizer.zero_grad()
        loss(ddp, dist.get_rank(), step).backward()
        optimizer.step()
    buffer = io.BytesIO()
    if handle is not None:
        state = {"model": module.state_dict(), "optimizer": optimizer.state_dict(), "handle": handle.state_dict()}
        torch.save(state, buffer)
        handle.detach()
    return flat(module), buffer.getvalue()


def compressed(bk):
    return bk.stages.CompressedMean(bk.compressors.MinMaxUInt8(block=BLOCKS))


def feedback(bk):
    return bk.stages.ErrorFeedback(compressed(bk))


@pytest.mark.parametrize("n, view", [(2, False), (3, False), (4, False), (2, True)])
def test_mean_is_ddp_bit_for_bit(n, view):
    options = {"gradient_as_bucket_view": view}
    ours = ranks(n, lambda: hooked(lambda bk: bk.stages.Mean(), **options)[0])
    theirs = ranks(n, lambda: hooked(None, hook=False, **options)[0])
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("n", (2, 3))
@pytest.mark.parametrize("option", ["static_graph", "find_unused_parameters"])
def test_static_graphs_and_unused_parameters(n, option):
    """A layer that no rank uses, and one that only rank 0 uses, are DDP's as before."""

    def run(hook):
        import torch.distributed as dist

        import baguakit as bk

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
        import torch.distributed as dist

        import baguakit as bk

        module = whole_lines()
        optimizer = sgd(module.parameters())
        with bk.attach(module, optimizer, bk.during_backward(stage(bk))):
            for step in range(6):
                optimizer.zero_grad()
                loss(module, dist.get_rank(), step).backward()
                optimizer.step()
        return flat(module)

    def in_ddp():
        """DDP orders parameters forwards until its first backward has ended, and backwards from then on."""
        import torch.distributed as dist

        import baguakit as bk

        module = whole_lines()
        ddp = nn.parallel.DistributedDataParallel(module)
        loss(ddp, dist.get_rank(), 0).backward()
        optimizer = sgd(module.parameters())
        with bk.interop.ddp(ddp, stage(bk)):
            for step in range(6):
                optimizer.zero_grad()
                loss(ddp, dist.get_rank(), step).backward()
                optimizer.step()
        return flat(module)

    assert all(torch.equal(a, b) for a, b in zip(ranks(n, attached), ranks(n, in_ddp), strict=True))


RULES = {
    "feedback": feedback,
    "bytegrad": lambda bk: bk.algorithms.bytegrad(error_feedback=True),
    "qadam": lambda bk: bk.algorithms.qadam(3, compressor=bk.compressors.MinMaxUInt8(block=BLOCKS)),
    "top_k": lambda bk: bk.algorithms.top_k(0.1),
    "power_sgd": lambda bk: bk.algorithms.power_sgd(rank=1, warmup_steps=2),
}
FAST = ("feedback", "power_sgd")


@pytest.mark.parametrize("rule", RULES)
def test_replicas_are_equal_and_the_residuals_follow_the_parameters(rule):
    """DDP cuts its buckets anew after the first backward: no residual is lost, and every rank ends with the same."""

    def run():
        import torch.distributed as dist

        import baguakit as bk

        module = net()
        ddp = nn.parallel.DistributedDataParallel(module, bucket_cap_mb=SMALL)
        optimizer = sgd(module.parameters())
        cuts, residuals = [], []
        with bk.interop.ddp(ddp, RULES[rule](bk)) as handle:
            for step in range(5):
                optimizer.zero_grad()
                loss(ddp, dist.get_rank(), step).backward()
                optimizer.step()
                saved = handle.state_dict()
                assert handle.step == saved["step"] == step + 1
                routes = list(saved["rules"].values())
                cuts.append(routes[-1]["cut"])
                residuals.append({name for name, held in routes[-1]["parameters"].items() if held})
        return flat(module), cuts, residuals

    results = ranks(3, run)
    assert all(torch.equal(results[0][0], weights) for weights, _, _ in results)
    for _, cuts, residuals in results:
        assert [len(cut) for cut in cuts] == ([0, 0, 2, 2, 2] if rule == "power_sgd" else [1, 2, 2, 2, 2])
        assert residuals[-1] == dict(net().named_parameters()).keys()


@pytest.mark.parametrize("rule", [pytest.param(name, marks=[pytest.mark.slow] * (name not in FAST)) for name in RULES])
def test_a_resumed_run_is_the_uninterrupted_one(rule):
    """Resumed in a new DDP, whose first buckets are others: those are a part of the run, so compare like with like."""

    def whole():
        import torch.distributed as dist

        import baguakit as bk

        module, saved = net(), None
        optimizer = sgd(module.parameters())
        for begin, end in ((0, 4), (4, 8)):
            ddp = nn.parallel.DistributedDataParallel(module, bucket_cap_mb=1e-6 if rule != "power_sgd" else 25)
            with bk.interop.ddp(ddp, RULES[rule](bk)) as handle:
                if saved is not None:
                    handle.load_state_dict(saved)
                for step in range(begin, end):
                    optimizer.zero_grad()
                    loss(ddp, dist.get_rank(), step).backward()
                    optimizer.step()
                saved = handle.state_dict()
        return flat(module)

    def parts():
        options = {"bucket_cap_mb": 1e-6 if rule != "power_sgd" else 25}
        _, saved = hooked(RULES[rule], steps=4, **options)
        return hooked(RULES[rule], begin=4, saved=saved, **options)[0]

    assert all(torch.equal(a, b) for a, b in zip(ranks(2, whole), ranks(2, parts), strict=True))


def test_a_residual_is_what_was_lost_across_the_new_cut():
    """Σ_t result_t = Σ_t mean(g_t) − mean(e_T): what the first cut's residual held is in the second's flights."""

    def run():
        import torch.distributed as dist

        import baguakit as bk

        comm = bk.Comm()
        module, exact = net(), net()
        ddp = nn.parallel.DistributedDataParallel(module, bucket_cap_mb=SMALL)
        total, owed = 0, 0
        with bk.interop.ddp(ddp, feedback(bk)) as handle:
            for step in range(4):
                ddp.zero_grad()
                exact.zero_grad()
                loss(ddp, dist.get_rank(), step).backward()
                loss(exact, dist.get_rank(), step).backward()
                total = total + torch.cat([p.grad.flatten().double() for p in module.parameters()])
                owed = owed + torch.cat([p.grad.flatten().double() for p in exact.parameters()])
            parameters = handle.state_dict()["rules"]["0"]["parameters"]
            left = torch.cat([parameters[name]["residual"].flatten().double() for name, _ in net().named_parameters()])
        return total, bk.primitives.mean_(owed - left, comm), left.norm()

    for total, owed, left in ranks(2, run):
        assert left > 0
        torch.testing.assert_close(total, owed, rtol=0, atol=1e-5)


def test_a_checkpoint_of_attach_is_one_of_ddp():
    def run():
        import torch.distributed as dist

        import baguakit as bk

        module = net()
        optimizer = sgd(module.parameters())
        with bk.attach(module, optimizer, bk.during_backward(feedback(bk))) as att:
            loss(module, dist.get_rank(), 0).backward()
            optimizer.step()
            first = att.state_dict()
        ddp = nn.parallel.DistributedDataParallel(module, bucket_cap_mb=SMALL)
        with bk.interop.ddp(ddp, feedback(bk)) as handle:
            handle.load_state_dict(first)
            return first, handle.state_dict()

    for first, second in ranks(2, run):
        assert second["step"] == first["step"] == 1
        ours, theirs = (state["rules"]["0"]["parameters"] for state in (first, second))
        assert all(torch.equal(ours[name]["residual"], theirs[name]["residual"]) for name in ours)
        assert any(held["residual"].any() for held in ours.values())


def test_no_sync_accumulates():
    """J micro-batches under DDP's no_sync are one flight, of their sum."""

    def run(attached):
        import torch.distributed as dist

        import baguakit as bk

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
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh

        import baguakit as bk

        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("inter", "intra"))
        module = net()
        ddp = nn.parallel.DistributedDataParallel(module)
        optimizer = sgd(module.parameters())
        with bk.interop.ddp(ddp, bk.stages.Hierarchical(bk.stages.Mean()), bk.Comm(mesh=mesh)) as handle:
            for step in range(4):
                optimizer.zero_grad()
                loss(ddp, dist.get_rank(), step).backward()
                optimizer.step()
            sent = handle.report().rows[0].bytes
        return flat(module), sorted(sent)

    results = ranks(4, run)
    exact = ranks(4, lambda: hooked(None, 4, hook=False)[0])
    for weights, parts in results:
        torch.testing.assert_close(weights, exact[0], rtol=0, atol=1e-6)
        assert parts == ["inter", "intra"]


def test_flights_overlap_backward():
    """The hook returns before its flight is over: DDP goes on with backward."""

    def run():
        import threading

        import torch.distributed as dist

        import baguakit as bk

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


def test_detach_gives_ddp_back_and_another_stage_may_come():
    def run():
        import torch.distributed as dist

        import baguakit as bk

        module = net()
        ddp = nn.parallel.DistributedDataParallel(module)
        theirs = nn.parallel.DistributedDataParallel(net())
        threads = len(__import__("threading").enumerate())
        for stage in (compressed(bk), bk.stages.Mean()):
            handle = bk.interop.ddp(ddp, stage)
            with pytest.raises(ValueError, match="has a stage already"):
                bk.interop.ddp(ddp, stage)
            loss(ddp, dist.get_rank(), 0).backward()
            handle.detach()
            handle.detach()
            module.zero_grad()
        gc.collect()
        assert len(__import__("threading").enumerate()) == threads
        for step in range(3):
            for each in (ddp, theirs):
                each.zero_grad()
                loss(each, dist.get_rank(), step).backward()
            for p, q in zip(ddp.parameters(), theirs.parameters(), strict=True):
                torch.testing.assert_close(p.grad, q.grad, rtol=0, atol=1e-6)
        return True

    assert all(ranks(2, run))


def test_scaled_gradients_are_seen_without_their_factor():
    def run():
        import torch.distributed as dist

        import baguakit as bk

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


@pytest.mark.parametrize("static_graph", [False, True])
def test_an_error_in_a_flight_is_the_exception_of_backward(static_graph):
    def run():
        import torch.distributed as dist

        import baguakit as bk

        class Broken(bk.stages.Mean):
            def __call__(self, x, state, comm):
                raise ArithmeticError("the stage is broken")

        ddp = nn.parallel.DistributedDataParallel(net(), static_graph=static_graph, bucket_cap_mb=SMALL)
        began = time.monotonic()
        with pytest.raises(Exception, match="the stage is broken") as caught, bk.interop.ddp(ddp, Broken(), timeout=5):
            loss(ddp, dist.get_rank(), 0).backward()
        return time.monotonic() - began, str(caught.value)

    for seconds, said in ranks(2, run):
        assert seconds < 20 and "\n" not in said


def test_a_rank_that_raises_is_named():
    def run():
        import torch.distributed as dist

        import baguakit as bk

        ddp = nn.parallel.DistributedDataParallel(net())
        with pytest.raises(Exception) as caught, bk.interop.ddp(ddp, bk.stages.Mean(), timeout=20):
            for step in range(3):
                if step == 2 and dist.get_rank() == 1:
                    raise KeyError("no such batch")
                loss(ddp, dist.get_rank(), step).backward()
        return str(caught.value)

    first, second = ranks(2, run)
    assert "rank 1 raised KeyError" in first and "no such batch" in second


REFUSED = {
    "a bare module": (lambda bk, m: bk.interop.ddp(m.module, bk.stages.Mean()), "use bk.attach for other modules"),
    "no stage": (lambda bk, m: bk.interop.ddp(m, "mean"), "a stage such as Mean"),
    "nothing": (lambda bk, m: bk.interop.ddp(m, ()), "a stage such as Mean"),
    "a rule on weights": (lambda bk, m: bk.interop.ddp(m, bk.algorithms.local_sgd()), "acts on weights"),
    "some parameters": (
        lambda bk, m: bk.interop.ddp(m, bk.during_backward(bk.stages.Mean(), where=lambda name, p: True)),
        "acts on some parameters",
    ),
    "two at a time": (
        lambda bk, m: bk.interop.ddp(m, (bk.algorithms.bytegrad(), bk.algorithms.gradient_allreduce())),
        "act in the same steps",
    ),
    "no nodes": (lambda bk, m: bk.interop.ddp(m, bk.hierarchical(bk.algorithms.bytegrad())), "must know the nodes"),
    "no comm": (lambda bk, m: bk.interop.ddp(m, bk.stages.Mean(), "world"), "takes a bk.Comm, not str"),
    "different stages": (
        lambda bk, m: bk.interop.ddp(m, [bk.stages.Mean(), compressed(bk)][torch.distributed.get_rank()]),
        "rank 0 has during_backward.Mean.* where rank 1 has during_backward.CompressedMean",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_work_is_refused_in_words(case):
    make, words = REFUSED[case]

    def run():
        import baguakit as bk

        ddp = nn.parallel.DistributedDataParallel(net())
        with pytest.raises((TypeError, ValueError), match=words) as caught:
            make(bk, ddp)
        assert bk.Comm().gather_objects(1) == [1, 1]
        return str(caught.value)

    assert not any("\n" in said for said in ranks(2, run))
