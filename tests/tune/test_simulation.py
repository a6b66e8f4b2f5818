"""A virtual cluster: closed forms of goodput, losses counted by hand, and trainings with ranks that are lost."""

import copy
import re
import time
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import baguakit as bk
from baguakit.compressors import UInt4
from baguakit.costs import Timeless
from baguakit.schedules import BySpeed
from baguakit.tune import Compute, Event, Machine, describe, predict, simulate, simulation

a = bk.algorithms
FREE = Timeless(4, 1, "cpu", 1, ())  # nothing takes time on it
SLOW = describe(4, 1, 1e7, 1e9, alpha=1e-3)
UNEQUAL = [Machine("fast", 0.1, count=2), Machine("half", 0.2), Machine("quarter", 0.4)]
ALL = (a.gradient_allreduce(), a.bytegrad(), a.local_sgd(8), a.diloco(every=50), a.decentralized(), a.choco())
DELAYED = (a.gradient_allreduce(delay=1), a.async_model_average())


def model():
    return nn.Linear(1000, 1000, bias=False, device="meta")


@pytest.mark.parametrize("algorithm", ALL + DELAYED, ids=repr)
def test_equal_machines_that_are_never_lost_make_the_steps_of_the_prediction(algorithm):
    compute = Compute(0.03, 0.05, 0.02)
    step = predict(algorithm, model(), SLOW, compute).seconds
    found = simulate(model(), algorithm, [Machine("a", compute, count=4, tokens=512)], SLOW, seconds=1000.0)
    assert found.tokens == pytest.approx(4 * 512 * 1000.0 / step)
    assert found.goodput == pytest.approx(0.1 / step)
    assert (found.availability, found.events, found.losses) == (1.0, (), ())
    if algorithm in ALL:
        every = max(rule.every for rule in algorithm.rules if rule.stop is None)
        assert found.rounds == int(1000.0 / step / every)


@pytest.mark.parametrize("algorithm", ALL, ids=repr)
def test_rules_that_wait_go_at_the_pace_of_the_slowest(algorithm):
    """Speeds 1, 1, 1/2 and 1/4: 4 · 1/4 of 2.75."""
    found = simulate(model(), algorithm, UNEQUAL, FREE, seconds=4000.0)
    assert found.goodput == pytest.approx(4 / 11) and found.tokens == pytest.approx(40_000)


def test_one_machine_at_half_speed_and_with_half_the_tokens():
    pair = [Machine("a", 0.1), Machine("b", 0.2)]
    assert simulate(model(), a.gradient_allreduce(), pair, FREE).goodput == pytest.approx(2 / 3)
    shared = [Machine("a", 0.1, tokens=2), Machine("b", 0.1, tokens=1)]  # batches in proportion to speed
    assert simulate(model(), a.gradient_allreduce(), shared, FREE).goodput == pytest.approx(1)


def test_free_running_ranks_go_each_at_its_own_pace():
    found = simulate(model(), a.async_model_average(), UNEQUAL, FREE, seconds=4000.0)
    assert found.goodput == pytest.approx(1) and found.tokens == pytest.approx(110_000)
    alone = [predict(a.async_model_average(), model(), SLOW, each.compute) for each in UNEQUAL]
    slow = simulate(model(), a.async_model_average(), UNEQUAL, SLOW, seconds=4000.0)
    assert slow.tokens == pytest.approx(4000 * (2 / alone[0].seconds + 1 / alone[1].seconds + 1 / alone[2].seconds))
    bytes_of_a_flight = 2 * 3 / 4 * 4e6
    assert slow.rounds == int(4000 / alone[2].seconds * alone[2].sent / bytes_of_a_flight)


