"""Stages in FSDP2's hooks: between ranks with the same shards, and in the place of its reduce-scatter."""

import time

import pytest
import torch
from pool import ranks
from sharding import full, grid, line, sharded
from training import flat, loss, net, sgd

BLOCKS = 64


def compressed(bk):
    return bk.stages.CompressedMean(bk.compressors.MinMaxUInt8(block=BLOCKS))


def feedback(bk):
    return bk.stages.ErrorFeedback(compressed(bk))


def train(module, optimizer, steps, begin=0, before=None):
    import torch.distributed as dist

    for step in range(begin, steps):
        optimizer.zero_grad()
        if before is not None:
            before(step)
        loss(module, dist.get_rank(), step).backward()
        optimizer.step()


def exact(steps=6):
    """The weights of the exact mean over all ranks."""
    import baguakit as bk

    module = net()
    optimizer = sgd(module.parameters())
    with bk.attach(module, optimizer, bk.algorithms.gradient_allreduce()):
        train(module, optimizer, steps)
    return flat(module)


def across(stage, steps=6, **options):
    """Shard over two, average over two with the stage; the weights, and what it remembers."""
    import baguakit as bk

    mesh = grid()
    module = sharded(mesh["intra"])
    optimizer = sgd(module.parameters())
    with bk.interop.fsdp(module, stage(bk), bk.Comm(mesh.get_group("inter")), **options) as handle:
        train(module, optimizer, steps)
        return full(module), handle.state_dict(), handle.report().bytes_sent


def within(stage, steps=6, **options):
    """Shard over all ranks, with the stage's first half in the place of the reduce-scatter."""
    import baguakit as bk

    module = sharded(line())
    optimizer = sgd(module.parameters())
    with bk.interop.fsdp(module, stage(bk), **options) as handle:
        train(module, optimizer, steps)
        return full(module), handle.state_dict(), handle.report().bytes_sent


def test_mean_across_nodes_is_the_exact_mean():
    results, wanted = ranks(4, across, lambda bk: bk.stages.Mean()), ranks(4, exact)[0]
    for weights, state, _ in results:
        torch.testing.assert_close(weights, wanted, rtol=0, atol=1e-6)
        assert state["step"] == 6 and state["rules"]["0"]["round"] == 6


