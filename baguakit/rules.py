"""Rules: a stage in a window of the training step.

              forward               backward                  optimizer.step
       ├────────────────────┼─────────────────────────────┤├──────────────────┤
    during_backward          b1───────▶ b2──────▶ b3─▶ land                        gradients, bucket by bucket
    between_steps   ◀── launched when the last step ended … lands when the next begins      weights: x ← W x − γ g(x)
    after_step                                                    launch+land      weights: x ← W (x − γ g(x))
    after_step(delay=d)                                           launch ──▶ … d steps … ──▶ land
    free_running                                                  launch ──▶ … when all have come … ──▶ land, again

Steps are counted from 0, in optimizer steps since the attachment was made. A rule acts in the steps s with
start ≤ s < stop; one with `every=k` exchanges in every k-th of them, the first time in step start + k − 1; with
`offset=o` as well, o steps after each of these, the first time in step start + o − 1.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from inspect import signature
from typing import Any, Literal

from torch import Tensor

from .arguments import check_fields, checked, function, real, said, whole
from .expressions import formerly, written
from .stages import Hierarchical, Stage


@dataclass(frozen=True)
class Fragment:
    """Part `k` of the parameters, of `of` parts of like size: what `where=` takes to let parts take turns.

    Parameters of one module stay together. The largest module goes first, each to the smallest part so far: modules
    of one size, such as the layers of a transformer, go to the parts in turn.

    Raises:
        ValueError: `k` is not 0 to `of` − 1.
    """

    k: int
    of: int

    def __post_init__(self) -> None:
        check_fields(self)
        if whole("k", self.k, 0) >= whole("of", self.of, 1):
            raise ValueError(f"k is one of the parts, 0 to {self.of - 1} for of={self.of}, not {self.k}")

    @checked
    def choose(self, named: Mapping[str, Tensor]) -> set[str]:
        """The names of the parameters in this part."""
        modules: dict[str, list[str]] = {}
        for name in named:
            modules.setdefault(name.rpartition(".")[0], []).append(name)
        sizes = {module: sum(named[name].nbytes for name in names) for module, names in modules.items()}
        filled, parts = [0] * self.of, [set[str]() for _ in range(self.of)]
        for module in sorted(modules, key=lambda module: -sizes[module]):
            at = filled.index(min(filled))
            filled[at] += sizes[module]
            parts[at].update(modules[module])
        return parts[self.k]


Where = Callable[[str, Tensor], bool] | Fragment
Window = Literal["during_backward", "between_steps", "after_step", "free_running"]


@dataclass(frozen=True)
class Rule:
    """A stage, the window in which it flies, and the steps and parameters that it acts on.

    Made by `during_backward`, `between_steps`, `after_step` and `free_running`.
    """

    window: Window
    stage: Stage
    every: int = 1
    delay: int = 0
    offset: int = 0
    interval: float = 0.0
    start: int = 0
    stop: int | None = None
    where: Where | None = None

    def __post_init__(self) -> None:
        if self.where is not None and not isinstance(self.where, Fragment):
            function("where", self.where, "a function (name, parameter) -> bool, or a Fragment")
        check_fields(self)
        for name, least in (("every", 1), ("delay", 0), ("offset", 0), ("start", 0)):
            whole(name, getattr(self, name), least)
        if self.offset >= self.every:
            raise ValueError(f"offset={self.offset} is a part of every={self.every}, and must be less")
        if self.stop is not None and whole("stop", self.stop, 0) <= self.start:
            raise ValueError(
                f"a rule with start={self.start} and stop={self.stop} never acts; stop must be greater than start"
            )
        if self.delay > self.every:
            raise ValueError(
                f"delay={self.delay} would launch again before it has landed; it can be at most every={self.every}"
            )
        real("interval", self.interval, 0)

    @property
    def what(self) -> Literal["grad", "data"]:
        """Whether the rule acts on gradients or on weights."""
        return "grad" if self.window == "during_backward" else "data"

    @checked
    def acts(self, step: int) -> bool:
        """Whether the rule is in force at this step."""
        return self.start <= step and (self.stop is None or step < self.stop)

    @checked
    def exchanges(self, step: int) -> bool:
        """Whether the rule has an exchange in this step."""
        return self.acts(step) and (step - self.start + 1) % self.every == self.offset

    @checked
    def choose(self, named: Mapping[str, Tensor]) -> set[str]:
        """The names of the parameters that take part, of all that are trained."""
        if isinstance(self.where, Fragment):
            return self.where.choose(named)
        return {name for name, p in named.items() if self.where is None or self.where(name, p)}

    @checked
    def meets(self, other: "Rule") -> bool:
        """Whether there is a step in which both rules act."""
        return self.acts(max(self.start, other.start)) and other.acts(max(self.start, other.start))

    def __repr__(self) -> str:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        options = {f.name: written(values[f.name]) for f in fields(self)[2:] if values[f.name] != f.default}
        if "where" in options and not isinstance(self.where, Fragment):
            options["where"] = "…"
        shown = [repr(self.stage), *(f"{name}={value}" for name, value in options.items())]
        if formerly() or options.keys() <= signature(globals()[self.window]).parameters.keys():
            return f"{self.window}({', '.join(shown)})"
        return f"Rule({', '.join([repr(self.window), *shown])})"  # the function of the window takes no such option


Algorithm = Rule | tuple[Rule, ...]


def during_backward(stage: Stage, *, start: int = 0, stop: int | None = None, where: Where | None = None) -> Rule:
    """On gradients: launched bucket by bucket as backward makes them, landed when backward ends.

    Args:
        stage: what happens to the gradients.
        start, stop: the optimizer steps in which the rule acts, start included and stop not.
        where: `where(name, parameter)` says whether a parameter takes part, or `Fragment(k, of)` which of so many parts
            does; None means all.

    Raises:
        TypeError: `stage` is no stage, or `where` neither a function nor a `Fragment`.
        ValueError: a number is impossible, such as a stop that is not after the start.
    """
    return Rule("during_backward", stage, start=start, stop=stop, where=where)


def between_steps(
    stage: Stage, *, every: int = 1, start: int = 0, stop: int | None = None, where: Where | None = None
) -> Rule:
    """On weights: launched when one optimizer step ends, landed when the next begins; overlaps everything between.

    Adapt while communicating (AWC):  x ← W x − γ g(x), the gradient being that at the x before the exchange.

    Args:
        stage: what happens to the weights.
        every: exchange only in every so many steps.
        start, stop, where: as in `during_backward`.

    Raises:
        TypeError, ValueError: as in `during_backward`.
    """
    return Rule("between_steps", stage, every=every, start=start, stop=stop, where=where)


def after_step(
    stage: Stage,
    *,
    every: int = 1,
    delay: int = 0,
    offset: int = 0,
    start: int = 0,
    stop: int | None = None,
    where: Where | None = None,
) -> Rule:
    """On weights, once the optimizer has moved them:  x ← W (x − γ g(x)).

    Args:
        stage: what happens to the weights.
        every: only after every so many steps (local SGD, DiLoCo).
        delay: let the result land this many steps later, and train on meanwhile:  x ← x + (result − x at launch).
        offset: exchange this many steps after the others of the same `every`, to take turns; less than `every`.
        start, stop, where: as in `during_backward`.

    Raises:
        TypeError, ValueError: as in `during_backward`; or `delay` is more than `every`.
    """
    return Rule("after_step", stage, every=every, delay=delay, offset=offset, start=start, stop=stop, where=where)


def free_running(
    stage: Stage, *, interval: float = 0.0, start: int = 0, stop: int | None = None, where: Where | None = None
) -> Rule:
    """On weights, as often as the network allows; training never waits:  x ← x + (result − x at launch).

    All buckets fly together. Ranks agree on each flight on the host, in passing, at the ends of their steps; one that
    has finished answers with weight 0 until all have. The stage must be an average that all ranks end with alike.

    Args:
        stage: what happens to the weights: `Mean()`, `CompressedMean()`, or one of them in `Hierarchical`.
        interval: seconds to let pass between a landing and the next flight.
        start, stop, where: as in `during_backward`.

    Raises:
        TypeError, ValueError: as in `during_backward`; or the stage is no such average.
    """
    rule = Rule("free_running", stage, interval=interval, start=start, stop=stop, where=where)
    if not stage.agrees or stage.remembers():
        raise ValueError(
            "the stage of free_running is an average that leaves all ranks alike and remembers nothing, "
            f"such as Mean(); not {stage!r}"
        )
    return rule


def hierarchical(algorithm: Algorithm) -> Algorithm:
    """The same algorithm, its averaging within nodes and then between them; attach it with `Comm(mesh=…)`.

    Args:
        algorithm: a rule, or a tuple of rules.

    Raises:
        TypeError: it is neither, or works on the parameters' shapes (`power_sgd`), which shards have lost.
    """
    if isinstance(algorithm, tuple) and algorithm and all(isinstance(rule, Rule) for rule in algorithm):
        return tuple(replace(rule, stage=Hierarchical(rule.stage)) for rule in algorithm)
    if not isinstance(algorithm, Rule):
        raise TypeError(said("algorithm", "a rule, or a tuple of rules, such as bytegrad()", algorithm))
    return replace(algorithm, stage=Hierarchical(algorithm.stage))


def rules_of(*algorithms: Any, name: str = "each of algorithms") -> tuple[Rule, ...]:
    """The rules of some algorithms, one after another."""
    rules: list[Rule] = []
    for algorithm in algorithms:
        several = isinstance(algorithm, tuple | list)
        if not (
            algorithm and all(isinstance(rule, Rule) for rule in algorithm) if several else isinstance(algorithm, Rule)
        ):
            wanted = "a rule or a tuple of rules, such as bk.algorithms.bytegrad()"
            raise TypeError(said(name, wanted, algorithm))
        rules += algorithm if several else [algorithm]
    return tuple(rules)
