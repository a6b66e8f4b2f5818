"""The predicted time of a training step under an algorithm, for a bucket size and a number of flows.

With f, b and o the seconds of forward, backward and the optimizer alone, in the steady state of the algorithm, after
its warm-up:

    during_backward     flight i is launched when backward has made its gradients, at f + r_i, and lands by f + b;
                        with a delay all flights overlap one whole step, whatever the delay
    between_steps       all are launched at 0 and land by f + b
    after_step          all after the step, without overlap of it
    after_step(delay=d) launched after a step, with d steps to land
    free_running        one flight after another; training does not wait

Rules share a lane: the flights that overlap f + b are one sequence (see `overlapped`); what `Hierarchical` sends
between nodes overlaps what other flights send within them. A step takes the seconds of that sequence, o, and the copies
of weights into buckets and back. A flight in every k-th step counts by 1/k.

The effect of an algorithm on training, beside DDP, is read from what its stages declare. Only training can tell
whether a different trajectory is as good. `measured.json` has results of training a small GPT (`python -m
bench.frontier`): the number of steps to the final loss of DDP, as a multiple of DDP's number of steps.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import resources

from torch import Tensor, nn

from ..arguments import check_fields, checked, integer
from ..buckets import local, real, split
from ..costs import Cost, Load, Network, Place, overlapped
from ..rules import Algorithm, Rule, rules_of
from ..stages import ErrorFeedback, cost
from ..stages.base import has_phases
from .compute import Compute

LOADED, KEPT = 2, 6  # passes to copy weights into a bucket and back; KEPT if progress since the launch is kept


LOSSLESS = 8  # bits: training with gradients of 8 bits or more ends with DDP's loss
COUNT = 1 << 20  # values of the row that tells the bits of a value
DIFFERENT = "different trajectory"


@dataclass(frozen=True)
class Effect:
    """The effect of an algorithm on training. Print it.

    Attributes:
        averages: in each step all ranks use the mean of the gradients of that step, up to rounding. Otherwise training
            takes a different trajectory: weights differ by rank, or gradients are sparse, of low rank or late, or the
            optimizer differs.
        bits: the fewest bits a value to which gradients are rounded; None for an exact mean.
        feedback: the rounding error is added to the gradients of the next step.
    """

    averages: bool
    bits: int | None = None
    feedback: bool = False

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def keeps_loss(self) -> bool:
        """Return whether training ends with DDP's loss without a trial: an exact mean, or one of 8 bits or more."""
        return self.averages and (self.bits is None or self.bits >= LOSSLESS)

    @property
    def short(self) -> str:
        """Return the effect in a word or two, for a table."""
        if not self.averages:
            return "different"
        return "as DDP" if self.bits is None else f"{self.bits}-bit" + ", feedback" * self.feedback

    def __str__(self) -> str:
        if not self.averages:
            return DIFFERENT
        if self.bits is None:
            return "same as DDP"
        return f"same up to {self.bits}-bit rounding" + " with error feedback" * self.feedback


