"""A value that is not finite is passed on and never kept: one overflow costs one skipped step."""

import pytest
import torch
import torch.distributed as dist
from everything import ALGORITHMS, averages_gradients, delayed, made, others_slow, runs_free, scaler
from pool import ranks
from training import flat, loss, net, net_and_sgd, sgd

import baguakit as bk

AVERAGED = [each for each in ALGORITHMS if averages_gradients(made(each))]
REPEATABLE = [  # for delayed gradients see test_delayed.py
    each for each in ALGORITHMS if not runs_free(made(each)) and not delayed(made(each))
]
DELAYED = "after_step(Mean(), every=3, delay=2)"
AT = (0, 5)  # the steps in which rank 1 overflows: the first, and one with delayed flights under way


def skips(expression, at, passed=True, without=False, steps=8, bucket_bytes=25 << 20):
    """Return the steps that this rank skipped, its weights, the consensus distance, and all that is remembered.

    Rank 1 overflows in the steps `at`; or, `without`, no rank ever sees those batches.
    """
    model, rule = net(), made(expression)
    optimizer = sgd(model.parameters())
    grad_scaler = scaler(rule, init_scale=1024.0)
    skipped = []
    options = {"scaler": grad_scaler if passed else None, "bucket_bytes": bucket_bytes}
    with bk.attach(model, optimizer, rule, **options) as att:
        for step in range(steps):
            if without and step in at:
                continue
            optimizer.zero_grad()
            value = loss(model, dist.get_rank(), step)
            if step in at and dist.get_rank() == 1:
                where = model[4].bias if step else model[0].weight  # one value of one bucket
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


@pytest.mark.parametrize(
    "size, bucket_bytes, passed", [(3, 100, True), pytest.param(2, 25 << 20, False, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("algorithm", others_slow([*REPEATABLE, DELAYED]))
def test_one_overflow_costs_one_step_on_all_ranks_and_leaves_no_trace(algorithm, size, bucket_bytes, passed):
    """The run equals one in which those batches never were: in its weights, and in all that is remembered.

    In several buckets, and in one whose stage sees gradients with their scale, since it is given no scaler.
    """
    averages = averages_gradients(made(algorithm))
    if not averages:  # a rule on weights needs the scaler
        passed = True

    def run(without):
        return skips(algorithm, AT, passed, without, bucket_bytes=bucket_bytes)

    for (skipped, weights, apart, remembered), (_, expected, _, known) in zip(
        ranks(size, run, False), ranks(size, run, True), strict=True
    ):
        assert skipped == list(AT) and (apart == 0.0 or not averages)
        assert torch.equal(weights, expected) and torch.isfinite(weights).all()
        assert len(remembered) == len(known) and all(map(torch.equal, remembered, known))


@pytest.mark.parametrize("algorithm", [each for each in ALGORITHMS if runs_free(made(each))])
def test_free_running_ranks_skip_alone(algorithm):
    results = ranks(3, skips, algorithm, (4,))
    assert [skipped for skipped, *_ in results] == [[], [4], []]
    assert all(torch.isfinite(weights).all() for _, weights, *_ in results)


@pytest.mark.parametrize("algorithm", others_slow(AVERAGED))
def test_stages_see_gradients_without_the_scale(algorithm):
    """With `scaler=` the factor is folded out and in: any power of two gives the bits of the unscaled run."""

    def run():
        found = []
        for scale in (1.0, 4096.0):
            model, optimizer = net_and_sgd()
            grad_scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=2)
            with bk.attach(model, optimizer, made(algorithm), scaler=grad_scaler):
                for step in range(6):
                    optimizer.zero_grad()
                    grad_scaler.scale(loss(model, dist.get_rank(), step)).backward()
                    grad_scaler.step(optimizer)
                    grad_scaler.update()
            found.append(flat(model))
        return torch.equal(*found)

    assert ranks(2, run) == [True, True]