def test_a_loss_costs_the_open_round_of_one_and_a_step_of_all():
    """Local SGD of rounds of 8 s: 20 steps by 20.5 s, of which the lost rank keeps 16; by 30.5 s 8 more; then 67.5."""
    machines = [Machine("a", 1.0, count=2, away=10.0)]
    found = simulate(model(), a.local_sgd(8), machines, FREE, [20.5], seconds=100.0, regroup=2.0)
    assert found.events == (Event(20.5, "lost", "a", 1, 16 + 20), Event(30.5, "back", "a", 2, 16 + 28))
    assert found.tokens == pytest.approx(16 + 20 + 8 + 2 * 67.5)
    assert found.rounds == (28 + 67.5) // 8 and found.availability == pytest.approx(0.95)
    assert found.goodput == pytest.approx(found.tokens / 200)
    late = simulate(model(), a.local_sgd(8), machines, FREE, [16.5], seconds=17.0)
    assert late.tokens == 16 + 16  # a round that has just landed is kept
    delayed = bk.after_step(bk.stages.Mean(), every=8, delay=2)
    assert simulate(model(), delayed, machines, FREE, [17.5], seconds=18.0).tokens == 8 + 17  # it is in flight still


def test_replaced_at_once_a_kill_costs_one_regrouping():
    found = simulate(
        model(), a.gradient_allreduce(), [Machine("a", 0.5, count=4)], FREE, [10.0], seconds=100.0, regroup=2
    )
    assert [each.what for each in found.events] == ["lost", "back"]
    assert found.tokens == pytest.approx(4 * 98 / 0.5)


def test_when_all_are_lost_the_next_goes_on_from_the_last_round():
    machines = [Machine("a", 1.0, away=50.0)]
    found = simulate(model(), a.gradient_allreduce(), machines, FREE, [10.0, 20.0], seconds=100.0, regroup=0)
    assert [each.what for each in found.events] == ["lost", "back"]  # at 20 s nobody was left to be lost
    assert found.tokens == 10 + 40 and found.availability == 0.5


@pytest.mark.parametrize("mtbf, away", [(3600.0, 600.0), (600.0, 600.0), (7200.0, 60.0)])
def test_availability_of_independent_ranks(mtbf, away):
    """MTBF/(MTBF + repair); and so is the goodput, where changes and exchanges take no time."""
    machines = [Machine("a", 0.01, count=200, mtbf=mtbf, away=away)]
    found = simulate(model(), a.async_model_average(), machines, FREE, seconds=30 * mtbf, regroup=0.0)
    assert found.availability == pytest.approx(mtbf / (mtbf + away), rel=0.02)
    assert found.goodput == pytest.approx(found.availability, rel=0.01)


@pytest.mark.parametrize(
    "options, round",
    [
        ({}, 40.0),  # the slowest has made 10 steps
        ({"quorum": 2}, 20.0),
        ({"quorum": 1}, 10.0),
        ({"grace": 5.0}, 15.0),
        ({"quorum": 2, "grace": 50.0}, 20.0),
        ({"every": BySpeed(10)}, 10.0),  # 10, 5 and 2 steps
    ],
)
def test_rounds_that_do_not_wait_begin_with_their_quorum_or_after_their_grace(options, round):
    machines = [Machine("1", 1.0), Machine("2", 2.0), Machine("4", 4.0)]
    algorithm = a.decoupled_diloco(**{"every": 10} | options)
    found = simulate(model(), algorithm, machines, FREE, seconds=400.0)
    assert found.rounds == int(400 / round) and found.goodput == pytest.approx(1)


def test_a_lost_rank_takes_what_it_has_not_contributed():
    """Rounds of 20 s with a quorum of 2 of 3: the slowest has 10 steps, and contributes, in every second one."""
    algorithm = a.decoupled_diloco(every=10, quorum=2)
    machines = [Machine("1", 1.0), Machine("2", 2.0), Machine("4", 4.0, mtbf=1e-3, away=1e6)]
    group = simulation.Group(machines, simulation.paces(algorithm, model(), FREE, machines, ()), 0)
    assert group.pace == ([1.0, 2.0, 4.0], [20.0, 10.0, 10.0], 20.0)
    group.go(95.0)
    group.lose(2, 0.0)
    assert group.kept == 20 and group.steps == [95, 47, 23]
    assert group.pace == ([1.0, 2.0, 4.0], [20.0, 10.0, 10.0], 20.0)  # of two ranks, both


def test_a_seed_gives_one_simulation():
    machines = [replace(each, mtbf=300.0, away=30.0) for each in UNEQUAL]
    runs = [simulate(model(), a.diloco(every=50), machines, SLOW, [7.0], seed=seed) for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2] and len(runs[0].events) > 100


