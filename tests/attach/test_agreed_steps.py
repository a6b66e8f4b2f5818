"""Ranks of a program with collectives of its own launch a free-running flight in the same step, whatever is late."""

import random
import threading
from math import inf
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from pool import ranks
from tiers import slow_after
from torch import nn

import baguakit as bk
from baguakit.flights.weights import FreeRunner, WeightRunner

STEPS = 60


class Actor:
    """A thread that runs only when the play gives it the turn, and gives it back in `park`."""

    def __init__(self, play, name, work):
        self.play, self.name, self.ready, self.over = play, name, lambda: True, False
        self.turn = threading.Semaphore(0)
        self.thread = threading.Thread(target=self._run, args=(work,), daemon=True)
        play.actors.append(self)
        self.thread.start()

    def _run(self, work):
        self.turn.acquire()
        try:
            if not self.play.ended:
                work()
        except SystemExit:
            pass
        finally:
            self.over = True
            self.play.back.release()


class Play:
    """Ranks whose every message and step is as late as a seed says: one thread runs at a time.

    Args:
        size: the number of ranks.
        lockstep: they have a collective of their own in each step.
        pick: chooses who goes on, from those that can.
    """

    def __init__(self, size, lockstep, pick, seed):
        self.random, self.pick, self.lockstep = random.Random(seed), pick, lockstep
        self.actors, self.agreed, self.ended, self.back, self.acting = [], [], False, threading.Semaphore(0), None
        self.sums, self.launched, self.made = {}, [{} for _ in range(size)], [0] * size
        self.free = [FreeRunner([Flights(self, r)], Host(self, r, size)) for r in range(size)]
        self.training = [Actor(self, ("training", r), lambda r=r: self.train(r)) for r in range(size)]

    def train(self, rank):
        for step in range(1, STEPS + 1):
            self.made[rank] = step
            self.park(lambda step=step: not self.lockstep or min(self.made) >= step)  # the program's own collective
            self.free[rank].step_ended(step % 20)  # a checkpoint is loaded now and then
            self.park()

    def park(self, ready=lambda: True):
        actor = self.acting
        actor.ready = ready
        self.back.release()
        actor.turn.acquire()
        if self.ended:
            raise SystemExit

    def run(self):
        while not all(each.over for each in self.training):
            can = [each for each in self.actors if not each.over and each.ready()]
            assert can, "all wait for one another"
            self.acting = self.pick(self, can)
            self.acting.turn.release()
            self.back.acquire()
        self.ended = True
        for each in self.actors:
            each.turn.release()
            each.thread.join()
        return self.launched


class Flights:
    """In the place of a runner of weights: a flight arrives when all have launched, sooner or later."""

    def __init__(self, play, rank):
        self.play, self.rank, self.round, self.air = play, rank, 0, {}
        self.rule = bk.free_running(bk.stages.Mean())
        monitor = SimpleNamespace(check=lambda: None, wait_for=self.wait_for)
        self.channel = SimpleNamespace(monitor=monitor, comm=SimpleNamespace(hierarchical=False, rank=rank))

    def wait_for(self, agreement):
        self.play.park(agreement.flight.done)
        self.play.agreed.append(agreement.value.step)
        return agreement.value

    def launch_all(self, step, keep, counted, source):
        self.play.launched[self.rank][self.round] = self.play.made[self.rank]
        flight = SimpleNamespace(flight=SimpleNamespace(done=self.arrived))
        self.air, self.round = {0: flight}, self.round + 1

    def arrived(self):
        launched = all(self.round - 1 in each for each in self.play.launched)
        return launched and self.play.random.random() < 0.5

    def land_all(self):
        self.air = {}


class Host:
    """In the place of the channel of agreements: a thread for each, and all-reduces as late as the play has it."""

    def __init__(self, play, rank, size):
        self.play, self.rank, self.comm, self.calls = play, rank, SimpleNamespace(size=size, rank=rank), 0

    def begin(self, label, work):
        agreement = SimpleNamespace(value=None)

        def agree():
            agreement.value = work(SimpleNamespace(all_reduce=self.all_reduce, all_gather=self.all_gather))

        actor = Actor(self.play, ("agreeing", self.rank), agree)
        agreement.flight = SimpleNamespace(done=lambda: actor.over)
        return agreement

    def of_all(self, x):
        self.calls += 1
        given = self.play.sums.setdefault(self.calls, {})
        self.play.park()
        given[self.rank] = x
        self.play.park(lambda: len(given) == self.comm.size)
        return [given[rank] for rank in range(self.comm.size)]

    def all_reduce(self, x, op):
        assert op == dist.ReduceOp.MAX
        return torch.stack(self.of_all(x)).amax(0)

    def all_gather(self, x):
        return torch.cat(self.of_all(x))


def anybody(play, can):
    return play.random.choice(can)


def in_bursts(play, can):
    """Goes on with the same one for long, so that others are very late."""
    return play.acting if play.acting in can and play.random.random() < 0.9 else play.random.choice(can)


@pytest.mark.parametrize("pick", [anybody, in_bursts])
@pytest.mark.parametrize("size", slow_after(1, (3, 2, 5)))
def test_ranks_with_a_collective_of_their_own_launch_in_the_same_step(size, pick):
    for seed in range(12):
        first, *others = Play(size, True, pick, seed).run()
        assert len(first) > 2
        for other in others:
            both = first.keys() & other.keys()
            assert len(both) >= len(first) - 1 and {i: first[i] for i in both} == {i: other[i] for i in both}


@pytest.mark.parametrize("size", [2, 3])
def test_nobody_waits_for_the_steps_of_a_rank_that_stands_still(size):
    """The last rank stands still from a random moment until the others have made all their steps."""
    for seed in range(12):
        stop = random.Random(seed).randrange(1, 300)

        def pick(play, can, stop=stop):
            play.turns = getattr(play, "turns", 0) + 1
            others = [each for each in can if each is not play.training[-1]]
            if play.turns > stop and not all(each.over for each in play.training[:-1]):
                assert others, "they wait for its steps"
                can = others
            return play.random.choice(can)

        Play(size, False, pick, seed).run()


def test_a_straggler_and_the_others_launch_at_once():
    """One rank makes a step where the other makes ten, and no message is late: they agree on no step."""

    def pick(play, can):
        prompt = [each for each in can if each not in play.training]
        slow = [each for each in can if each is not play.training[play.made[0] < 10 * (play.made[1] + 1)]]
        return play.random.choice(prompt or slow or can)

    play = Play(2, False, pick, 0)
    play.run()
    assert play.agreed == [-inf] * len(play.agreed) and len(play.agreed) > 2


def test_over_gloo_too():
    def run():
        model = nn.Linear(1, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        launched, launch_all = [], WeightRunner.launch_all
        with bk.attach(model, optimizer, bk.free_running(bk.stages.Mean())) as att:
            WeightRunner.launch_all = lambda *args, **kwargs: launched.append(att.step) or launch_all(*args, **kwargs)
            try:
                least = torch.zeros(1)
                while least < 4:
                    model(torch.ones(1, 1)).sum().backward()
                    optimizer.step()
                    dist.all_reduce(least.fill_(len(launched)), dist.ReduceOp.MIN)
            finally:
                WeightRunner.launch_all = launch_all
        return launched

    first, *others = ranks(3, run)
    for other in others:
        shared = min(len(first), len(other))
        assert shared >= len(first) - 1 and first[:shared] == other[:shared]
