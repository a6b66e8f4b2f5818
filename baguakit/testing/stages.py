"""Checks of stages, called by hand on three ranks: results, states, and the declarations of their classes."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..buckets import Bucket
from ..comm import Comm
from ..keeping import tensors_of
from ..stages import Hierarchical, Stage, call_stage, init_stage, remembered
from .blind import Blind, Two
from .checking import Checks, differences, drawn, expression

STAGES = Checks()
STAGES.add("its repr is an expression that evaluates to an equal stage")(expression)
RANKS, ROUNDS = 3, 5
SHAPES = ((30, 40), (41,), (1, 3))


def flat(stage: Stage) -> bool:
    """Return whether a stage works without nodes."""
    return not any(isinstance(each, Hierarchical) for each in stage.whole())


def in_step(stage: Stage) -> bool:
    """Return whether ranks wait for each other: what a one-sided stage returns depends on when values come."""
    return flat(stage) and not any(each.one_sided for each in stage.whole())


@dataclass
class Hand:
    """A loop that calls a stage by hand, with values that differ by rank and round."""

    stage: Stage
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        self.comm = Comm()
        params = [nn.Parameter(drawn(*shape).to(self.dtype)) for shape in SHAPES]
        self.bucket = Bucket(params, self.stage.multiple_of(self.comm))
        self.bucket.load("data")
        self.state = init_stage(self.stage, self.bucket, self.comm)
        self.length = sum(p.numel() for p in params)

    def values(self, round: int) -> Tensor:
        """Return this rank's values in a round, padded with zeros."""
        x = torch.zeros(self.bucket.flat.numel(), dtype=self.dtype)
        x[: self.length] = drawn(self.length, seed=100 * round + self.comm.rank)
        return x

    def fly(self, round: int, x: Tensor | None = None, **options: Tensor) -> Tensor:
        """Return the result of a flight, without padding."""
        x = self.values(round) if x is None else x
        return self.stage(x, self.state, self.comm.at(round, round), **options)[: self.length].clone()

    def results(self, rounds: range = range(ROUNDS)) -> dict[str, Tensor]:
        """Return the results of some rounds, and the state after them."""
        return {f"the result of round {round}": self.fly(round) for round in rounds} | self.remembered()

    def remembered(self) -> dict[str, Tensor]:
        """Return a copy of all tensors of the state."""
        return {f"state{name}": tensor.clone() for name, tensor in tensors_of(self.state)}

    def of_all(self, x: Tensor) -> Tensor:
        """Return the tensors of all ranks, (ranks, n)."""
        return self.comm.all_gather(x.unsqueeze(0).contiguous())


@STAGES.add("a flight returns finite values, which are equal on all ranks if it says same_on_all_ranks", RANKS, flat)
def result(stage: Stage) -> Iterator[str]:
    for dtype in (torch.float32, torch.bfloat16):
        hand = Hand(stage, dtype)
        for round in range(ROUNDS):
            y = hand.fly(round)
            of_all = hand.of_all(y)
            if y.dtype != dtype or not of_all.isfinite().all():
                yield f"that of {dtype} in round {round} is {y.dtype}, {int(y.isfinite().sum())} of {len(y)} finite"
            if stage.same_on_all_ranks and not (of_all == of_all[0]).all():
                yield f"in round {round} {int((of_all != y).any(0).sum())} of {len(y)} values differ between ranks"


@STAGES.add("the mean of the results is that of the values, with `averages`", RANKS, lambda s: flat(s) and s.averages)
def mean(stage: Stage) -> Iterator[str]:
    hand = Hand(stage)
    x = hand.values(0)
    before, lost = hand.of_all(x[: hand.length]), torch.zeros_like(x)
    lossy = any(each.lossy or each.compressors() for each in stage.whole())
    y = hand.fly(0, x, **({"residual": lost} if stage.lossy else {}))
    off = (hand.of_all(y).mean(0) - (before - hand.of_all(lost[: hand.length])).mean(0)).norm()
    most = before.norm() if lossy and not stage.lossy else 1e-5 * before.norm()
    if not off <= most:
        said = ", without what it wrote to residual," if stage.lossy else ""
        yield f"it is off by {float(off):.3g}{said} for values of the norm {float(before.norm()):.3g}"


@STAGES.add("equal values, rounds and states give equal results", RANKS, in_step)
def determinism(stage: Stage) -> Iterator[str]:
    torch.manual_seed(1)
    first = Hand(stage).results()
    torch.manual_seed(2)
    for said in differences(Hand(stage).results(), first):
        yield f"{said} when all is begun anew; keep memory in the state only, and draw by comm.key()"


@STAGES.add("the state holds all memory: a run that continues from its tensors is the same", RANKS, in_step)
def state(stage: Stage) -> Iterator[str]:
    whole, hand, again = Hand(stage), Hand(stage), Hand(stage)
    whole.results(range(2)), hand.results(range(1))
    before = dict(tensors_of(hand.state))  # some are made in the first flight
    hand.results(range(1, 2))
    if any(before[name] is not tensor for name, tensor in tensors_of(hand.state) if name in before):
        yield "it replaces a tensor of its state; write to the tensor that init made"
    again.state = _taken_up(again.state, hand.state)
    yield from differences(again.results(range(2, ROUNDS)), whole.results(range(2, ROUNDS)))


def _taken_up(own: Any, saved: Any) -> Any:
    """Return a state as it is when it is saved and loaded: tensors are copied, and other values are a new state's."""
    if isinstance(saved, Mapping):
        return {name: _taken_up(own.get(name) if own else None, value) for name, value in saved.items()}
    return saved.clone() if isinstance(saved, Tensor) else own


@STAGES.add("tensors as long as the bucket are declared in `elementwise`", RANKS, flat)
def declared(stage: Stage) -> Iterator[str]:
    hand = Hand(stage)
    for name, tensor, carry in remembered(stage, hand.state):
        if tensor.shape == hand.bucket.flat.shape and carry is None:
            yield f'state["{name}"] is not, so that it is lost when buckets or ranks change'
    yield from (f"state has no {name!r}" for name in stage.elementwise if name not in hand.state)


@STAGES.add("a value that is not finite is passed on, and never kept if it says `keeps`", RANKS, flat)
def not_finite(stage: Stage) -> Iterator[str]:
    for value in (float("nan"), float("inf")):
        hand = Hand(stage)
        hand.results(range(2))
        before, x = hand.remembered(), hand.values(2)
        if hand.comm.rank == 1:
            x[1234] = value
        y, heard = hand.fly(2, x), stage.same_on_all_ranks or hand.comm.rank == 1
        if heard and y.isfinite().all():
            yield f"all values are finite after {value} on rank 1"
        after = hand.remembered()
        if stage.keeps and stage.same_on_all_ranks:
            yield from (f"{said} after {value} on rank 1" for said in differences(after, before))
        elif stage.keeps and not all(each.isfinite().all() for each in after.values()):
            yield f"the state is not finite after {value} on rank 1"


@STAGES.add("the host never waits for a GPU after the first flight", applies=in_step)
def host_sync(stage: Stage) -> Iterator[str]:
    def fly(state: Any, round: int) -> None:
        call_stage(stage, bucket.flat.clone(), state, Two().at(round, round))

    with torch.no_grad():
        with Blind(copies=False):  # what is made once may be copied
            params = [nn.Parameter(torch.empty(shape, dtype=torch.float32, device="cuda")) for shape in SHAPES]
            bucket = Bucket(params, stage.multiple_of(Two()))
            made = stage.init(bucket, Two())
            fly(made, 0)
        with Blind():
            fly(made, 1)
            fly(made, 2)
    yield from ()
