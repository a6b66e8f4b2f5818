"""Stages in FSDP2's hooks: between ranks with the same shards, and in the place of its reduce-scatter."""

import pytest
import torch
import torch.distributed as dist
from hooking import BLOCKS, compressed, feedback
from pool import ranks
from sharding import full, grid, line, sharded
from tiers import slow_after
from training import batch, flat, loss, net, net_and_sgd, run_steps, sgd

import baguakit as bk


def exact(steps=6):
    """The weights of the exact mean over all ranks."""
    module, optimizer = net_and_sgd()
    with bk.attach(module, optimizer, bk.algorithms.gradient_allreduce()):
        run_steps(module, optimizer, range(steps))
    return flat(module)


def across(stage, steps=6, **options):
    """Shard over two, average over two with the stage; the weights, and what it remembers."""
    mesh = grid()
    module = sharded(mesh["intra"])
    optimizer = sgd(module.parameters())
    with bk.interop.fsdp(module, stage(bk), bk.Comm(mesh.get_group("inter")), **options) as handle:
        run_steps(module, optimizer, range(steps))
        return full(module), handle.state_dict(), handle.report().bytes_sent


def within(stage, steps=6, **options):
    """Shard over all ranks, with the stage's first half in the place of the reduce-scatter."""
    module = sharded(line())
    optimizer = sgd(module.parameters())
    with bk.interop.fsdp(module, stage(bk), **options) as handle:
        run_steps(module, optimizer, range(steps))
        return full(module), handle.state_dict(), handle.report().bytes_sent


def test_mean_across_nodes_is_the_exact_mean():
    results, wanted = ranks(4, across, lambda bk: bk.stages.Mean()), ranks(4, exact)[0]
    for weights, state, _ in results:
        torch.testing.assert_close(weights, wanted, rtol=0, atol=1e-6)
        assert state["step"] == 6 and state["rules"]["0"]["round"] == 6


@pytest.mark.parametrize("n", slow_after(1, (2, 3)))
def test_mean_within_is_fsdp(n):
    def plain():
        module = sharded(line())
        run_steps(module, sgd(module.parameters()), range(6))
        return full(module)

    for (weights, _, _), wanted in zip(ranks(n, within, lambda bk: bk.stages.Mean()), ranks(n, plain), strict=True):
        torch.testing.assert_close(weights, wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize("stage", slow_after(1, ["feedback", "compressed", "power_sgd", "top_k", "qadam"]))
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


@pytest.mark.parametrize("decay", [1.0, 0.5])
def test_error_feedback_within_a_group_loses_nothing_but_by_decay(decay):
    """Σ_t result_t + mean(e_T) + (1 − β) Σ_{t < T} mean(e_t) = Σ_t mean(g_t), shard by shard."""

    def left(saved, plain, size):
        """Return the residuals of all ranks of each parameter, without the padding."""
        rows = [torch.cat([saved[f"{name}[{r}/{size}]"]["residual"] for r in range(size)]) for name in plain]
        return torch.cat([row[: p.shape[0]].flatten().double() for row, p in zip(rows, plain.values(), strict=True)])

    def run():
        comm, size, rank = bk.Comm(), dist.get_world_size(), dist.get_rank()
        module, plain = sharded(line()), net()
        total, owed = 0, 0
        lost = []
        with bk.interop.fsdp(module, bk.stages.ErrorFeedback(compressed(bk), decay=decay)) as handle:
            for step in range(5):
                module.zero_grad()
                plain.zero_grad()
                loss(module, rank, step).backward()
                loss(plain, rank, step).backward()
                total = total + torch.cat([p.grad.full_tensor().flatten().double() for p in module.parameters()])
                owed = owed + torch.cat([p.grad.flatten().double() for p in plain.parameters()])
                saved = handle.state_dict()["rules"]["0"]["parameters"]
                lost.append(left(saved, dict(plain.named_parameters()), size))
        gone = (1 - decay) * sum(lost[:-1])
        return total, bk.primitives.mean_(owed - lost[-1] - gone, comm), lost[-1].norm()

    for total, owed, last in ranks(2, run):
        assert last > 0
        torch.testing.assert_close(total, owed, rtol=0, atol=1e-5)


def test_gradients_accumulate_without_communication():
    def run(big):
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


def test_a_gradient_divide_factor_is_kept():
    """Trainers that divide a summed loss by all tokens set 1: FSDP then sums gradients, and so does a stage."""

    def run(factor):
        module = sharded(line())
        for each in (module[0], module[2], module):
            each.set_gradient_divide_factor(factor)
        with bk.interop.fsdp(module, bk.stages.Mean()):
            loss(module, dist.get_rank(), 0).backward()
        return torch.cat([p.grad.full_tensor().flatten() for p in module.parameters()])

    for mean, summed, third in zip(*(ranks(2, run, factor) for factor in (2.0, 1.0, 3.0)), strict=True):
        torch.testing.assert_close(summed, 2 * mean, rtol=1e-6, atol=0)
        torch.testing.assert_close(third, 2 * mean / 3, rtol=1e-6, atol=0)
