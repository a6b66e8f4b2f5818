"""One rule on its buckets: loads them, launches them, lands them."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..buckets import Bucket, local
from ..comm import Comm
from ..kernels.mixing.operators import land_
from ..lanes import Flight, Lane
from ..primitives import mean_
from ..rules import Rule
from ..stages import Stage, State, flown
from ..topology.chosen import as_chosen, chooses
from .errands import together
from .monitor import Monitor
from .padding import clear_padding_
from .seeing.compression import Losses

RECORDED = 100  # flights of a bucket, and steps, of which records are kept


@dataclass(frozen=True, eq=False)
class Track:
    """A lane and the groups that only its work uses."""

    number: int
    lane: Lane
    comm: Comm


@dataclass(eq=False)
class Trip:
    """One flight of one bucket."""

    route: "Route"
    bucket: int
    round: int
    step: int | None
    launched: float
    flight: Flight
    before: Tensor | None = None  # the weights as they were launched

    def __str__(self) -> str:
        return f"{self.route.label}, bucket {self.bucket}, round {self.round}"


@dataclass(eq=False)
class Route:
    """A rule, its buckets, what its stage remembers of each, and the flights in the air."""

    index: int
    rule: Rule
    buckets: list[Bucket]
    track: Track
    monitor: Monitor
    label: str = ""  # the rule in words
    carries: str = ""  # its stages in few words, for profilers and pictures
    round: int = 0
    states: list[State] = field(default_factory=list)
    air: dict[int, Trip] = field(default_factory=dict)  # by bucket
    records: list[deque[Trip]] = field(default_factory=list)
    sent: list[dict[str, float]] = field(default_factory=list)  # bytes by part of the network
    launches: list[int] = field(default_factory=list)
    to_average: list[Tensor] = field(default_factory=list)  # of a checkpoint from another number of ranks
    losses: Losses | None = None  # of compression, where somebody has asked for them
    flying: Stage | None = None  # the stage in this round
    guards: bool = False  # whether the stage changes what it remembers by `keep_` only
    chosen: bool = False  # whether its weights may be others in each round

    def __post_init__(self) -> None:
        self.label, self.carries = repr(self.rule), outline(self.rule.stage)
        self.guards, self.chosen = self.rule.stage.guards(), chooses(self.rule.stage)
        self.sent = [{} for _ in self.buckets]
        self.launches = [0] * len(self.buckets)
        self.records = [deque(maxlen=RECORDED) for _ in self.buckets]

    def make_states(self) -> None:
        """Make the state before the first flight, from the weights as they are. Collective."""
        together(f"the state of {self.label}", lambda comm: self._init_states(), self.track, self.monitor)

    def _init_states(self) -> None:
        self.states = []
        for i, bucket in enumerate(self.buckets):
            if self.rule.what == "data":
                bucket.load("data")
            self.states.append(self.rule.stage.init(bucket, self.track.comm.stand(0, None, self.number(i), {})))

    def number(self, bucket: int) -> int:
        """A number that no other bucket of the attachment has."""
        return self.index << 16 | bucket

    def name(self, bucket: int) -> str:
        """The flights of a bucket in few words: CompressedMean, bucket 3."""
        which = f" of rule {self.index}" if self.index else ""
        return f"{self.carries}{which}, bucket {bucket}"

    def stage(self, i: int) -> Stage:
        """Return the stage of bucket `i` now: the rule's, with the weights that were chosen when the first bucket was
        launched, or one that tells what compression loses.
        """
        if i == 0 or self.flying is None:
            self.flying = as_chosen(self.rule.stage) if self.chosen else self.rule.stage
        return self.flying if self.losses is None else self.losses.watched(i, self.flying)

    def launch(
        self,
        i: int,
        step: int | None,
        work: Callable[[Tensor, Comm], Tensor] | None = None,
        before: Tensor | None = None,
    ) -> Trip:
        """Put bucket `i` on the lane; `work` is what happens to it, the stage by default."""
        state, bucket, name = self.states[i], self.buckets[i], self.name(i)
        comm = self.track.comm.stand(self.round, step, self.number(i), self.sent[i])
        self.monitor.check()
        if self.to_average:
            averaged, self.to_average = self.to_average, []
            self.track.lane.run(lambda: mean_(averaged, comm))
        stage = self.stage(i) if work is None else self.rule.stage

        def fly() -> Any:
            clear_padding_(stage, state, bucket, comm)
            return flown(stage, bucket.flat, state, comm) if work is None else work(bucket.flat, comm)

        flight = self.track.lane.run(fly, name)
        trip = Trip(self, i, self.round, step, time.time(), flight, before)
        self.air[i] = trip
        self.launches[i] += 1
        if self.track.comm.size > 1:
            self.records[i].append(trip)
        self.monitor.launched(self.track.number, trip)
        return trip

    def arrive(self, i: int) -> Any:
        """Wait for the flight of bucket `i` and return its result, or raise what kept it from arriving."""
        trip = self.air.pop(i)
        try:
            return trip.flight.result()
        except Exception as error:
            self.monitor.reraise(error, trip)
        finally:
            self.monitor.landed(trip)
            trip.before = None  # a report keeps the trip
            trip.flight.forget()
            if self.losses is not None:
                self.losses.landed(i)

    def drop(self) -> None:
        """Wait for every flight in the air, and forget what it brings."""
        for i in sorted(self.air):
            self.arrive(i)

    def params(self) -> list[Tensor]:
        """The parameters of all buckets."""
        return [p for bucket in self.buckets for p in bucket.params]


def outline(stage: Stage) -> str:
    """The names of a stage and of those in it: ErrorFeedback(SparseMean)."""
    inner = ", ".join(map(outline, stage.nested().values()))
    return type(stage).__name__ + (f"({inner})" if inner else "")


def through(stage: Stage, x: Tensor, state: State, comm: Comm, scale: Tensor | None) -> Tensor:
    """One flight of the gradients `x`, in place; the stage sees them without the loss scale, if there is one."""
    if scale is not None:
        x.mul_(scale.reciprocal())
    result = flown(stage, x, state, comm)
    if result is not x:
        x.copy_(result)
    return x if scale is None else x.mul_(scale)


class WeightRoute(Route):
    """A rule on weights. All its buckets are launched together, and landed together."""

    def launch_all(self, step: int | None, keep: bool, factor: float = 1.0) -> None:
        """Launch every bucket with the weights as they are, times `factor`.

        With `keep` a copy is kept, and only what the flight changed will be added at landing.
        """
        for i, bucket in enumerate(self.buckets):
            flat = bucket.load("data")
            before = flat.clone() if keep else None
            if factor != 1:
                flat.mul_(factor) if factor else flat.zero_()  # 0 · inf would not be 0
            self.launch(i, step, before=before)
        self.round += 1

    def land_all(self) -> None:
        """Wait for every bucket and bring it into the weights."""
        for i, bucket in enumerate(self.buckets):
            before = self.air[i].before
            result = self.arrive(i)
            if before is not None:
                result = landed(bucket.now(), result, before)
            if result is not bucket.flat:
                bucket.flat.copy_(result)
            bucket.store("data")

    def arrived(self) -> bool:
        """Whether every flight in the air is done."""
        return all(trip.flight.done() for trip in self.air.values())


@torch.no_grad()
def landed(x: Tensor, result: Tensor, before: Tensor) -> Tensor:
    """x ← result where `x` has not moved since `before`, else x + (result − before): what moved it meanwhile is kept.

    Decided value by value on the device: a version counter would not see writes through `p.data`. Returns `x`.
    """
    land_(x, result, before)
    return x


def buckets_of(cut: Sequence[Sequence[Tensor]], rule: Rule, comm: Comm) -> list[Bucket]:
    """The buckets of a rule, padded as its stage likes them."""
    return [Bucket(params, roomy(rule.stage.multiple_of(comm), params)) for params in cut]


def roomy(multiple: int, params: Sequence[Tensor]) -> int:
    """`multiple`, if it is one, doubled up to 128 times, as long as that is less than a hundredth of the bucket.

    Shards of the bucket are then whole blocks of a compressor.
    """
    values, times = sum(local(p).numel() for p in params), 1
    while multiple > 1 and times < 128 and 200 * times * multiple < values:
        times *= 2
    return times * multiple
