"""Schedules of training several networks, drawn by a seed, and what they should come to, by hand.

A schedule is a list of events: parameters are frozen, thawed, added and removed, gradients accumulated, zeroed and
averaged, and optimizers step in any order and different numbers of times. `Nets.do` carries out an event on one rank.
"""

import contextlib
from collections.abc import Container, Iterator, Sequence
from random import Random
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call

import baguakit as bk

Event = tuple[Any, ...]


class Schedule(NamedTuple):
    """The networks, the parameters that are frozen at first, and the events."""

    nets: str
    frozen: list[tuple[str, int, str]]
    events: list[Event]


def schedule(seed: int, any_pass: bool = False, grows: bool = True) -> Schedule:
    """Draw a schedule.

    Args:
        any_pass: with backward passes that add to averaged gradients, which only exact averages allow.
        grows: with parameters that are added, removed, or not trainable at first.
    """
    draw = Random(seed)
    nets = draw.choice(["ab", "abc"])
    blocks = dict.fromkeys(nets, 2)
    frozen = [(net, 1, name) for net in nets for name in ("weight", "bias") if grows and draw.random() < 0.2]
    new = {*frozen}
    events: list[Event] = []
    for _ in range(draw.randint(3, 4)):
        for event in _structure(draw, nets, blocks) if grows else ():
            events.append(event)
            new |= {(event[1], 1, name) for name in ("weight", "bias")}
        for net in draw.sample(nets, len(nets)):
            for _ in range(draw.choice([1, 1, 2])):
                events += list(_turn(draw, nets, net, blocks, new, any_pass))
        if draw.random() < 0.3:  # a step of all at once
            events += [("zero", nets, True), ("only", nets), ("backward", nets, draw.random(), True)]
            events += [("step", net) for net in draw.sample(nets, len(nets))]
    return Schedule(nets, frozen, events)


def _structure(draw: Random, nets: str, blocks: dict[str, int]) -> Iterator[Event]:
    net = draw.choice(nets)
    if draw.random() < 0.3:
        blocks[net] += 1
        yield "add", net, draw.random()
    elif blocks[net] > 1 and draw.random() < 0.2:
        blocks[net] -= 1
        yield "remove", net, draw.randint(1, blocks[net])


def _turn(
    draw: Random, nets: str, net: str, blocks: dict[str, int], new: Container[Any], any_pass: bool
) -> Iterator[Event]:
    """Yield the events of a step of one optimizer, others frozen or not; `new` has never been trainable."""
    others = nets.replace(net, "")
    yield "only", net if draw.random() < 0.5 else nets
    for _ in range(draw.randint(0, 2)):  # the first block stays, so that there is a gradient on all ranks
        which, block = draw.choice(nets), draw.randint(1, 3)
        name, rank = draw.choice(["weight", "bias"]), draw.choice([None, None, 0, 1])
        alike = block > 1 or blocks[which] < 2 or (which, 1, name) in new  # ranks must agree on what is new
        yield "trainable", which, block, name, draw.random() < 0.5, None if alike else rank
    yield "zero", nets if not any_pass or draw.random() < 0.5 else net, not any_pass or draw.random() < 0.7
    passes = draw.choice([1, 1, 2, 3])
    for i in range(passes):
        path = draw.choice([net, net, net + others[0], others[-1] + net, nets])
        yield "backward", path, draw.random(), i == passes - 1 or (any_pass and draw.random() < 0.5)
    if draw.random() < 0.2:
        yield "only", draw.choice([net, others, nets])
    yield "step", net


