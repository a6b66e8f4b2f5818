"""A value that is not finite is passed on and never kept: one overflow costs one skipped step."""

import pytest
import torch
from pool import ranks
from training import flat, loss, net, sgd

GRADIENTS = {
    "all-reduce": lambda bk: bk.algorithms.gradient_allreduce(),
    "bytegrad": lambda bk: bk.algorithms.bytegrad(bk.compressors.MinMaxUInt8(block=64)),
    "bytegrad, error feedback": lambda bk: bk.algorithms.bytegrad(bk.compressors.MinMaxUInt8(block=64), True),
    "qadam": lambda bk: bk.algorithms.qadam(3, compressor=bk.compressors.MinMaxUInt8(block=64)),
    "qadam, error feedback": lambda bk: bk.algorithms.qadam(
        3, compressor=bk.compressors.MinMaxUInt8(block=64), error_feedback=True
    ),
    "top_k": lambda bk: bk.algorithms.top_k(0.1),
    "power_sgd": lambda bk: bk.algorithms.power_sgd(rank=2),
    "bfloat16, error feedback": lambda bk: bk.algorithms.bytegrad(bk.compressors.BFloat16(), True),
}
WEIGHTS = {
    "awc": lambda bk: bk.algorithms.decentralized(),
    "atc": lambda bk: bk.algorithms.decentralized(order="atc"),
    "local": lambda bk: bk.algorithms.local_sgd(every=2),
    "dcd": lambda bk: bk.algorithms.low_precision_decentralized(),
    "choco": lambda bk: bk.algorithms.choco(),
    "choco, one peer": lambda bk: bk.algorithms.choco(bk.topology.OnePeerExact(), gamma=1.0),
    "diloco": lambda bk: bk.algorithms.diloco(every=2),
    "tracking": lambda bk: bk.algorithms.gradient_tracking(),
    "push_sum": lambda bk: bk.algorithms.push_sum(bk.topology.FromDigraph([(0, 1), (1, 2), (2, 0), (0, 2)])),
    "delayed": lambda bk: bk.after_step(bk.stages.Mean(), every=3, delay=2),
}


def skips(rule, scaler, at, passed, steps=8):
    """The steps that were skipped on this rank, and the weights, where rank 1 overflows at step `at`."""
    import torch.distributed as dist

    import baguakit as bk

    model = net()
    optimizer = sgd(model.parameters())
    grad_scaler = scaler()
    skipped = []
    with bk.attach(model, optimizer, rule(bk), scaler=grad_scaler if passed else None) as att:
        for step in range(steps):
            optimizer.zero_grad()
            value = loss(model, dist.get_rank(), step)
            if step == at and dist.get_rank() == 1:
                value = value * float("inf")
            before = att.step
            grad_scaler.scale(value).backward()
            grad_scaler.step(optimizer)
            grad_scaler.update()
            if att.step == before:
                skipped.append(step)
        apart = att.consensus_distance()
    return skipped, flat(model), apart


def plain():
    return torch.amp.GradScaler("cpu", init_scale=1024.0)


def sharded():
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    return ShardedGradScaler(device="cpu", init_scale=1024.0)


@pytest.mark.parametrize("passed", [False, True])
@pytest.mark.parametrize("at", [0, 4])
@pytest.mark.parametrize("rule", GRADIENTS)
def test_one_overflow_costs_gradient_rules_one_step_on_all_ranks(rule, at, passed):
    for skipped, weights, apart in ranks(3, skips, GRADIENTS[rule], plain, at, passed):
        assert skipped == [at] and torch.isfinite(weights).all() and apart == 0.0


@pytest.mark.parametrize("at", [0, 4])
@pytest.mark.parametrize("rule", WEIGHTS)
def test_one_overflow_costs_weight_rules_one_step_on_all_ranks(rule, at):
    for skipped, weights, _ in ranks(3, skips, WEIGHTS[rule], sharded, at, True):
        assert skipped == [at] and torch.isfinite(weights).all()


def test_free_running_ranks_skip_alone():
    results = ranks(3, skips, lambda bk: bk.free_running(bk.stages.Mean()), plain, 4, True)
    assert [skipped for skipped, _, _ in results] == [[], [4], []]
    assert all(torch.isfinite(weights).all() for _, weights, _ in results)


@pytest.mark.parametrize("rule", ["bytegrad", "bytegrad, error feedback"])
def test_stages_see_gradients_without_the_scale(rule):
    """With `scaler=` the factor is folded out and in: any power of two gives the bits of the unscaled run."""

    def run(scale, passed):
        import torch.distributed as dist

        import baguakit as bk

        model = net()
        optimizer = sgd(model.parameters())
        grad_scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=2)
        with bk.attach(model, optimizer, GRADIENTS[rule](bk), scaler=grad_scaler if passed else None):
            for step in range(6):
                optimizer.zero_grad()
                grad_scaler.scale(loss(model, dist.get_rank(), step)).backward()
                grad_scaler.step(optimizer)
                grad_scaler.update()
        return flat(model)

    one, other = ranks(2, run, 1.0, True), ranks(2, run, 4096.0, True)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_state_stays_as_it_was():
    def run():
        import torch.distributed as dist

        import baguakit as bk

        comm = bk.Comm()
        stage = bk.stages.ErrorFeedback(bk.stages.CompressedMean(bk.compressors.MinMaxUInt8(block=64)))
        x = torch.randn(1000, generator=torch.Generator().manual_seed(dist.get_rank()))
        state = stage.init(bk.Bucket([x]), comm)
        stage(x.clone(), state, comm.at(0))
        held = state["residual"].clone()
        bad = x.clone()
        if dist.get_rank() == 2:
            bad[17] = float("nan")
        result = stage(bad, state, comm.at(1))
        return torch.equal(held, state["residual"]), held.abs().max() > 0, bool(result.isnan()[17])

    assert ranks(3, run) == [(True, True, True)] * 3
