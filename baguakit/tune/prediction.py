"""The predicted time of a training step under an algorithm, for a bucket size and a number of flows.

f, b and o are the seconds of forward, backward and optimizer without communication. After the algorithm's warm-up:

    during_backward     a flight is launched when backward has made its gradients, and lands by f + b;
                        with a delay of any length, all flights overlap one whole step
    between_steps       all flights are launched as the step begins, and land by f + b
    after_step          all flights run after the step, without overlap
    after_step(delay=d) flights are launched after a step, and land d steps later
    free_running        flights run one after another; training does not wait

Rules share a lane: their flights that overlap forward and backward run in one sequence. A step takes the time of this
overlap, plus o, plus the copies of weights into buckets and back. A flight in every k-th step counts 1/k.

Overlap: training computes for W seconds. Flight i is launched after r_i of these seconds. It takes T_i seconds, and the
machine's processor works for z_i seconds of the flight. Flights run in order on one lane. A flight may run for B_i of
its T_i seconds on a second lane (see `baguakit.lanes`):

    first lane          h_1     h_2  h_1     h_3  h_2   …     h_i = (T_i − B_i)/2, before B_i and after B_i
    second lane              B_1        B_2

While training and flights run, they share the processor, with the crowding κ (see `Network`). ρ is the sum of z/T over
the flights that run at that time (z/T is the processor's share of a flight):

    the flights run at the rate     s = min(1, (1 − κ/2)/ρ)       their full rate while ρ ≤ 1 − κ/2
    training runs at the rate       1 − κ ρ s

Without crowding (κ = 0) and on one lane, flight i lands at c_i = max(r_i, c_{i−1}) + T_i, and the step ends at
max(W, c_last). Equal flights on two lanes take max(Σ (T − B), Σ B), plus the part of one flight that nothing overlaps.

The effect of an algorithm on training, compared with DDP, is read from the declarations of its stages. Only training
shows whether another trajectory is as good: `measured.json` has results of a small GPT (`python -m bench.frontier`).
"""

import json
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import resources
from typing import NamedTuple

from torch import Tensor, nn

from ..arguments import Declared, Positive, checked
from ..buckets import What, split
from ..costs import Cost, Network, Place, Sizes, load_of, sizes_of
from ..rules import Algorithm, Rule
from ..schedules import BySpeed
from ..stages import ErrorFeedback, has_phases
from .probing import Compute

COUNT = 1 << 20  # values of the row that tells the bits of a value


@dataclass(frozen=True)
class Effect(Declared):
    """The effect of an algorithm on training. Print it.

    Attributes:
        averages: whether each step uses, on all ranks, the mean of the gradients of this step, up to rounding. If not,
            training takes a different trajectory: weights differ by rank, gradients are sparse, of low rank or delayed,
            or the optimizer differs.
        bits: the number of bits per value to which gradients are rounded, the fewest of all stages; None: exact mean.
        feedback: whether the rounding error is added to the gradients of the next step.
    """

    averages: bool
    bits: int | None = None
    feedback: bool = False

    @property
    def keeps_loss(self) -> bool:
        """Return whether training should reach DDP's final loss: the mean is exact, or rounded to 8 bits or more."""
        return self.averages and (self.bits is None or self.bits >= 8)

    def __str__(self) -> str:
        if not self.averages:
            return "different"
        return "as DDP" if self.bits is None else f"{self.bits}-bit" + ", feedback" * self.feedback


@checked
def effect(algorithm: Algorithm) -> Effect:
    """Return the effect of an algorithm on training, after its warm-up.

    Args:
        algorithm: a rule, or a sum of rules.

    Raises:
        TypeError: `algorithm` is neither a rule nor a sum of rules.
    """
    rules = lasting(algorithm.rules)
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
    """Return {expression of an algorithm: its steps to the final loss of DDP, divided by the steps of DDP}."""
    text = resources.files(__package__).joinpath("measured.json").read_text()
    return dict(json.loads(text)["steps"])


@dataclass(frozen=True)
class Prediction(Declared):
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

    @property
    def effect(self) -> Effect:
        """Return the effect of the algorithm on training."""
        return effect(self.algorithm)

    @property
    def to_loss(self) -> float | None:
        """Return `seconds` times the steps that a small GPT needed per step of DDP; None if that was not measured."""
        steps = measured().get(repr(self.algorithm))
        return None if steps is None else steps * self.seconds