def test_a_machine_that_comes_during_a_step_that_all_repeat_has_made_nothing():
    machines = [Machine("m", 1.0), Machine("other", 1.0, count=2)]
    group = simulation.Group(machines, lambda present: simulation.Pace([1.0, 1.0], [1.0, 1.0], 1.0), 0)
    group.lose(0, 0.0)
    group.go(0.5)
    group.join(0)
    group.lose(1, 0.0)
    assert group.tokens == 0
    group.go(1.5)
    assert group.tokens == 2


@given(
    st.lists(st.builds(Machine, st.just("m"), st.floats(0.1, 5), st.integers(1, 3), st.floats(1, 9),
                       st.none() | st.floats(5, 500), st.floats(0, 50)), min_size=1, max_size=3),
    st.lists(st.floats(0, 300), max_size=4),
    st.sampled_from([a.gradient_allreduce(), a.local_sgd(8), a.async_model_average()]),
    st.floats(0, 5),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_of_any_cluster(machines, failures, algorithm, regroup):
    found = simulate(model(), algorithm, machines, FREE, failures, seconds=300.0, regroup=regroup)
    count = sum(each.count for each in machines)
    assert 0 <= found.goodput <= 1 + 1e-9 and 0 <= found.availability <= 1 + 1e-9 and found.rounds >= 0
    assert all(before.seconds <= after.seconds for before, after in pairwise(found.events))
    present = [count, *(each.present for each in found.events)]
    assert all(abs(after - before) == 1 for before, after in pairwise(present))
    moments = [0.0, *(each.seconds for each in found.events), 300.0]
    share = sum(n * (t - s) for n, (s, t) in zip(present, pairwise(moments), strict=True))
    assert found.availability == pytest.approx(share / 300.0 / count)


@pytest.mark.slow
def test_a_month_of_a_thousand_machines_takes_minutes_of_one_core():
    machines = [Machine(f"{i}", 0.1 * (1 + i), count=250, mtbf=7200.0 * (1 + i), away=600.0) for i in range(4)]
    began = time.process_time()
    found = simulate(model(), a.diloco(every=500), machines, SLOW, seconds=30 * 86400.0)
    assert time.process_time() - began < 300 and len(found.events) > 300_000


def test_every_number_says_that_it_is_simulated():
    found = simulate(model(), a.local_sgd(8), UNEQUAL, SLOW, [60.0])
    head, *lines = str(replace(found, losses=((1.0, 0.5),))).splitlines()
    assert head == "after_step(Mean(), every=8), 86,400 simulated seconds on 2 × fast, 1 × half, 1 × quarter"
    assert len(lines) == 6 and all(re.fullmatch(r"    simulated [a-z ]+ +[\d.,e+]+", line) for line in lines)
    assert repr(found) == str(found)


def test_the_picture_shows_goodput_presence_and_losses():
    found = simulate(
        model(), a.gradient_allreduce(), [Machine("a", 0.1, count=2, away=50.0)], FREE, [50.0], seconds=200.0, regroup=0
    )
    [axes] = found.draw().axes
    present, goodput = (line.get_ydata() for line in axes.lines)
    assert [*present] == [1.0, 0.5, 1.0, 1.0] and goodput[0] == pytest.approx(1) and goodput[75] == pytest.approx(0.5)
    assert axes.get_xlabel() == "simulated seconds" and axes.get_ylabel() == "simulated share"
    assert len(replace(found, losses=((1.0, 2.0), (2.0, 1.0))).draw().axes) == 2
    nothing = simulate(model(), a.gradient_allreduce(), [Machine("a", 1.0)], FREE, seconds=0.5)
    assert nothing.draw().axes


@pytest.mark.parametrize(
    "options, words",
    [
        ({"machines": []}, "machines is a list of Machine, one or more"),
        ({"machines": [Machine("a", Compute(0.0, 0.0))]}, "machines is a list of Machine, one or more"),
        ({"algorithm": a.bytegrad(UInt4()), "network": SLOW}, "nothing is known of the speed of UInt4"),
        ({"algorithm": bk.hierarchical(a.bytegrad()), "failures": [1.0]}, "averages by node, and bk.elastic cannot"),
        ({"losses": lambda rank, ranks: None, "machines": [Machine("a", 1.0, count=17)]}, "leave it out for 17 of"),
        ({"losses": lambda rank, ranks: None, "algorithm": a.async_model_average()}, "leave it out for 4 of"),
        ({"algorithm": a.local_sgd(every=lambda step: 4)}, "is not a number"),
        ({"algorithm": bk.during_backward(bk.stages.Mean(), stop=100)}, "stops, and then nothing is exchanged"),
    ],
)
def test_what_cannot_be_simulated_is_refused_in_a_sentence(options, words):
    given = {"algorithm": a.gradient_allreduce(), "machines": UNEQUAL, "network": SLOW} | options
    with pytest.raises(ValueError, match=words):
        simulate(model(), **given)


# Losses


def begin(rank, ranks):
    """Return a small training of a rank, as `simulate` takes it."""
    torch.manual_seed(0)
    small = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    teacher = torch.randn(8, 1)

    def loss(step):
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(100 * step + rank))
        return (small(x) - torch.tanh(x @ teacher)).square().mean()

    return small, torch.optim.SGD(small.parameters(), lr=0.05, momentum=0.5), loss


