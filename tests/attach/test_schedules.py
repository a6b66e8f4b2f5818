"""Networks that are frozen, thawed, added to and stepped in any order, by schedules that a seed draws."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from everything import ALGORITHMS, averages_gradients, delayed, made, others_slow, runs_free, stages, windows
from pool import ranks
from schedules import attached, by_hand, schedule
from tiers import slow_after
from training import net_and_sgd, run_steps

import baguakit as bk
from baguakit.rules import rules_of

SEEDS = slow_after(3, range(300))


@pytest.mark.parametrize("seed", SEEDS)
def test_gradients_are_averaged_as_by_hand(seed):
    drawn = schedule(seed, any_pass=True)
    right = by_hand(drawn, 2, gradients=True)
    assert torch.equal(*right)
    for found in ranks(2, attached, drawn, bk.algorithms.gradient_allreduce()):
        assert torch.equal(found, right[0])


@pytest.mark.parametrize("seed", SEEDS)
def test_weights_are_averaged_as_by_hand(seed):
    drawn, every = schedule(seed, any_pass=True), 1 + seed % 2
    right = by_hand(drawn, 2, gradients=False, every=every)
    for found, by in zip(ranks(2, attached, drawn, bk.algorithms.local_sgd(every=every)), right, strict=True):
        assert torch.equal(found, by)


REPEATABLE = [each for each in ALGORITHMS if not runs_free(made(each)) and not delayed(made(each))]


@pytest.mark.parametrize("algorithm", others_slow(REPEATABLE, windows))
def test_freezing_equals_a_loss_that_takes_the_weights_as_constants(algorithm):
    def run():
        drawn = schedule(ALGORITHMS.index(algorithm), grows=False)
        return [attached(drawn, made(algorithm), detach) for detach in (False, True)]

    for frozen, constant in ranks(2, run):
        assert torch.equal(frozen, constant)


@pytest.mark.parametrize("algorithm", others_slow(each for each in REPEATABLE if averages_gradients(made(each))))
def test_ranks_stay_equal_whatever_comes_and_goes(algorithm):
    seed = ALGORITHMS.index(algorithm)
    one, other = ranks(2, lambda: [attached(schedule(seed + i), made(algorithm)) for i in range(2)])
    assert all(map(torch.equal, one, other))


def test_delayed_gradients_are_not_taken_by_another_optimizer():
    def run():
        with pytest.raises(RuntimeError, match="attach each model with its own optimizer"):
            alternating("gradient_allreduce(delay=1)", True)

    ranks(2, run)


def alternating(algorithm, together):
    """Train a generator and a critic, the other one frozen, in one attachment or in one each; return the weights."""
    torch.manual_seed(0)
    g, d = torch.nn.Linear(8, 8), torch.nn.Linear(8, 2)
    optimizers = [torch.optim.SGD(net.parameters(), 0.05) for net in (g, d)]
    both = [(torch.nn.ModuleList([g, d]), optimizers)]
    draw = torch.Generator().manual_seed(dist.get_rank())
    with contextlib.ExitStack() as attachments:
        for model, optimizer in both if together else zip((g, d), optimizers, strict=True):
            attachments.enter_context(bk.attach(model, optimizer, made(algorithm)))
        for _ in range(5):
            for net, other, optimizer in ((g, d, optimizers[0]), (d, g, optimizers[1])):
                net.requires_grad_(True)
                other.requires_grad_(False)
                optimizer.zero_grad()
                d(g(torch.randn(4, 8, generator=draw))).square().mean().backward()
                optimizer.step()
    return torch.cat([p.detach().flatten() for net in (g, d) for p in net.parameters()])


def has_memory(algorithm):
    """Return whether a stage of gradients remembers, and begins without a number of the bucket."""
    rules = rules_of(algorithm)
    return all(rule.stage.remembers() and not any(each.needs_shapes for each in rule.stage.whole()) for rule in rules)


MEMORIES = [each for each in REPEATABLE if averages_gradients(made(each)) and has_memory(made(each))]


@pytest.mark.parametrize("algorithm", others_slow(MEMORIES))
def test_one_attachment_of_two_networks_equals_two(algorithm):
    def run():
        return torch.equal(alternating(algorithm, True), alternating(algorithm, False))

    assert ranks(2, run) == [True] * 2


BY_PARAMETER = [each for each in MEMORIES if any(stage.elementwise for stage in stages(made(each)))]


@pytest.mark.parametrize("algorithm", others_slow(BY_PARAMETER))
def test_what_is_remembered_of_a_frozen_parameter_stays(algorithm):
    def run(bucket_bytes):
        model, optimizer = net_and_sgd()
        with bk.attach(model, optimizer, made(algorithm), bucket_bytes=bucket_bytes) as att:
            run_steps(model, optimizer, range(3))
            model[2].requires_grad_(False)
            before = att.state_dict()
            run_steps(model, optimizer, range(3, 5))
            after = att.state_dict()
        found = set()
        for name, held in before["rules"]["0"]["parameters"].items():
            same = [torch.equal(x, after["rules"]["0"]["parameters"][name][path]) for path, x in held.items()]
            found.add((name.startswith("2."), all(same)))
        return (True, True) in found and (True, False) not in found and (False, False) in found

    for bucket_bytes in (100, 1 << 20):
        assert ranks(2, run, bucket_bytes) == [True] * 2