@checked
def predict(
    algorithm: Algorithm,
    model: nn.Module,
    network: Network,
    compute: Compute,
    bucket_bytes: Positive | None = None,
    flows: Positive = 1,
) -> Prediction:
    """Return the predicted time of a training step.

    Args:
        algorithm: as given to `bk.attach`.
        model: the model. Only the shapes of its trainable parameters are used.
        network: the measurements of `probe`.
        compute: the time of a step without communication.
        bucket_bytes, flows: as given to `bk.attach` and `bk.Comm`.

    Raises:
        ValueError: the network has not been probed for a link or a compressor of the algorithm.
        TypeError: the algorithm has a stage whose cost is not known.
    """
    named: dict[str, Tensor] = {name: p for name, p in model.named_parameters() if p.requires_grad}
    place, kappa, ready = Place(network, flows=flows), network.crowding, compute.gradients(list(named.values()))
    due = {p: compute.forward + seconds for p, seconds in ready.items()}
    sizes = sizes_of([(rule, chosen_by(rule, named)) for rule in algorithm.rules], bucket_bytes)
    costs = [cost_of(rule, buckets_of(rule, named, sizes), place, due) for rule in lasting(algorithm.rules)]

    def overlapping(costs: Sequence[RuleCost]) -> float:
        """Return the seconds of a step with the flights of `costs`, which overlap forward and backward."""
        costs = sorted(costs, key=lambda each: each.rule.what == "grad")  # the order of launches on the lane
        both = overlapped(compute.forward + compute.backward, [f for each in costs for f in each.flights], kappa)
        return both + sum(each.copies for each in costs) + compute.optimizer

    def beside(each: RuleCost, W: float) -> float:
        """Return the seconds until W seconds of training and all flights of a rule are over, if both begin together."""
        return overlapped(W, [(0.0, flight) for _, flight in each.flights], kappa)

    def rate(each: RuleCost, step: float) -> float:
        """Return the exchanges of a rule per step. A free-running rule has less than one if its flights take time."""
        if each.rule.window != "free_running":
            return 1 / every_of(each.rule)
        often = step / (step + beside(each, 0.0) + each.rule.interval) if step else 1.0
        return min(often, 1 / every_of(each.rule))

    def added(each: RuleCost) -> float:
        """Return the seconds that the flights of a rule add to a step, which takes `base` seconds without them."""
        if each.rule.window == "free_running":
            return each.copies + kappa * sum(flight.busy for _, flight in each.flights)
        if overlaps(each.rule):
            return overlapping([*always, each]) - base
        W = min(each.rule.delay, every_of(each.rule)) * base
        return each.copies + beside(each, W) - W

    always = [each for each in costs if each.rule.every == 1 and overlaps(each.rule)]
    base = overlapping(always)
    often = [1 / every_of(each.rule) if each.rule.stage.one_sided else rate(each, base) for each in costs]
    seconds = base + sum(added(each) * x for each, x in zip(costs, often, strict=True) if each not in always)
    sent = sum(flight.sent * rate(each, seconds) for each in costs for _, flight in each.flights)
    buckets = sum(len(each.flights) for each in costs)
    return Prediction(algorithm, sizes["grad"].most, flows, buckets, seconds, seconds - compute.seconds, sent)


def every_of(rule: Rule) -> int:
    """Return the number of steps per exchange; raise a ValueError if a function tells when to exchange."""
    if isinstance(rule.every, BySpeed):
        return rule.every.most
    if not isinstance(rule.every, int):
        raise ValueError(f"every of {rule!r} is not a number; plan and tune with one, such as its mean")
    return rule.every


def lasting(rules: Sequence[Rule]) -> list[Rule]:
    """Return the rules that never stop. Raise a ValueError if a function tells when a rule starts or stops."""
    if told := [rule for rule in rules if callable(rule.start) or callable(rule.stop)]:
        raise ValueError(f"{told[0]!r} starts or stops by a function of the step; plan and tune with numbers")
    return [rule for rule in rules if rule.stop is None]


def overlaps(rule: Rule) -> bool:
    return rule.window in ("during_backward", "between_steps") and not rule.delay


