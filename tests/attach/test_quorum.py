"""Rounds that do not wait: free-running outer steps with a quorum, of ranks at different speeds."""

import contextlib
import itertools
import random
import time
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from pool import ranks
from tiers import slow_after
from torch import nn
from training import flat, loss, net, sgd

import baguakit as bk
from baguakit.algorithms import decoupled_diloco, diloco
from baguakit.flights.weights import Pace, Said, chosen

OUTER = {"lr": 0.8, "momentum": None, "nesterov": True}
PLAIN = bk.algorithms.local.OuterStep(torch.optim.SGD, lr=1.0)


class Told:
    """Is ready when the test says so."""

    ready = False

    def due(self, step, comm):
        return self.ready


def taught(algorithm, rounds, every=None):
    """Train for some rounds of four steps. With `every`, steps between a round and its landing change nothing."""
    model = net()
    optimizer = sgd(model.parameters())
    with bk.attach(model, optimizer, algorithm):
        for round in range(rounds):
            for step in range(4 * round, 4 * round + 4):
                if every is not None:
                    every.ready = step % 4 == 3
                optimizer.zero_grad()
                loss(model, dist.get_rank(), step).backward()
                optimizer.step()
            if every is not None:
                every.ready, before = False, flat(model)
                optimizer.zero_grad()
                while torch.equal(flat(model), before):
                    optimizer.step()
                    time.sleep(0.002)
    return flat(model)


@pytest.mark.parametrize("size", slow_after(1, (3, 2)))
def test_with_all_ranks_and_no_step_meanwhile_it_is_diloco(size):
    def run():
        every = Told()
        free = bk.free_running(bk.algorithms.local.OuterStep(torch.optim.SGD, **OUTER), every=every)
        return taught(free, 5, every), taught(diloco(4), 5)

    for free, waiting in ranks(size, run):
        assert torch.equal(free, waiting)


@contextlib.contextmanager
def recorded():
    """Yield a list to which each launch on this rank adds: the rule, who counted, and the weights and the anchor."""
    launches, launch = [], Pace.launch

    def record(pace, said, rank):
        x, a = (bucket.now() for bucket in pace.runner.buckets), (state["anchor"] for state in pace.runner.states)
        launches.append((repr(pace.rule), tuple(each.ready >= 0 for each in said), torch.cat([*x]), torch.cat([*a])))
        launch(pace, said, rank)

    with mock.patch.object(Pace, "launch", record):
        yield launches


def paced(algorithm, seed, rounds):
    """Add 8 to each weight in each step, at a pace that chance decides, for some rounds; return what was recorded.

    All numbers are whole, and so are means of two ranks: nothing is rounded.
    """
    pace = random.Random(f"{seed} {dist.get_rank()}")
    model = nn.ModuleList([nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)])
    for p in model.parameters():
        nn.init.zeros_(p)
    optimizer = torch.optim.SGD(model.parameters(), lr=8.0)
    slow = pace.random() < 0.5
    with recorded() as launches, bk.attach(model, optimizer, algorithm):
        while len(launches) < rounds:
            for p in model.parameters():
                p.grad = torch.full_like(p, -1.0)
            optimizer.step()
            time.sleep(0.01 * pace.random() ** 4 * (1 + 3 * slow))
        return launches[:rounds]


def holds(rounds):
    """Hold what ranks recorded of one rule against its equations, exactly."""
    for rows in zip(*rounds, strict=True):
        assert len({counted for _, counted, _, _ in rows}) == 1
        assert all(torch.equal(rows[0][3], a) for *_, a in rows)
    for (_, counted, _, a), (*_, later), *progress in zip(
        rounds[0], rounds[0][1:], *([x - a for _, _, x, a in mine] for mine in rounds), strict=False
    ):
        contributed = [p for p, counts in zip(progress, counted, strict=True) if counts]
        assert torch.equal(later - a, sum(contributed) / len(contributed))
    for rank, mine in enumerate(rounds):
        for (_, counted, x, a), (_, _, later_x, later_a) in itertools.pairwise(mine):
            made = (later_x - later_a) - (0 if counted[rank] else x - a)
            assert made.unique().numel() == 1 and made[0] >= 0 and made[0] % 8 == 0


@pytest.mark.parametrize("seed", slow_after(1, range(6)))
@pytest.mark.parametrize("turns", [{"quorum": 1}, {}, {"grace": 0.01}, {"every": bk.BySpeed(6)}])
def test_nothing_is_lost_and_all_anchors_are_equal(turns, seed):
    """The steps of a rank are those that it has contributed and those that it has not: whole steps of 8."""
    rule = bk.free_running(PLAIN, **{"every": 3, **turns})
    rounds = ranks(2, paced, rule, seed, 12)
    holds(rounds)
    counted = [who for _, who, _, _ in rounds[0]]
    if not turns or "every" in turns:
        assert set(counted) == {(True, True)}


@pytest.mark.parametrize("seed", slow_after(1, range(6)))
def test_fragments_fly_one_after_another_each_with_its_own_quorum(seed):
    algorithm = decoupled_diloco(4, 1, fragments=2, optimizer=torch.optim.SGD, lr=1.0)
    told = ranks(2, paced, algorithm, seed, 16)
    assert len({tuple((rule, who) for rule, who, _, _ in launches) for launches in told}) == 1
    for rule in map(repr, algorithm.rules):
        mine = [[each for each in launches if each[0] == rule] for launches in told]
        assert len(mine[0]) > 2
        holds(mine)


