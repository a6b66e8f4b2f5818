"""A training whose ranks come and go, in one process: samplers and loaders are real, the group is not."""

import contextlib
import pickle
from collections import Counter, deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import chain, count, islice
from threading import Barrier
from types import SimpleNamespace

import numpy as np

import baguakit as bk
from baguakit.data.plan import without
from baguakit.elastic import Change


class Comm(bk.Comm):
    """The place of one rank in a group."""

    def __init__(self):
        self.__dict__.update(rank=0, size=1, membership=SimpleNamespace(bodies=0, changes=True))


class Loader:
    """A loader that fetches `depth` items ahead, as the workers of torch's do: one more with each that is taken."""

    def __init__(self, sampler, items, depth):
        self.draws, self.items, self.depth = iter(sampler), items, depth
        self.ready = deque()
        for _ in range(depth):
            self.fetch()

    def fetch(self):
        if item := list(islice(self.draws, self.items)):
            self.ready.append(item)

    def take(self):
        if not self.depth:
            self.fetch()
        item = self.ready.popleft() if self.ready else None
        if self.depth:
            self.fetch()
        return item


def in_no_queue(sampler):
    """Return the samples that nobody has trained, and that nobody will in this pass."""
    shares = sampler._shares(sampler._now.stretch)
    ranks = range(len(sampler._now.stretch.behind))
    return set(without(shares.samples, chain.from_iterable(map(shares.queue, ranks))).tolist())


@dataclass(eq=False)
class Rank:
    """A rank of the training."""

    training: "Training"
    depth: int

    def __post_init__(self):
        self.comm, self.loader = Comm(), None
        self.lost = deque()  # what it trained in steps that were lost, and the version of the record before
        self.att = SimpleNamespace(step=self.training.step, on_regroup=lambda callback: None)
        self.ends, self.left = {}, {}  # by epoch: the step at which its pass ended, and the samples in no queue

    def begin(self, state=None):
        """Make the sampler, and follow."""
        self.sampler = self.training.make(self.comm)
        if state is not None:
            self.sampler.load_state_dict(state)
        self.sampler.follow(self.att, self.training.items)

    def version(self):
        """Return the number of changes that the sampler knows of."""
        return -1 if self.sampler._record is None else self.sampler._record.version

    def next(self):
        """Return the epoch and the item of the next step, beginning passes as needed."""
        while True:
            if self.loader is None:
                self.loader = Loader(self.sampler, self.training.items, self.depth)
                self.epoch = self.sampler.epoch
            if (item := self.loader.take()) is not None:
                return self.epoch, [i for each in item for i in (each if isinstance(each, list) else [each])]
            self.ends[self.epoch], self.left[self.epoch] = self.training.step, in_no_queue(self.sampler)
            self.sampler.set_epoch(self.epoch + 1)
            self.loader = None


class Training:
    """Steps that all ranks make together; ranks are lost in a step, or join after one."""

    def __init__(self, make, depths, items=1, state=None):
        self.make, self.items, self.step, self.trained = make, items, 0, {}
        self.ranks, self.touched = [Rank(self, depth) for depth in depths], {0}
        self.uneven, self.repeats = set(), set()  # epochs that ranks end apart, and whose plans repeat samples
        self.sit()
        for rank in self.ranks:
            rank.begin(state)

    def sit(self):
        for number, rank in enumerate(self.ranks):
            rank.comm.__dict__.update(rank=number, size=len(self.ranks))

    def steps(self, count):
        for _ in range(count):
            for rank in self.ranks:
                self.note(*rank.next())
                rank.comm.membership.bodies += 1
            self.step += 1
            for rank in self.ranks:
                rank.att.step = self.step

    def note(self, epoch, samples):
        self.trained.setdefault(epoch, Counter()).update(samples)

    def lose(self, lost, joining=(), late=(), **how):
        """Lose ranks within a step, which is lost; `late` ranks had not begun it. Then others join."""
        version = max(rank.version() for rank in self.ranks)
        for rank in self.ranks:
            if rank not in late:
                rank.lost.append((version, rank.next()))
                rank.comm.membership.bodies += 1
        self.change(lost, joining, **how)

    def settle(self, version):
        """Count what was trained in lost steps before this version of the record, which will last."""
        for rank in self.ranks:
            while rank.lost and rank.lost[0][0] < version:
                self.note(*rank.lost.popleft()[1])

    def change(self, lost=(), joining=(), order=list, gathers=None, deaf=()):
        """Regroup after a step, with ranks in another order; `deaf` ranks do not hear a gather after so many."""
        known = [rank for rank in self.ranks if rank not in lost]
        self.settle(max(rank.version() for rank in known))  # what only lost ranks have heard is forgotten
        new = [Rank(self, depth) for depth in joining]
        self.touched |= {rank.sampler.epoch + k for rank in known for k in (0, 1)}
        self.ranks = order([*known, *new])
        self.sit()
        for rank in new:
            rank.begin()
            rank.sampler._record = None  # a rank that has joined hears of it in the change
        self.agree(gathers, deaf)
        self.ranks = [rank for rank in self.ranks if rank in known or rank.version() > 0]
        self.settle(min(rank.version() for rank in self.ranks))
        for rank in self.ranks:
            stretch = rank.sampler._record.stretch
            self.uneven |= {stretch.epoch - 1} if any(stretch.behind) else set()
            shares = rank.sampler._shares(stretch)
            planned = np.concatenate([shares.samples[:0], *chain(*map(shares.queue, range(len(self.ranks))))])
            if len(set(planned) & set(shares.samples)) < len(planned):
                self.repeats.add(stretch.epoch)

    def agree(self, gathers, deaf):
        """Let all ranks divide the rest, each in a thread; after `gathers` gathers, one fails on `deaf` ranks."""
        change = partial(Change, ranks=len(self.ranks), before=(), lost=(), step=self.step, seconds=0, why="")
        told, meeting = [b""] * len(self.ranks), Barrier(len(self.ranks), timeout=60)

        def changed(number):
            turns = count()

            def gather(value):
                turn = next(turns)
                if gathers is not None and turn > gathers:
                    raise bk.PeerError("the other ranks have gone")
                told[number] = pickle.dumps(value)
                meeting.wait()
                heard = [pickle.loads(each) for each in told]
                meeting.wait()
                if turn == gathers and (number in deaf or not deaf):
                    raise bk.PeerError("this rank has not heard the others")
                return heard

            self.ranks[number].comm.__dict__["gather_objects"] = gather
            try:
                with contextlib.suppress(bk.PeerError):
                    self.ranks[number].sampler._changed(change(number))
            except BaseException:
                meeting.abort()
                raise

        with ThreadPoolExecutor(len(self.ranks)) as pool:
            list(pool.map(changed, range(len(self.ranks))))