def by_hand(groups, every):
    """Return the mean losses of ranks that average weights after every `every`-th step, all in this process."""
    found, ranks, alive = [], {}, ()
    for step, present in enumerate(groups):
        for rank in set(present) - set(alive):
            ranks[rank] = begin(rank, 3)
            if alive:  # it takes the state of the first that was there
                ranks[rank][0].load_state_dict(ranks[alive[0]][0].state_dict())
                ranks[rank][1].load_state_dict(copy.deepcopy(ranks[alive[0]][1].state_dict()))
        alive = present
        losses = []
        for rank in present:
            _, optimizer, loss = ranks[rank]
            optimizer.zero_grad()
            losses.append(loss(step))
            losses[-1].backward()
            optimizer.step()
        found.append(torch.stack(losses).mean().item())
        if (step + 1) % every == 0:
            averaged = [list(ranks[rank][0].parameters()) for rank in present]
            for same in zip(*averaged, strict=True):
                mean = torch.stack([p.detach() for p in same]).mean(0)
                for p in same:
                    p.data.copy_(mean)
    return found


@pytest.mark.slow  # processes begin
def test_losses_are_those_of_the_algorithm_on_the_ranks_that_are_present():
    """Two are lost, one after the other, and come back with the state of another: 9, 2, 2, 3 and 19 steps of 1 s."""
    machines = [Machine(name, 1.0, away=7.0) for name in "012"]
    found = simulate(model(), a.local_sgd(4), machines, FREE, [9.5, 13.0], seconds=40.0, regroup=1.0, losses=begin)
    assert [each.seconds for each in found.events] == [9.5, 13.0, 16.5, 20.0]
    members, groups = {0, 1, 2}, []
    for steps, event in zip((9, 2, 2, 3, 19), (*found.events, None), strict=True):
        groups += [tuple(sorted(members))] * steps
        members ^= {int(event.machine)} if event else set()
    assert [loss for _, loss in found.losses] == pytest.approx(by_hand(groups, 4), rel=1e-4)
    moments = [*range(1, 10), 11.5, 12.5, 15, 16, 18, 19, 20, *range(22, 41)]
    assert [seconds for seconds, _ in found.losses] == pytest.approx(moments)


@pytest.mark.slow  # processes begin
@pytest.mark.parametrize("algorithm", ALL + DELAYED[:1], ids=repr)
def test_every_algorithm_trains_on_with_ranks_that_come_and_go(algorithm):
    machines = [Machine("a", 1.0, count=3, away=20.0)]
    found = simulate(model(), algorithm, machines, SLOW, [33.0, 80.0], seconds=200.0, losses=begin)
    losses = [loss for _, loss in found.losses]
    assert len(found.events) == 4 and len(losses) > 50 and sum(losses[-20:]) < 0.5 * sum(losses[:20])
