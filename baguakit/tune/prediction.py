"""How long a step of training takes under an algorithm, in buckets of one size, over so many flows.

With f, b and o the seconds of forward, backward and the optimizer alone, in the steady state of the algorithm, where
its warm-up is over:

    during_backward     flight i sets out once backward has made its gradients, at f + r_i, and lands by f + b
    between_steps       all set out at 0, and land by f + b
    after_step          Σ T_i after the step, nothing beside them
    after_step(delay=d) set out after a step, and have d steps to land
    free_running        one flight after another, which nobody waits for

Rules share a lane: what overlaps with f + b is one sequence of flights (see `overlap`), and a step takes what that
takes, and o, and what the weights' copies into buckets and back take. What happens only in every k-th step counts by
1/k.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from ..arguments import check_fields, checked, whole
from ..buckets import local, split
from ..rules import Algorithm, Rule, rules_of
from .compute import Compute
from .costs import Cost, Load, Place, cost
from .network import Network
from .overlap import overlapped

LOADED, KEPT = 2, 6  # passes over a bucket of weights in and out of it; the same where what moved meanwhile is kept


@dataclass(frozen=True)
class Prediction:
    """A way to train, and what it is expected to take.

    Attributes:
        algorithm, bucket_bytes, flows: what to hand to `bk.attach` and `bk.Comm(flows=…)`.
        buckets: how many there are.
        seconds: of a step.
        exposed: seconds of it beyond what the model computes.
        sent: bytes that a rank sends for a step.
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


@dataclass(frozen=True, eq=False)
class Flown:
    """A rule in the air: of each bucket the parameters, what the flight costs, and how large it is."""

    rule: Rule
    cut: tuple[tuple[Tensor, ...], ...]
    costs: tuple[Cost, ...]
    size: int

    @property
    def total(self) -> Cost:
        """All flights, one after another."""
        return sum(self.costs, Cost())


@checked
def predict(
    algorithm: Algorithm,
    model: nn.Module,
    network: Network,
    compute: Compute,
    bucket_bytes: int = 25 << 20,
    flows: int = 1,
) -> Prediction:
    """Return the time of a training step.

    Args:
        algorithm: what would be attached.
        model: whose trainable parameters travel; nothing is computed.
        network: what `probe` measured.
        compute: what the model takes by itself.
        bucket_bytes, flows: of `bk.attach` and `bk.Comm`.

    Raises:
        ValueError: the network has not been probed for what the algorithm uses.
        TypeError: it has a stage whose cost is not known.
    """
    whole("bucket_bytes", bucket_bytes, 1)
    whole("flows", flows, 1)
    named: dict[str, Tensor] = {name: p for name, p in model.named_parameters() if p.requires_grad}
    place = Place(network, flows=flows)
    flown = [
        fly(rule, named, bucket_bytes, place) for rule in rules_of(algorithm, name="algorithm") if rule.stop is None
    ]
    step = Step(compute, compute.gradients(list(named.values())), network.copy, network.crowding)
    seconds, buckets = step.with_all(flown), sum(len(each.cut) for each in flown)
    sent = sum(each.total.sent * flights_per_step(each, seconds) for each in flown)
    return Prediction(algorithm, bucket_bytes, flows, buckets, seconds, seconds - compute.seconds, sent)


def cut_of(rule: Rule, named: Mapping[str, Tensor], bucket_bytes: int) -> tuple[tuple[Tensor, ...], ...]:
    """The buckets of a rule, as `attach` cuts them."""
    chosen = rule.choose(named)
    return tuple(tuple(bucket) for bucket in split([p for name, p in named.items() if name in chosen], bucket_bytes))


def fly(rule: Rule, named: Mapping[str, Tensor], bucket_bytes: int, place: Place) -> Flown:
    """Return the cost of the flights of a rule."""
    cut = cut_of(rule, named, bucket_bytes)
    loads = [load_of(bucket) for bucket in cut]
    launched = Cost(place.network.launch, place.network.launch)
    copied = 1 if rule.what == "grad" else 0  # gradients are gathered into the bucket on the lane
    costs = [launched + place.copies(copied, load.size) + cost(rule.stage, load, place) for load in loads]
    return Flown(rule, cut, tuple(costs), sum(load.size for load in loads))


def load_of(params: Sequence[Tensor]) -> Load:
    """Parameters that travel together; of sharded ones, this rank's shards."""
    here = [local(p) for p in params]
    return Load(sum(p.numel() for p in here), here[0].element_size(), tuple(tuple(p.shape) for p in here))


@dataclass(frozen=True, eq=False)
class Step:
    """One step of training, into which flights are fitted.

    Attributes:
        compute: f, b and o.
        ready: r, of each parameter, in seconds since backward began.
        copy: seconds that copying a byte takes.
        kappa: κ.
    """

    compute: Compute
    ready: dict[Tensor, float]
    copy: float
    kappa: float

    def beside(self, flown: Sequence[Flown]) -> float:
        """Seconds of f + b and of what flies meanwhile, with the copies that belong to it."""
        f, b = self.compute.forward, self.compute.backward
        flights = [(0.0, each) for flight in flown if flight.rule.what == "data" for each in flight.costs]
        r = 0.0
        for flight in flown:
            if flight.rule.what == "grad":
                for params, each in zip(flight.cut, flight.costs, strict=True):
                    r = max(r, *(self.ready[p] for p in params))
                    flights.append((f + r, each))
        return overlapped(f + b, flights, self.kappa) + sum(self.copies(flight) for flight in flown)

    def copies(self, flight: Flown) -> float:
        """Seconds in which weights are copied into buckets and back."""
        kept = flight.rule.window != "after_step" or flight.rule.delay > 0
        return 0.0 if flight.rule.what == "grad" else (KEPT if kept else LOADED) * flight.size * self.copy

    def with_all(self, flown: Sequence[Flown]) -> float:
        """Seconds of a step under some rules, the mean over their periods."""
        always = [each for each in flown if each.rule.every == 1 and overlaps(each.rule)]
        base = self.beside(always) + self.compute.optimizer
        return base + sum(self.added(each, base, always) for each in flown if each not in always)

    def added(self, flight: Flown, base: float, always: Sequence[Flown]) -> float:
        """Seconds that a rule adds to a step that takes `base` without it."""
        rule, T = flight.rule, flight.total
        if rule.window == "free_running":
            return flights_per_step(flight, base) * (self.copies(flight) + self.kappa * T.busy)
        if overlaps(rule):
            more = self.beside([*always, flight]) + self.compute.optimizer - base
        elif rule.delay:
            W = rule.delay * base
            more = self.copies(flight) + overlapped(W, [(0.0, T)], self.kappa) - W
        else:
            more = self.copies(flight) + T.seconds
        return more / rule.every


def flights_per_step(flight: Flown, step: float) -> float:
    """How often a rule flies; one that runs free, as often as the network lets it, and at most once a step."""
    if flight.rule.window != "free_running":
        return 1 / flight.rule.every
    return step / (step + flight.total.seconds + flight.rule.interval) if step else 1.0


def overlaps(rule: Rule) -> bool:
    """Whether its flights share the first lane with forward and backward."""
    return rule.window in ("during_backward", "between_steps")