def buckets_of(rule: Rule, named: Mapping[str, Tensor], sizes: Mapping[What, Sizes]) -> list[list[Tensor]]:
    """Return the parameters of each bucket of a rule, as `attach` makes them."""
    return split(chosen_by(rule, named), *sizes[rule.what])


def chosen_by(rule: Rule, named: Mapping[str, Tensor]) -> list[Tensor]:
    chosen = rule.choose(named)
    return [p for name, p in named.items() if name in chosen]


class RuleCost(NamedTuple):
    """The cost of the flights of a rule, and the seconds to copy weights into all buckets and back."""

    rule: Rule
    flights: list[tuple[float, Cost]]  # of each bucket the seconds of forward and backward before its launch, and cost
    copies: float


def cost_of(rule: Rule, buckets: list[list[Tensor]], place: Place, due: Mapping[Tensor, float]) -> RuleCost:
    """Return the cost of a rule's flights. The gradient of p is ready `due[p]` seconds after the start of a step."""
    gradients, flights, copied = rule.what == "grad", [], 0
    launched = Cost(place.network.launch, place.network.launch)
    for bucket in buckets:
        load = load_of(bucket)
        # Gradients are copied into the bucket on the lane, so this copy is a part of the flight.
        flight = launched + place.copies(int(gradients), load.size) + rule.stage.cost(load, place)
        if not has_phases(rule.stage):  # a stage in it flies on its lane
            flight = replace(flight, beside=0.0, beside_busy=0.0)
        flights.append((max(map(due.__getitem__, bucket)) if gradients else 0.0, flight))
        copied += load.size
    kept = rule.window != "after_step" or (rule.delay > 0 if rule.mix is None else rule.mix > 0)
    passes = 0 if gradients else 6 if kept else 2  # into a bucket and back; more if progress since the launch is kept
    return RuleCost(rule, flights, passes * copied * place.network.copy)


# The overlap of flights with training


@dataclass(eq=False)
class Phase:
    """A part of a flight. It runs for `left` seconds, after `training` seconds of training and the part `before`."""

    left: float
    rho: float
    training: float = 0.0
    before: "Phase | None" = None
    over: bool = False


def overlapped(W: float, flights: Sequence[tuple[float, Cost]], kappa: float = 0.0) -> float:
    """Return the seconds until W seconds of training and all flights are over, with the crowding `kappa`.

    `flights` has pairs (seconds of training before the launch, cost), in the order of launches.
    """
    t, x = 0.0, 0.0  # the time, and the seconds of W that are done
    lanes = lanes_of(flights, W)
    while heads := [lane[0] for lane in lanes if lane]:
        flying = [each for each in heads if each.training <= x and (each.before is None or each.before.over)]
        rho = sum(each.rho for each in flying)
        s = min(1.0, (1 - kappa / 2) / rho) if rho and x < W else 1.0
        pace = 1 - kappa * rho * s
        until = min([W, *(each.training for each in heads if each.training > x)])
        training = [(until - x) / pace] if x < W else []
        seconds = min([*(each.left / s for each in flying), *training])
        x = until if training == [seconds] else min(W, x + seconds * pace)
        t += seconds
        for each in flying:
            each.over = each.left / s <= seconds
            each.left -= seconds * s
        for lane in lanes:
            if lane and lane[0].over:
                lane.popleft()
    return t + max(0.0, W - x)


def lanes_of(flights: Sequence[tuple[float, Cost]], W: float) -> tuple[deque[Phase], deque[Phase]]:
    """Return the phases of all flights on the first lane and on the second lane, in the order in which they run."""
    lane, beside = deque[Phase](), deque[Phase]()
    last: list[Phase] = []  # the last phase of the flight before, which is not due yet
    for r, flight in flights:
        rest, busy = flight.seconds - flight.beside, flight.busy - flight.beside_busy
        rho = busy / rest if rest else 0.0
        if flight.beside:
            first = Phase(rest / 2, rho, min(r, W))
            beside.append(Phase(flight.beside, flight.beside_busy / flight.beside, before=first))
            lane += [first, *last]
            last = [Phase(rest / 2, rho, before=beside[-1])]
        else:
            lane += [*last, Phase(rest, rho, min(r, W))]
            last = []
    lane += last
    return lane, beside
