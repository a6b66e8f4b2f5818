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
    "sign": lambda bk: bk.algorithms.bytegrad(bk.compressors.Sign(), True),
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


def skips(rule, scaler, at, passed, steps=8, without=False, bucket_bytes=25 << 20):
    """The steps that were skipped on this rank, the weights, how far apart they are, and what is remembered.

    Rank 1 overflows at step `at`; or, `without`, no rank ever sees that batch.
    """
    import torch.distributed as dist

    import baguakit as bk

    model = net()
    optimizer = sgd(model.parameters())
    grad_scaler = scaler()
    skipped = []
    options = {"scaler": grad_scaler if passed else None, "bucket_bytes": bucket_bytes}
    with bk.attach(model, optimizer, rule(bk), **options) as att:
        for step in range(steps):
            if without and step == at:
                continue
            optimizer.zero_grad()
            value = loss(model, dist.get_rank(), step)
            if step == at and dist.get_rank() == 1:
                where = model[4].bias if at else model[0].weight  # one value of one bucket
                value = value + where.view(-1)[0] * float("inf")
            before = att.step
            grad_scaler.scale(value).backward()
            grad_scaler.step(optimizer)
            grad_scaler.update(1024.0)  # stages that see scaled gradients remember them: the scale stays
            if att.step == before:
                skipped.append(step)
        apart = att.consensus_distance()
        remembered = [tensor for rule in att.state_dict()["rules"].values() for tensor in tensors_in(rule)]
    return skipped, flat(model), apart, remembered


def tensors_in(value):
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for each in value.values() for t in tensors_in(each)] if isinstance(value, dict) else []


def plain():
    return torch.amp.GradScaler("cpu", init_scale=1024.0)


def sharded():
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    return ShardedGradScaler(device="cpu", init_scale=1024.0)


EVERY = {**{name: (rule, plain) for name, rule in GRADIENTS.items()}, **{n: (r, sharded) for n, r in WEIGHTS.items()}}


@pytest.mark.parametrize("bucket_bytes", [100, 25 << 20])
@pytest.mark.parametrize("at", [0, 4])
@pytest.mark.parametrize("name", EVERY)
def test_one_overflow_costs_one_step_on_all_ranks_and_leaves_no_trace(name, at, bucket_bytes):
    """The run equals one in which that batch never was: in its weights, and in all that is remembered."""
    rule, scaler = EVERY[name]

    def run(passed, without):
        return skips(rule, scaler, at, passed, without=without, bucket_bytes=bucket_bytes)

    for passed in (True, False) if name in GRADIENTS and bucket_bytes > 100 else (True,):
        pairs = zip(ranks(3, run, passed, False), ranks(3, run, passed, True), strict=True)
        for (skipped, weights, apart, remembered), (_, expected, _, known) in pairs:
            assert skipped == [at] and (name in WEIGHTS or apart == 0.0)
            assert torch.equal(weights, expected) and torch.isfinite(weights).all()
            assert len(remembered) == len(known) and all(map(torch.equal, remembered, known))


def test_free_running_ranks_skip_alone():
    results = ranks(3, skips, lambda bk: bk.free_running(bk.stages.Mean()), plain, 4, True)
    assert [skipped for skipped, *_ in results] == [[], [4], []]
    assert all(torch.isfinite(weights).all() for _, weights, *_ in results)


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
