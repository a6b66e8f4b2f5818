"""Rules: a stage in a window of the training step. docs/algorithms.md draws the windows.

Steps are optimizer steps since the attachment was made, counted from 0. A rule acts in the steps s with
start ≤ s < stop. With `every=k` it exchanges in every k-th of these steps, first in step start + k − 1 or, with an
`offset=o` above 0, in step start + o − 1. With a function `every=H`, a round that begins in step s has H(s) steps; the
rule exchanges in the last step of each round. An object with `due(step, comm)` is asked in each step whether to
exchange. A function as `start` or `stop` stands for the first step for which it returns True.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from inspect import signature
from math import inf
from typing import Annotated, Any, Literal, cast

from torch import Tensor

from .arguments import Decay, Natural, Positive, Range, check_fields, checked, integer, message, truth
from .comm import Comm
from .expressions import written
from .schedules import Bound, BySpeed, Every, Fragment, Interval, Where
from .stages import Hierarchical, Stage

Window = Literal["during_backward", "between_steps", "after_step", "free_running"]


class Algorithm:
    """One rule, or a sum of rules: `attach` takes it, and every function of `bk.algorithms` returns it.

    `first + second` has the rules of both, in this order. The `repr` of an algorithm is this sum.
    """

    @property
    def rules(self) -> tuple["Rule", ...]:
        """Return the rules, in order."""
        raise NotImplementedError

    def __add__(self, other: "Algorithm") -> "Algorithm":
        return Sum((*self.rules, *other.rules)) if isinstance(other, Algorithm) else NotImplemented


@dataclass(frozen=True)
class Sum(Algorithm):
    """Several rules that work in one attachment."""

    parts: tuple["Rule", ...]

    @property
    def rules(self) -> tuple["Rule", ...]:
        return self.parts

    def __repr__(self) -> str:
        return " + ".join(map(repr, self.parts))


@dataclass(frozen=True)
class Rule(Algorithm):
    """A stage, its window in the training step, and the steps and parameters that it acts on.

    `during_backward`, `between_steps`, `after_step` and `free_running` make rules.

    Args:
        window: the name of one of these four functions.
        stage: the exchange.
        every, delay, offset, mix, interval, start, stop, where, quorum, grace: as in that function; same errors.
    """

    window: Window
    stage: Stage
    every: Every = 1
    delay: Natural = 0
    offset: Natural = 0
    mix: Decay | None = None
    interval: Annotated[float, Range(0)] = 0.0
    start: Bound = 0
    stop: Bound | None = None
    where: Where | None = None
    quorum: Positive | None = None
    grace: Annotated[float, Range(0)] | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("mix", "grace"):  # 0 and 0.0 are the same rule, also where ranks compare what is written
            if getattr(self, name) is not None:
                object.__setattr__(self, name, float(getattr(self, name)))
        free = self.window == "free_running"
        if not (self.quorum is self.grace is None or (free and self.stage.anchored)):
            raise ValueError(f"quorum={self.quorum} and grace={self.grace} are for free_running(OuterStep(…))")
        average = self.stage.nested()["inner"] if self.stage.anchored else self.stage
        if free and not self.stage.one_sided and (not average.same_on_all_ranks or average.remembers()):
            raise ValueError(
                "the stage of free_running is an average with an equal result on all ranks and without state, "
                f"such as Mean(), or OuterStep around one, not {self.stage!r}"
            )
        for each in self.stage.whole():
            if each.one_sided and (each is not self.stage or not free or self.interval or type(self.every) is BySpeed):
                raise ValueError(f"{each!r} is for free_running alone, with a number, a function or an object as every")
        if isinstance(self.every, BySpeed) and not free:
            raise ValueError(f"{self.every!r} gives each rank its own number of steps; use it in free_running")
        if isinstance(self.start, int) and isinstance(self.stop, int) and self.stop <= self.start:
            raise ValueError(f"a rule with start={self.start} and stop={self.stop} never acts; stop must be greater")
        if self.mix is not None and self.window != "after_step":
            raise ValueError(f"mix={self.mix} is for after_step; {self.window} keeps the progress made in flight")
        if not callable(self.every) and not self.decides:
            if not isinstance(self.every, int):
                wanted = "a whole number, a function of the step, or an object with due(step, comm)"
                raise TypeError(message("every", wanted, self.every))
            self._check_length("every", self.every)
        elif self.offset:
            raise ValueError(f"offset={self.offset} needs a number as every: rules must know the lengths of all rounds")

    def _check_length(self, name: str, length: int) -> None:
        """Raise unless `length` is a possible number of steps of a round."""
        integer(name, length, 1)
        if self.offset >= length:
            raise ValueError(f"offset={self.offset} must be less than {name}={length}")
        if self.what == "data" and self.delay > length:
            raise ValueError(f"delay={self.delay} must be at most {name}={length}: an exchange lands before the next")
        if self.mix is not None and self.delay == length:
            raise ValueError(
                f"with mix={self.mix} a landing gives up {1 - self.mix:.3g} of the progress made in flight, and with "
                f"delay={self.delay} equal to {name}={length} that is all progress; delay must be less, or mix None"
            )

    @property
    def rules(self) -> tuple["Rule", ...]:
        return (self,)

    @property
    def what(self) -> Literal["grad", "data"]:
        """Return "grad" if the rule acts on gradients, "data" if it acts on weights."""
        return "grad" if self.window == "during_backward" else "data"

    @property
    def decides(self) -> bool:
        """Return True if an object with `due(step, comm)`, or `BySpeed`, decides during training when to exchange."""
        return isinstance(self.every, BySpeed) or (not isinstance(self.every, type) and hasattr(self.every, "due"))

    def acts(self, step: int) -> bool:
        """Return whether the rule acts in this step."""
        return self.begun(step) and (self.stop is None or not self._has_come("stop", self.stop, step))

    def begun(self, step: int) -> bool:
        """Return whether the rule has started in this step or before."""
        return self._has_come("start", self.start, step)

    def _has_come(self, name: Literal["start", "stop"], bound: Bound, step: int) -> bool:
        if type(step) is not int:
            step = integer("step", step)
        if isinstance(bound, int):
            return bound <= step
        asked, first = self._known.get(name, (0, inf))
        while asked <= step and first == inf:
            if truth(f"{name}({asked})", bound(asked)):
                first = asked
            asked += 1
        self._known[name] = asked, first
        return bool(first <= step)

    def exchanges(self, step: int) -> bool:
        """Return whether the rule exchanges in this step; raise a ValueError if `due` decides during training."""
        if self.decides:
            raise ValueError(f"{self!r} decides during training when it exchanges; no step is known before")
        if not self.acts(step):
            return False
        start = self.start if isinstance(self.start, int) else self._known["start"][1]
        if type(self.every) is int:
            return bool((step - start + 1) % self.every == self.offset)
        return self._end_of_round(start, step) == step

    def _is_due(self, step: int, comm: Comm) -> bool:
        """Return whether the rule acts in this step and `every.due` returns True. Call it only if `decides` is True."""
        every = cast(Interval, self.every)
        return self.acts(step) and truth(f"{type(every).__name__}.due({step}, comm)", every.due(step, comm))

    def schedule(self) -> list[str]:
        """Return lines about the steps that the functions `every`, `start` and `stop` give. Ranks compare the lines."""
        lines = []
        if callable(self.start) or callable(self.stop):
            lines.append(f"  it acts in steps {[step for step in (*range(64), 128, 1024, 8192) if self.acts(step)]}")
        if callable(self.every) and not self.decides and isinstance(self.start, int):
            ends = [self.start - 1]
            while len(ends) <= 32:
                ends.append(self._end_of_round(self.start, ends[-1] + 1))
            lines.append(f"  its first rounds end in steps {ends[1:]}")
        return lines

    def _end_of_round(self, start: int, step: int) -> int:
        """Return the last step of the round that contains `step`. The first round begins at `start`."""
        ends: list[int] = self._known.setdefault("every", [start - 1])
        while ends[-1] < step:
            ends.append(ends[-1] + self._length(ends[-1] + 1))
        return ends[bisect_left(ends, step)]

    def _length(self, begin: int) -> int:
        """Return the number of steps of the round that begins in step `begin`, of a function `every`."""
        length = cast(Callable[[int], int], self.every)(begin)
        self._check_length(f"every({begin})", length)
        return length

    @cached_property
    def _known(self) -> dict[str, Any]:
        """Return a cache: for `start` and `stop`, the next step to ask and first true step; for `every`, round ends."""
        return {}

    @checked
    def choose(self, named: Mapping[str, Tensor]) -> set[str]:
        """Return the names of the trained parameters that the rule acts on."""
        if isinstance(self.where, Fragment):
            return self.where.choose(named)
        return {name for name, p in named.items() if self.where is None or self.where(name, p)}

    @checked
    def overlaps(self, other: "Rule") -> bool:
        """Return whether there may be a step in which both rules act.

        If a function gives one of the bounds, the answer is True, unless one rule stops where the other starts.
        """
        bounds = (self.start, self.stop, other.start, other.stop)
        if any(map(callable, bounds)):
            return self.stop != other.start and other.stop != self.start
        first = max(cast(int, self.start), cast(int, other.start))
        return self.acts(first) and other.acts(first)

    def __repr__(self) -> str:
        held = {f: getattr(self, f.name) for f in fields(self)[2:]}
        options = {f.name: written(value) for f, value in held.items() if value != f.default}
        shown = [repr(self.stage), *(f"{name}={value}" for name, value in options.items())]
        if options.keys() <= signature(globals()[self.window]).parameters.keys():
            return f"{self.window}({', '.join(shown)})"
        return f"Rule({', '.join([repr(self.window), *shown])})"  # an option that the function of the window lacks


def known_losses(rules: Iterable[Rule], ranks: int, adam: bool = True) -> list[str]:
    """Return what is known of rules that end behind on so many ranks; `adam`: ranks step by Adam or AdamW alone."""
    said = (each._known_loss(rule.every, ranks, adam) for rule in rules for each in rule.stage.whole())
    return [*filter(None, dict.fromkeys(said))]


def during_backward(
    stage: Stage, *, delay: int = 0, start: Bound = 0, stop: Bound | None = None, where: Where | None = None
) -> Rule:
    """Return a rule on gradients: each bucket is launched when backward has computed it; all land when backward ends.

    With `delay=d` the gradients of step t land when the backward of step t + d ends, so that the exchange overlaps d
    whole steps. For x the weights, g the gradients and γ u(·) the step of the optimizer:

        x_{t+1} = x_t − γ u(s_{t−d}),   s_t = stage(g_t(x_t)),   s_t = 0 for t < 0

    In the first d steps gradients are zero. Clipping, `GradScaler` and logging see the gradients that land. "Delayed
    gradients" in docs/algorithms.md tells which step sizes are stable, and about accumulation, overflow and resume.

    Args:
        stage: the exchange of the gradients.
        delay: the number of steps after which gradients land. All rules on gradients in one step need the same delay.
        start, stop: the first optimizer step in which the rule acts, and the first in which it no longer acts; or
            functions of the step, equal on all ranks, that return True from that step on. With `stop=warm` in one rule
            and `start=warm` in another, the second rule takes over in the step in which the first rule stops.
        where: a function (name, parameter) -> bool that selects parameters, or `Fragment(k, of)`; None for all.

    Raises:
        TypeError: `stage` is not a stage, or `where` neither a function nor a `Fragment`.
        ValueError: a number is impossible, such as a stop that is not after the start.
    """
    return Rule("during_backward", stage, delay=delay, start=start, stop=stop, where=where)


def between_steps(
    stage: Stage, *, every: Every = 1, start: Bound = 0, stop: Bound | None = None, where: Where | None = None
) -> Rule:
    """Return a rule on weights. An exchange is launched when an optimizer step ends, and lands when the next begins.

    The exchange overlaps forward and backward. Adapt while communicating (AWC):  x ← W x − γ g(x), for W the stage, and
    γ g(x) the optimizer's step with the gradients at the x before the exchange.

    Args:
        stage: the exchange of the weights.
        every: the number of steps per exchange; a function, equal on all ranks, that takes the first step of a round
            and returns the round's number of steps; or an object whose `due(step, comm)` tells in each step whether to
            exchange (`schedules.Interval`), for intervals that depend on training.
        start, stop, where: as in `during_backward`, and with the same errors.
    """
    return Rule("between_steps", stage, every=every, start=start, stop=stop, where=where)


def after_step(
    stage: Stage,
    *,
    every: Every = 1,
    delay: int = 0,
    offset: int = 0,
    mix: float | None = None,
    start: Bound = 0,
    stop: Bound | None = None,
    where: Where | None = None,
) -> Rule:
    """Return a rule that exchanges weights after the optimizer step γ g(x):  x ← W (x − γ g(x)), for W the stage.

    Args:
        stage: the exchange of the weights.
        every: the number of steps per exchange (local SGD, DiLoCo); or a function or an object as in `between_steps`.
            `lambda step: max(H, int((c / γ(step)) ** 2))` makes rounds longer when the learning rate γ falls.
        delay: the number of steps after which the result lands; training continues meanwhile.
        offset: exchange when the number of steps since `start` is `offset` modulo `every`, so that rules take turns.
        mix: how the result lands. With None, x ← x + (result − x at launch), which keeps all progress made in flight.
            With a number α, 0 ≤ α < 1, x ← α x + (1 − α) result, for x at landing; α = 0 overwrites x.
        start, stop, where: as in `during_backward`.

    Raises:
        TypeError, ValueError: as in `during_backward`; or `delay` is more than `every`, or equal to it with `mix`.
    """
    return Rule("after_step", stage, every, delay, offset, mix, start=start, stop=stop, where=where)


def free_running(
    stage: Stage, *, interval: float = 0.0, every: Every = 1, offset: int = 0, quorum: int | None = None,
    grace: float | None = None, start: Bound = 0, stop: Bound | None = None, where: Where | None = None,
) -> Rule:  # fmt: skip
    """Return a rule on weights that exchanges continuously in the background:  x ← x + (result − x at launch).

    A flight exchanges all buckets. No step waits for a flight, but at the end of a step the host may wait until all
    ranks agree on the next flight. A rank whose training has ended has weight 0 in the average.

    A rank is ready when it has made `every` steps since it last contributed. A flight begins when `quorum` ranks are
    ready, or `grace` seconds after the first, and takes a step of the slowest rank at most. With `OuterStep` all ranks
    land the change of the anchor (`algorithms.decoupled_diloco` has the equations): a rank that was not ready keeps its
    progress until it contributes, which is in the first flight after it is ready.

    Args:
        stage: a stateless average, equal on all ranks: `Mean()`, `CompressedMean()`, or `Hierarchical` around them; or
            an `OuterStep` around one of these. Or a `one_sided` stage, whose flights wait for no rank: it flies at the
            end of the rank's own steps.
        interval: the seconds between a landing and the next launch.
        every: as in `between_steps`, of the rank's own steps (`due` may differ between ranks); or `BySpeed(most)`.
        offset: the number of steps in the first round, so that rules take turns; 0: `every`. One rule flies at a time.
        quorum: the number of ranks to wait for; None, or more than there are: all whose training has not ended.
        grace: the seconds for which the first rank that is ready waits at most; None: no limit.
        start, stop, where: as in `during_backward`. Rules that act in the same steps start together.

    Raises:
        TypeError, ValueError: as in `during_backward`; or `stage` has another state or unequal results.
    """
    return Rule("free_running", stage, every, 0, offset, None, interval, start, stop, where, quorum, grace)


def hierarchical(algorithm: Algorithm) -> Algorithm:
    """Return `algorithm` with averages first within nodes, then between nodes. Attach it with `Comm(mesh=…)`.

    Args:
        algorithm: a rule, or a sum of rules.

    Raises:
        TypeError: `algorithm` is not a rule or a sum of rules; or a stage is hierarchical already, or needs the
            shapes of parameters (`power_sgd`), which shards do not have.
        ValueError: a free-running rule has an `OuterStep`, whose anchor all ranks of a group share.
    """
    return together(replace(each, stage=Hierarchical(each.stage)) for each in rules_of(algorithm, name="algorithm"))


def together(rules: Iterable[Rule]) -> Algorithm:
    """Return the sum of one or more rules."""
    first, *others = rules
    return Sum((first, *others)) if others else first


def rules_of(*algorithms: Any, name: str = "each of algorithms") -> tuple[Rule, ...]:
    """Return the rules of all algorithms, in order. A tuple or list of algorithms stands for their sum."""
    rules: list[Rule] = []
    for algorithm in algorithms:
        listed = algorithm if isinstance(algorithm, tuple | list) else [algorithm]
        if not listed or not all(isinstance(each, Algorithm) for each in listed):
            raise TypeError(message(name, "a rule or a sum of rules, such as bk.algorithms.bytegrad()", algorithm))
        rules += (rule for each in listed for rule in each.rules)
    return tuple(rules)
