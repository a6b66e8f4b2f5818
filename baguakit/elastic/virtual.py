"""Trainings whose ranks are lost and come back at steps that were decided before: for `bk.tune.simulate`."""

import copy
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor, nn

from ..attach import Engine, attach
from ..comm import Comm, Membership
from ..rules import Algorithm
from .carrying import Carrying, Kept

Begin = Callable[[int, int], tuple[nn.Module, Any, Callable[[int], Tensor]]]  # (rank, ranks): model, optimizer, loss


class Spell(NamedTuple):
    """Steps in which the group does not change: from the step `first`, which begins at `at`, each takes `seconds`."""

    first: int
    at: float
    seconds: float
    ranks: tuple[int, ...]


class Virtual(Membership):
    """The membership of a spell, into which ranks carry their state as in a round of `bk.elastic`."""

    def __init__(self, kept: Kept | None, survivors: Sequence[int]) -> None:
        self.kept, self.survivors = kept, survivors

    def start(self, engine: Engine) -> None:
        self.engine = engine
        carrying = Carrying(engine, self.kept, self.survivors)
        engine.start(carrying.fill, carrying.load)


def trained(begin: Begin, algorithm: Algorithm, spells: Sequence[Spell]) -> list[tuple[float, float]]:
    """Train on this rank until the last spell begins. Return (seconds, mean loss) of each step. Collective.

    A rank that is lost loses its state. Flights in the air land after the change.
    """
    everyone = Comm()
    model, optimizer, loss = begin(everyone.rank, everyone.size)
    found, kept, with_state = list[tuple[float, float]](), None, set[int]()
    for spell, after in pairwise(spells):
        with_state &= set(spell.ranks)
        if spell.first == after.first:
            continue
        group = dist.new_group(spell.ranks)
        survivors = [i for i, rank in enumerate(spell.ranks) if rank in with_state]
        kept = kept if everyone.rank in with_state else None
        if everyone.rank in spell.ranks:
            comm = Comm(group)
            member = Virtual(kept, survivors)
            vars(comm)["membership"] = member
            with attach(model, optimizer, algorithm, comm=comm):
                for step in range(spell.first, after.first):
                    optimizer.zero_grad()
                    value = loss(step)
                    value.backward()
                    optimizer.step()
                    mean = sum(comm.gather_objects(float(value.detach()))) / comm.size
                    found.append((spell.at + (step + 1 - spell.first) * spell.seconds, mean))
                kept = member.engine.state_dict(True, same_ranks=False)
                weights = copy.deepcopy(model.state_dict())  # without what lands at the end of the attachment
            model.load_state_dict(weights)
            dist.destroy_process_group(group)
        with_state = set(spell.ranks)
    return found