def test_nobody_waits_for_a_rank_that_makes_no_steps():
    """Two ranks make a hundred steps while the third stands still until they have; it then lands what it missed."""

    def run():
        rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
        model, name = net(), "test_quorum: nobody waits"
        optimizer = sgd(model.parameters())
        with bk.attach(model, optimizer, decoupled_diloco(5, 2)) as att:
            for step in range(100):
                if rank == 0 and step == 1:
                    store.wait([f"{name}: 1", f"{name}: 2"])
                loss(model, rank, step).backward()
                optimizer.step()
            store.set(f"{name}: {rank}", "")
            return att.step

    assert ranks(3, run) == [100] * 3


def test_ranks_take_states_of_different_rounds():
    """The rank whose state is older takes the anchor of the other, and keeps what it has not contributed."""

    def run():
        rank, saved = dist.get_rank(), []
        model = nn.Linear(4, 4, bias=False)
        nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=8.0)
        rule = bk.free_running(bk.algorithms.local.OuterStep(torch.optim.SGD, lr=1.0, momentum=0.5), every=3)

        def step():
            model.weight.grad = torch.full_like(model.weight, -1.0)
            optimizer.step()
            time.sleep(0.002)

        with recorded() as launches, bk.attach(model, optimizer, rule) as att:
            while len(launches) < 4 + 3 * rank:
                step()
            saved = att.state_dict(), {k: v.clone() for k, v in model.state_dict().items()}
            while len(launches) < 7:
                step()
        with recorded() as launches, bk.attach(model, optimizer, rule) as att:
            model.load_state_dict(saved[1])
            att.load_state_dict(saved[0])
            loaded = att.state_dict()["rules"]["0"]
            own = saved[1]["weight"] - loaded["parameters"]["weight"]["anchor"]
            while len(launches) < 3:
                step()
        return loaded["round"], own.flatten(), [(who, x, a) for _, who, x, a in launches[:3]]

    (older, own, mine), (newer, _, theirs) = ranks(2, run)
    assert older < newer
    for (who, _, a), (also, _, b) in list(zip(mine, theirs, strict=True))[1:]:
        assert who == also and torch.equal(a, b)
    made = (mine[1][1] - mine[1][2]) - own
    assert made.unique().numel() == 1 and made[0] % 8 == 0 and made[0] > 0


def said(ready, speed=0.0, there=1.0, round=0):
    return Said(there, ready, 1.0, speed, round)


@pytest.mark.parametrize(
    "ready, turns, launched",
    [
        ((0.0, 0.0, -1.0), {}, None),
        ((0.0, 0.0, 0.0), {}, 0),
        ((0.0, 0.0, -1.0), {"quorum": 2}, 0),
        ((0.0, -1.0, -1.0), {"quorum": 2}, None),
        ((1.5, -1.0, -1.0), {"quorum": 2, "grace": 1.0}, 0),
        ((0.5, -1.0, -1.0), {"quorum": 2, "grace": 1.0}, None),
        ((0.0, 0.0, 0.0), {"quorum": 9}, 0),
        ((-1.0, -1.0, -1.0), {"quorum": 1, "grace": 0.0}, None),
    ],
)
def test_when_a_flight_is_launched(ready, turns, launched):
    assert chosen([[said(each)] for each in ready], [bk.free_running(PLAIN, **turns)]) == launched


def test_ranks_whose_training_has_ended_do_not_count():
    rule = bk.free_running(PLAIN, quorum=3)
    ended = said(-1.0, there=0.0)
    assert chosen([[said(0.0)], [said(0.0)], [ended]], [rule]) == 0
    assert chosen([[ended]] * 3, [rule]) == -1
    first, second = said(1.0), said(2.0)
    assert chosen([[first, second], [second, second]], [bk.free_running(PLAIN, quorum=1)] * 2) in (0, 1)
    assert chosen([[first, second]], [rule, rule]) == 1  # which waits longer


def test_rounds_by_speed():
    rule = bk.free_running(PLAIN, every=bk.BySpeed(16))
    told = [said(0.0, speed) for speed in (4.0, 2.0, 1.5, 0.01, 0.0)]
    lengths = []
    for rank in range(5):
        pace = Pace(SimpleNamespace(rule=rule, launch_all=lambda *args, **kwargs: None))
        pace.launch(told, rank)
        lengths.append(pace.most)
    assert lengths == [16, 8, 6, 1, 0]  # a rank that has made no step does not know yet


@pytest.mark.parametrize(
    "make, sentence",
    [
        (
            lambda: bk.free_running(bk.stages.Mean(), quorum=2),
            r"quorum=2 and grace=None are for free_running\(OuterStep",
        ),
        (
            lambda: bk.after_step(PLAIN, every=bk.BySpeed(3)),
            r"BySpeed\(most=3\) gives each rank its own number of steps",
        ),
        (lambda: bk.free_running(PLAIN, quorum=0), "quorum"),
        (lambda: bk.free_running(PLAIN, grace=-1.0), "grace"),
        (lambda: decoupled_diloco(bk.BySpeed(8), fragments=2), "every must be a number"),
        (
            lambda: decoupled_diloco(inner=bk.stages.ErrorFeedback(bk.stages.CompressedMean())),
            "without state",
        ),
    ],
)
def test_what_cannot_be_is_refused(make, sentence):
    with pytest.raises(ValueError, match=sentence):
        make()


def test_the_expression_of_decoupled_diloco():
    text = (
        "free_running(OuterStep(torch.optim.SGD, lr=0.8, momentum=None, nesterov=True), every=24, quorum=3, grace=2.0"
    )
    assert repr(decoupled_diloco(24, 3, 2.0)) == f"{text})"
    first, second = decoupled_diloco(24, 3, 2.0, fragments=2).rules
    assert repr(first) == f"{text}, where=Fragment(k=0, of=2))" or "where=Fragment(k=0, of=2)" in repr(first)
    assert "offset=12" in repr(second)
    assert decoupled_diloco(4).rules[0].stage == diloco(4).rules[0].stage
