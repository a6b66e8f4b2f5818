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
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn

from ..arguments import check_fields, checked, integer
from ..buckets import local, real, split
from ..costs import Cost, Load, Network, Place
from ..costs.overlap import overlapped
from ..rules import Algorithm, Rule, rules_of
from ..stages import cost
from ..stages.base import has_phases
from .compute import Compute
from .effects import Effect, effect, steps_beside_ddp

LOADED, KEPT = 2, 6  # passes to copy weights into a bucket and back; and those if progress meanwhile is kept or mixed


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
        """Return what the algorithm does to training."""
        return effect(self.algorithm)

    @property
    def to_loss(self) -> float | None:
        """Return the seconds that bring training as far as a step of DDP.

        That is `seconds` times the steps to DDP's loss for each of DDP's, as measured with a small GPT; None where it
        was not measured.
        """
        steps = steps_beside_ddp(self.algorithm)
        return None if steps is None else steps * self.seconds


@dataclass(frozen=True, eq=False)
class RuleCost:
    """The cost of the flights of a rule.

    Attributes:
        rule: the rule.
        buckets: the parameters of each bucket.
        flights: the cost of the flight of each bucket.
        size: bytes of all buckets.
    """

    rule: Rule
    buckets: tuple[tuple[Tensor, ...], ...]
    flights: tuple[Cost, ...]
    size: int

    @property
    def total(self) -> Cost:
        """Return the cost of all flights, one after another."""
        return sum(self.flights, Cost())

    def beside(self, W: float, kappa: float = 0.0) -> float:
        """Return the seconds until W seconds of training and all flights, launched together, are over."""
        return overlapped(W, [(0.0, flight) for flight in self.flights], kappa)


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
        model: the model, of which only the shapes of trainable parameters are used.
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
    costs = [
        cost_of(rule, named, bucket_bytes, place) for rule in rules_of(algorithm, name="algorithm") if rule.stop is None
    ]
    step = StepModel(compute, compute.gradients(list(named.values())), network.copy, network.crowding)
    seconds, buckets = step.with_all(costs), sum(len(each.buckets) for each in costs)
    sent = sum(each.total.sent * flights_per_step(each, seconds) for each in costs)
    return Prediction(algorithm, bucket_bytes, flows, buckets, seconds, seconds - compute.seconds, sent)


def every_of(rule: Rule) -> int:
    """Return the number of steps per exchange; raise if a function tells it."""
    if callable(rule.every):
        raise ValueError(f"every of {rule!r} is a function of the step; plan and tune with a number, such as its mean")
    return rule.every


def buckets_of(rule: Rule, named: Mapping[str, Tensor], bucket_bytes: int) -> tuple[tuple[Tensor, ...], ...]:
    """Return the parameters of each bucket of a rule, as `attach` makes them."""
    chosen = rule.choose(named)
    return tuple(tuple(bucket) for bucket in split([p for name, p in named.items() if name in chosen], bucket_bytes))


def cost_of(rule: Rule, named: Mapping[str, Tensor], bucket_bytes: int, place: Place) -> RuleCost:
    """Return the cost of the flights of a rule."""
    buckets = buckets_of(rule, named, bucket_bytes)
    loads = [load_of(bucket) for bucket in buckets]
    launched = Cost(place.network.launch, place.network.launch)
    copied = 1 if rule.what == "grad" else 0  # gradients are gathered into the bucket on the lane
    flights = [launched + place.copies(copied, load.size) + cost(rule.stage, load, place) for load in loads]
    if not has_phases(rule.stage):  # a stage in it flies on its lane
        flights = [replace(flight, beside=0.0, beside_busy=0.0) for flight in flights]
    return RuleCost(rule, buckets, tuple(flights), sum(load.size for load in loads))


def load_of(params: Sequence[Tensor]) -> Load:
    """Return the load of a bucket; of sharded parameters, this rank's shards."""
    here = [real(local(p)) for p in params]
    return Load(sum(p.numel() for p in here), here[0].element_size(), tuple(tuple(p.shape) for p in here))


@dataclass(frozen=True, eq=False)
class StepModel:
    """The model of a training step and the flights of its rules.

    Attributes:
        compute: f, b and o.
        ready: r, of each parameter, in seconds since backward began.
        copy: seconds to copy a byte.
        kappa: κ.
    """

    compute: Compute
    ready: dict[Tensor, float]
    copy: float
    kappa: float

    def overlapping(self, costs: Sequence[RuleCost]) -> float:
        """Return the seconds of f + b, of the flights that overlap them, and of the copies of these."""
        f, b = self.compute.forward, self.compute.backward
        flights = [(0.0, flight) for each in costs if each.rule.what == "data" for flight in each.flights]
        r = 0.0
        for each in costs:
            if each.rule.what == "grad":
                for params, flight in zip(each.buckets, each.flights, strict=True):
                    r = max(r, *(self.ready[p] for p in params))
                    flights.append((f + r, flight))
        return overlapped(f + b, flights, self.kappa) + sum(map(self.copies, costs))

    def copies(self, each: RuleCost) -> float:
        """Return the seconds in which weights are copied into buckets and back."""
        rule = each.rule
        kept = rule.window != "after_step" or (rule.delay > 0 if rule.mix is None else rule.mix > 0)
        return 0.0 if each.rule.what == "grad" else (KEPT if kept else LOADED) * each.size * self.copy

    def with_all(self, costs: Sequence[RuleCost]) -> float:
        """Return the seconds of a step under some rules, the mean over their periods."""
        always = [each for each in costs if each.rule.every == 1 and overlaps(each.rule)]
        base = self.overlapping(always) + self.compute.optimizer
        return base + sum(self.added(each, base, always) for each in costs if each not in always)

    def added(self, each: RuleCost, base: float, always: Sequence[RuleCost]) -> float:
        """Return the seconds that a rule adds to a step that takes `base` without it."""
        rule = each.rule
        if rule.window == "free_running":
            return flights_per_step(each, base) * (self.copies(each) + self.kappa * each.total.busy)
        if overlaps(rule):
            more = self.overlapping([*always, each]) + self.compute.optimizer - base
        elif rule.delay:
            W = min(rule.delay, every_of(rule)) * base
            more = self.copies(each) + each.beside(W, self.kappa) - W
        else:
            more = self.copies(each) + each.beside(0.0)
        return more / every_of(rule)


def flights_per_step(each: RuleCost, step: float) -> float:
    """Return the flights per step of a rule; free running, as many as the network allows, at most one."""
    if each.rule.window != "free_running":
        return 1 / every_of(each.rule)
    return step / (step + each.beside(0.0) + each.rule.interval) if step else 1.0


def overlaps(rule: Rule) -> bool:
    """Return whether the flights of a rule overlap forward and backward, on the first lane."""
    return rule.window in ("during_backward", "between_steps") and not rule.delay