@pytest.mark.parametrize("n", (2, 3))
def test_mean_within_is_fsdp(n):
    def plain():
        module = sharded(line())
        train(module, sgd(module.parameters()), 6)
        return full(module)

    for (weights, _, _), wanted in zip(ranks(n, within, lambda bk: bk.stages.Mean()), ranks(n, plain), strict=True):
        torch.testing.assert_close(weights, wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize("stage", ["compressed", "feedback", "power_sgd", "top_k", "qadam"])
def test_any_stage_across_nodes_keeps_replicas_equal_and_each_module_its_own_state(stage):
    stages = {
        "compressed": compressed,
        "feedback": feedback,
        "power_sgd": lambda bk: bk.algorithms.power_sgd(rank=8),  # the full rank of every shard: the mean
        "top_k": lambda bk: bk.algorithms.top_k(0.2),
        "qadam": lambda bk: bk.algorithms.qadam(3, compressor=bk.compressors.MinMaxUInt8(block=BLOCKS)),
    }
    results, wanted = ranks(4, across, stages[stage]), ranks(4, exact)[0]
    assert all(torch.equal(results[0][0], weights) for weights, _, _ in results)
    if stage in ("compressed", "feedback"):
        assert 0 < (results[0][0] - wanted).norm() < 0.02 * wanted.norm()
    if stage == "power_sgd":
        torch.testing.assert_close(results[0][0], wanted, rtol=0, atol=1e-5)
    for _, state, _ in results:
        saved = state["rules"]["0"]
        if stage == "compressed":
            assert saved["cut"] == [[], [], []]
            continue
        names = {name for name, _ in net().named_parameters()}
        assert saved["parameters"].keys() == names and len(saved["cut"]) == 3
        residuals = [held.get("residual", held.get("m")) for held in saved["parameters"].values()]
        assert all(r is not None for r in residuals)
        if stage != "power_sgd":
            assert sum(bool(r.any()) for r in residuals) >= 3


@pytest.mark.parametrize("n", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_within_a_group_compression_loses_once_and_sends_a_quarter(n):
    wanted = ranks(n, exact)[0]
    once, fed, whole = (ranks(n, within, stage) for stage in (compressed, feedback, lambda bk: bk.stages.Mean()))
    for results in (once, fed):
        assert all(torch.equal(results[0][0], weights) for weights, _, _ in results)
        assert 0 < (results[0][0] - wanted).norm() < 0.02 * wanted.norm()
    # The smallest module is not worth compressing, and every block has a range.
    assert once[0][2] < 0.6 * whole[0][2]
    residuals = [held["residual"] for held in fed[0][1]["rules"]["0"]["parameters"].values()]
    assert sum(bool(r.any()) for r in residuals) > n


def test_error_feedback_within_a_group_loses_nothing_for_ever():
    """Σ_t result_t + mean(e_T) = Σ_t mean(g_t), shard by shard."""

    def run():
        import torch.distributed as dist

        import baguakit as bk

        comm, size, rank = bk.Comm(), dist.get_world_size(), dist.get_rank()
        module, plain = sharded(line()), net()
        total, owed = 0, 0
        with bk.interop.fsdp(module, feedback(bk)) as handle:
            for step in range(5):
                module.zero_grad()
                plain.zero_grad()
                loss(module, rank, step).backward()
                loss(plain, rank, step).backward()
                total = total + torch.cat([p.grad.full_tensor().flatten().double() for p in module.parameters()])
                owed = owed + torch.cat([p.grad.flatten().double() for p in plain.parameters()])
            saved = handle.state_dict()["rules"]["0"]["parameters"]
        left = []
        for name, p in plain.named_parameters():  # what all ranks own of each parameter, without the padding
            rows = torch.cat([saved[f"{name}[{r}/{size}]"]["residual"] for r in range(size)])
            left.append(rows[: p.shape[0]].flatten().double())
        return total, bk.primitives.mean_(owed - torch.cat(left), comm), torch.cat(left).norm()

    for total, owed, left in ranks(2, run):
        assert left > 0
        torch.testing.assert_close(total, owed, rtol=0, atol=1e-5)


@pytest.mark.parametrize("way", [across, within])
def test_a_resumed_run_is_the_uninterrupted_one(way):
    def run(stops):
        import baguakit as bk

        mesh = grid() if way is across else line()
        comm = bk.Comm(mesh.get_group("inter")) if way is across else None
        module = sharded(mesh["intra"])
        optimizer = sgd(module.parameters())
        saved = None
        for begin, end in zip((0, *stops), (*stops, 6), strict=True):
            with bk.interop.fsdp(module, feedback(bk), comm, broadcast=False) as handle:
                if saved is not None:
                    handle.load_state_dict(saved)
                train(module, optimizer, end, begin)
                saved = handle.state_dict()
        return full(module), saved["step"]

    n = 4 if way is across else 2
    for (whole, _), (parts, step) in zip(ranks(n, run, ()), ranks(n, run, (2, 3)), strict=True):
        assert torch.equal(whole, parts) and step == 6


def test_gradients_accumulate_without_communication():
    def run(big):
        import torch.distributed as dist
        from training import batch

        import baguakit as bk

        module = sharded(line(), net(torch.float64))
        optimizer = sgd(module.parameters())
        with bk.interop.fsdp(module, bk.stages.Mean()) as handle:
            for step in range(3):
                optimizer.zero_grad()
                x, y = batch(dist.get_rank(), step, torch.float64, rows=12)
                for part in (slice(None),) if big else (slice(6), slice(6, None)):
                    module.set_requires_gradient_sync(part.stop is None)
                    ((module(x[part]) - y[part]).square().mean() / (1 if big else 2)).backward()
                optimizer.step()
            return full(module), handle.step

    for (small, steps), (big, _) in zip(ranks(2, run, False), ranks(2, run, True), strict=True):
        torch.testing.assert_close(small, big, rtol=0, atol=1e-6)
        assert steps == 3


def test_weights_are_gathered_compressed_and_alike():
    """Ranks compute with rounded weights, the same on all; what the optimizer steps is not rounded."""

    def run():
        import baguakit as bk

        module = sharded(line())
        x = torch.linspace(-1, 1, 12).view(2, 6)
        before, wanted = full(module), module(x).detach()
        with bk.interop.fsdp(module, bk.stages.Mean(), weights=bk.compressors.MinMaxUInt8(block=BLOCKS)):
            module.reshard()
            rounded = module(x).detach()
        module.reshard()
        return before, full(module), wanted, rounded, module(x).detach()

    results = ranks(2, run)
    for before, after, wanted, rounded, restored in results:
        assert torch.equal(before, after) and torch.equal(wanted, restored)
        assert 0 < (rounded - wanted).norm() < 0.05 * wanted.norm()
        assert torch.equal(rounded, results[0][3])


def test_replicas_begin_as_the_first():
    def run():
        import torch.distributed as dist

        import baguakit as bk

        mesh = grid()
        module = net()
        with torch.no_grad():
            for p in module.parameters():
                p.add_(dist.get_rank() // 2)
        module = sharded(mesh["intra"], module)
        with bk.interop.fsdp(module, bk.stages.Mean(), bk.Comm(mesh.get_group("inter"))):
            return full(module)

    assert all(torch.equal(weights, flat(net())) for weights in ranks(4, run))


def test_detach_gives_fsdp_back():
    def run():
        import torch.distributed as dist

        import baguakit as bk

        module, other = sharded(line()), sharded(line())
        for stage in (compressed(bk), bk.stages.Mean()):
            handle = bk.interop.fsdp(module, stage)
            with pytest.raises(ValueError, match="has a stage already"):
                bk.interop.fsdp(module, stage)
            loss(module, dist.get_rank(), 0).backward()
            handle.detach()
            handle.detach()
        for each in (module, other):
            each.zero_grad()
            loss(each, dist.get_rank(), 1).backward()
        return [
            torch.equal(p.grad.full_tensor(), q.grad.full_tensor())
            for p, q in zip(module.parameters(), other.parameters(), strict=True)
        ]

    assert all(all(equal) for equal in ranks(2, run))


def test_an_overflow_is_passed_on_and_never_kept():
    def run():
        import torch.distributed as dist

        import baguakit as bk

        module = sharded(line())
        finite = []
        with bk.interop.fsdp(module, feedback(bk)) as handle:
            for step in range(3):
                module.zero_grad()
                bad = float("inf") if step == 1 and dist.get_rank() == 1 else 1.0
                (loss(module, dist.get_rank(), step) * bad).backward()
                finite.append(all(bool(p.grad.full_tensor().isfinite().all()) for p in module.parameters()))
            saved = handle.state_dict()["rules"]["0"]["parameters"]
        return finite, all(bool(held["residual"].isfinite().all()) for held in saved.values())

    for finite, kept in ranks(2, run):
        assert finite == [True, False, True] and kept


def test_an_error_is_raised_by_backward_on_all_ranks():
    def run():
        import torch.distributed as dist

        import baguakit as bk

        class Broken(bk.stages.Mean):
            def __call__(self, x, state, comm):
                raise ArithmeticError("the stage is broken")

        mesh = grid()
        module = sharded(mesh["intra"])
        began = time.monotonic()
        with (
            pytest.raises(Exception, match="the stage is broken"),
            bk.interop.fsdp(module, Broken(), bk.Comm(mesh.get_group("inter")), timeout=5),
        ):
            loss(module, dist.get_rank(), 0).backward()
        return time.monotonic() - began

    assert all(seconds < 20 for seconds in ranks(4, run))


def native(bk):
    """A model that FSDP replicates itself."""
    from torch.distributed.fsdp import fully_shard

    mesh = grid()
    return bk.interop.fsdp(fully_shard(net(), mesh=mesh), bk.stages.Mean(), bk.Comm(mesh.get_group("inter")))


REFUSED = {
    "nothing sharded": (lambda bk: bk.interop.fsdp(net(), bk.stages.Mean()), "fully_shard"),
    "shards of the same": (
        lambda bk: bk.interop.fsdp(sharded(grid()["intra"]), bk.stages.Mean(), bk.Comm()),
        "hold shards of the same parameters",
    ),
    "replicated by FSDP": (native, "FSDP averages over the first itself"),
    "no half": (lambda bk: bk.interop.fsdp(sharded(line()), bk.algorithms.top_k(0.1)), "only its own shard"),
    "a rule on weights": (lambda bk: bk.interop.fsdp(sharded(line()), bk.algorithms.local_sgd()), "acts on weights"),
    "compressed weights across": (
        lambda bk: (
            (mesh := grid())
            and bk.interop.fsdp(
                sharded(mesh["intra"]),
                bk.stages.Mean(),
                bk.Comm(mesh.get_group("inter")),
                weights=bk.compressors.MinMaxUInt8(),
            )
        ),
        "only without comm=",
    ),
    "attach, on gradients": (
        lambda bk: bk.attach(m := sharded(line()), sgd(m.parameters()), bk.algorithms.bytegrad()),
        "use bk.interop.fsdp",
    ),
    "attach, over the shards": (
        lambda bk: bk.attach(m := sharded(line()), sgd(m.parameters()), bk.algorithms.local_sgd()),
        "hold shards of the same",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_work_is_refused_in_words(case):
    make, words = REFUSED[case]

    def run():
        import baguakit as bk

        with pytest.raises((TypeError, ValueError), match=words) as caught:
            make(bk)
        assert bk.Comm().gather_objects(1) == [1] * 4
        return str(caught.value)

    assert not any("\n" in said for said in ranks(4, run))


def test_a_stage_that_remembers_wants_every_gradient():
    def run():
        import torch.distributed as dist
        from torch import nn
        from torch.distributed.fsdp import fully_shard

        import baguakit as bk

        class Two(nn.Module):
            def __init__(self):
                super().__init__()
                self.used, self.unused = nn.Linear(6, 1), nn.Linear(6, 1)

            def forward(self, x):
                return self.used(x)

        for stage, fine in ((compressed(bk), True), (feedback(bk), False)):
            torch.manual_seed(0)
            module = fully_shard(Two(), mesh=line())
            if fine:
                with bk.interop.fsdp(module, stage):
                    loss(module, dist.get_rank(), 0).backward()
                assert module.unused.weight.grad is None
            else:
                with pytest.raises(RuntimeError, match="got no gradient"), bk.interop.fsdp(module, stage):
                    loss(module, dist.get_rank(), 0).backward()
        return True

    assert all(ranks(2, run))