@checked
def effect(algorithm: Algorithm) -> Effect:
    """Return the effect of an algorithm on training, after its warm-up.

    Args:
        algorithm: a rule, or a tuple of rules.

    Raises:
        TypeError: it is neither.
    """
    rules = lasting(algorithm)
    stages = [stage for rule in rules for stage in rule.stage.whole()]
    in_time = all(rule.window == "during_backward" and not rule.delay for rule in rules)
    plain = all(stage.averages and stage.same_on_all_ranks and not stage.needs_shapes for stage in stages)
    compressors = [compressor for stage in stages for compressor in stage.compressors()]
    if not (in_time and plain and all(compressor.dense for compressor in compressors)):
        return Effect(False)
    bits = min((compressor.row_bytes(COUNT) * 8 // COUNT for compressor in compressors), default=None)
    return Effect(True, bits, any(isinstance(stage, ErrorFeedback) for stage in stages))


@lru_cache(maxsize=1)
def measured() -> dict[str, float]:
    """Return steps to DDP's last loss as a multiple of DDP's, by the expression of the algorithm."""
    text = resources.files(__package__).joinpath("measured.json").read_text()
    found: dict[str, float] = json.loads(text)["steps"]
    return found


def steps_beside_ddp(algorithm: Algorithm) -> float | None:
    """Return the number of steps that an algorithm took to DDP's loss, divided by DDP's; None if not measured."""
    return measured().get(", ".join(map(repr, rules_of(algorithm))))


@dataclass(frozen=True)
class Prediction:
    """The predicted time of a step for an algorithm, a bucket size and a number of flows.

    Attributes:
        algorithm, bucket_bytes, flows: the arguments for `bk.attach` and `bk.Comm(flows=…)`.
        buckets: the number of buckets.
        seconds: the time of a step.
        exposed: exposed communication, the seconds beyond the computation.
        sent: bytes that a rank sends in a step.
    """

    algorithm: Algorithm
    bucket_bytes: int
    flows: int
    buckets: int
    seconds: float
    exposed: float
    sent: float

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def effect(self) -> Effect:
        """Return the effect of the algorithm on training."""
        return effect(self.algorithm)

    @property
    def to_loss(self) -> float | None:
        """Return the seconds that bring training as far as a step of DDP.

        This is `seconds` times `steps_beside_ddp`, which was measured with a small GPT; None if it was not measured.
        """
        steps = steps_beside_ddp(self.algorithm)
        return None if steps is None else steps * self.seconds


@dataclass(frozen=True, eq=False)
class RuleCost:
    """The cost of the flights of a rule.

    Attributes:
        rule: the rule.
        flights: of each bucket the seconds from the start of forward to the launch in an overlapping window, and the
            cost.
        copies: seconds in which weights are copied into all buckets and back.
    """

    rule: Rule
    flights: tuple[tuple[float, Cost], ...]
    copies: float

    @property
    def total(self) -> Cost:
        """Return the cost of all flights, one after another."""
        return sum((flight for _, flight in self.flights), Cost())

    def beside(self, W: float, kappa: float = 0.0) -> float:
        """Return the seconds until W seconds of training and all flights, launched together, are over."""
        return overlapped(W, [(0.0, flight) for _, flight in self.flights], kappa)


@checked
def predict(
    algorithm: Algorithm,
    model: nn.Module,
    network: Network,
    compute: Compute,
    bucket_bytes: int = 25 << 20,
    flows: int = 1,
) -> Prediction:
    """Return the predicted time of a training step.

    Args:
        algorithm: as given to `bk.attach`.
        model: the model. Only the shapes of its trainable parameters are used.
        network: the measurements of `probe`.
        compute: the time of a step without communication.
        bucket_bytes, flows: of `bk.attach` and `bk.Comm`.

    Raises:
        ValueError: the network has not been probed for a link or a compressor of the algorithm.
        TypeError: the algorithm has a stage whose cost is not known.
    """
    integer("bucket_bytes", bucket_bytes, 1)
    integer("flows", flows, 1)
    named: dict[str, Tensor] = {name: p for name, p in model.named_parameters() if p.requires_grad}
    place = Place(network, flows=flows)
    ready = compute.gradients(list(named.values()))
    costs = [cost_of(rule, named, bucket_bytes, place, compute, ready) for rule in lasting(algorithm)]
    step = StepModel(compute, network.crowding)
    seconds, buckets = step.with_all(costs), sum(len(each.flights) for each in costs)
    sent = sum(each.total.sent * flights_per_step(each, seconds) for each in costs)
    return Prediction(algorithm, bucket_bytes, flows, buckets, seconds, seconds - compute.seconds, sent)


def every_of(rule: Rule) -> int:
    """Return the number of steps per exchange; raise if a function tells it."""
    if not isinstance(rule.every, int):
        raise ValueError(f"every of {rule!r} is not a number; plan and tune with one, such as its mean")
    return rule.every


def lasting(algorithm: Algorithm) -> list[Rule]:
    """Return the rules that never stop; raise if functions tell when rules start or stop."""
    rules = rules_of(algorithm, name="algorithm")
    if told := [rule for rule in rules if callable(rule.start) or callable(rule.stop)]:
        raise ValueError(f"{told[0]!r} starts or stops by a function of the step; plan and tune with numbers")
    return [rule for rule in rules if rule.stop is None]


def buckets_of(rule: Rule, named: Mapping[str, Tensor], bucket_bytes: int) -> tuple[tuple[Tensor, ...], ...]:
    """Return the parameters of each bucket of a rule, as `attach` makes them."""
    chosen = rule.choose(named)
    return tuple(tuple(bucket) for bucket in split([p for name, p in named.items() if name in chosen], bucket_bytes))


def cost_of(
    rule: Rule,
    named: Mapping[str, Tensor],
    bucket_bytes: int,
    place: Place,
    compute: Compute,
    ready: Mapping[Tensor, float],
) -> RuleCost:
    """Return the cost of the flights of a rule."""
    buckets = buckets_of(rule, named, bucket_bytes)
    loads = [load_of(bucket) for bucket in buckets]
    gradients = rule.what == "grad"
    launched = Cost(place.network.launch, place.network.launch)
    gathered = 1 if gradients else 0  # into the bucket, on the lane
    flights = [launched + place.copies(gathered, load.size) + cost(rule.stage, load, place) for load in loads]
    if not has_phases(rule.stage):  # a stage in it flies on its lane
        flights = [replace(flight, beside=0.0, beside_busy=0.0) for flight in flights]
    times = [compute.forward + max(map(ready.__getitem__, bucket)) if gradients else 0.0 for bucket in buckets]
    kept = rule.window != "after_step" or (rule.delay > 0 if rule.mix is None else rule.mix > 0)
    passes = 0 if gradients else KEPT if kept else LOADED
    copies = passes * sum(load.size for load in loads) * place.network.copy
    return RuleCost(rule, tuple(zip(times, flights, strict=True)), copies)


def load_of(params: Sequence[Tensor]) -> Load:
    """Return the load of a bucket; of sharded parameters, this rank's shards."""
    here = [real(local(p)) for p in params]
    return Load(sum(p.numel() for p in here), here[0].element_size(), tuple(tuple(p.shape) for p in here))


@dataclass(frozen=True, eq=False)
class StepModel:
    """The model of a training step and the flights of its rules: `compute` has f, b and o; `kappa` is κ."""

    compute: Compute
    kappa: float

    def overlapping(self, costs: Sequence[RuleCost]) -> float:
        """Return the seconds of forward and backward with the flights that overlap them, plus copies of weights."""
        first = sorted(costs, key=lambda each: each.rule.what == "grad")  # the order of launches on the lane
        flights = [flight for each in first for flight in each.flights]
        both = self.compute.forward + self.compute.backward
        return overlapped(both, flights, self.kappa) + sum(each.copies for each in costs)

    def with_all(self, costs: Sequence[RuleCost]) -> float:
        """Return the seconds of a step under some rules, the mean over their periods."""
        always = [each for each in costs if each.rule.every == 1 and overlaps(each.rule)]
        base = self.overlapping(always) + self.compute.optimizer
        return base + sum(self.added(each, base, always) for each in costs if each not in always)

    def added(self, each: RuleCost, base: float, always: Sequence[RuleCost]) -> float:
        """Return the seconds that a rule adds to a step that takes `base` without it."""
        rule = each.rule
        if rule.window == "free_running":
            return flights_per_step(each, base) * (each.copies + self.kappa * each.total.busy)
        if overlaps(rule):
            more = self.overlapping([*always, each]) + self.compute.optimizer - base
        elif rule.delay:
            W = min(rule.delay, every_of(rule)) * base
            more = each.copies + each.beside(W, self.kappa) - W
        else:
            more = each.copies + each.beside(0.0)
        return more / every_of(rule)


def flights_per_step(each: RuleCost, step: float) -> float:
    """Return the flights per step of a rule: for a free-running rule at most one, limited by the network."""
    if each.rule.window != "free_running":
        return 1 / every_of(each.rule)
    return step / (step + each.beside(0.0) + each.rule.interval) if step else 1.0


def overlaps(rule: Rule) -> bool:
    """Return whether the flights of a rule overlap forward and backward, on the first lane."""
    return rule.window in ("during_backward", "between_steps") and not rule.delay