class Nets:
    """The networks of one rank, each with its optimizer.

    Args:
        drawn: the schedule.
        rank: of the data.
        detach: instead of freezing a parameter, take it as a constant.
    """

    def __init__(self, drawn: Schedule, rank: int, detach: bool = False) -> None:
        torch.manual_seed(0)
        self.rank, self.detach = rank, detach
        self.model = nn.ModuleDict({net: nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]) for net in drawn.nets})
        self.constant: set[Tensor] = set()
        for net, block, name in drawn.frozen:
            getattr(self.model[net][block], name).requires_grad_(False)
        self.optimizers = {net: torch.optim.SGD(self.model[net].parameters(), 0.05, momentum=0.9) for net in drawn.nets}

    def do(self, event: Event) -> None:
        """Carry out an event."""
        what, *args = event
        getattr(self, what)(*args)

    def _set(self, p: Tensor, trainable: bool) -> None:
        if not self.detach:
            p.requires_grad_(trainable)
        elif trainable:
            p.requires_grad_(True)
            self.constant.discard(p)
        elif p.requires_grad:
            self.constant.add(p)

    def only(self, nets: str) -> None:
        for net, blocks in self.model.items():
            for p in blocks.parameters():
                self._set(p, net in nets)

    def trainable(self, net: str, block: int, name: str, on: bool, rank: int | None) -> None:
        if block < len(self.model[net]) and rank in (None, self.rank):
            self._set(getattr(self.model[net][block], name), on)

    def add(self, net: str, seed: float) -> None:
        torch.manual_seed(int(seed * 1e9))
        self.model[net].append(nn.Linear(4, 4))
        self.optimizers[net].add_param_group({"params": self.model[net][-1].parameters()})

    def remove(self, net: str, block: int) -> None:
        gone = set(self.model[net][block].parameters())
        del self.model[net][block]
        for group in self.optimizers[net].param_groups:
            group["params"] = [p for p in group["params"] if p not in gone]

    def zero(self, nets: str, to_none: bool) -> None:
        for net in nets:
            self.optimizers[net].zero_grad(to_none)

    def backward(self, path: str, seed: float, _: bool) -> None:
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(int(seed * 1e9) + self.rank))
        for net in path:
            for block in self.model[net]:
                held = {name: p.detach() if p in self.constant else p for name, p in block.named_parameters()}
                x = torch.tanh(functional_call(block, held, x))
        if x.requires_grad:
            (x + 0.5).square().mean().backward()

    def step(self, net: str) -> None:
        self.optimizers[net].step()

    def weights(self) -> Tensor:
        """Return all weights as one tensor."""
        return torch.cat([p.detach().flatten() for p in self.model.parameters()])


def attached(drawn: Schedule, algorithm: Any, detach: bool = False) -> Tensor:
    """Carry out a schedule on this rank with an algorithm; return the weights."""
    nets = Nets(drawn, dist.get_rank(), detach)
    with bk.attach(nets.model, list(nets.optimizers.values()), algorithm, bucket_bytes=150) as att:
        for event in drawn.events:
            accumulates = event[0] == "backward" and not event[-1]
            with att.no_sync() if accumulates else contextlib.nullcontext():
                nets.do(event)
    return nets.weights()


def by_hand(drawn: Schedule, n: int, gradients: bool, every: int = 1) -> list[Tensor]:
    """Carry out a schedule on n ranks in this process, and return their weights.

    Args:
        gradients: average the gradients after every backward that does not only accumulate.
        every: else, average the weights after so many steps of all optimizers.
    """
    all_ranks, steps, stepped = [Nets(drawn, rank) for rank in range(n)], 0, set[str]()
    for event in drawn.events:
        for nets in all_ranks:
            nets.do(event)
        together = zip(*(nets.model.parameters() for nets in all_ranks), strict=True)
        if gradients and event[0] == "backward" and event[-1]:
            for ps in together:
                if any(p.grad is not None for p in ps):
                    g = sum(p.grad if p.grad is not None else torch.zeros_like(p) for p in ps) / n
                    for p in ps:
                        p.grad = g.clone()
        if not gradients and event[0] == "step":
            stepped.add(event[1])
            if stepped == set(drawn.nets):
                stepped.clear()
                steps += 1
                if steps % every == 0:
                    mean(list(together), n)
    return [nets.weights() for nets in all_ranks]


@torch.no_grad()
def mean(together: Sequence[Sequence[Tensor]], n: int) -> None:
    """Average the weights."""
    for ps in together:
        x = sum(ps) / n
        for p in ps:
            p.copy_(x)
