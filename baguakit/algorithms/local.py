"""Local steps: ranks train alone, and average their weights only at intervals.

**local_sgd.** Train alone for H steps, then average the weights x_r of the n ranks.

    x_r ← x_r − γ d(g_r(x_r))                     in every step; γ d(·) is the step of the optimizer for the gradients
    x_r ← (1/n) Σ_j x_j                           after every H-th step

Stich 2018, "Local SGD Converges Fast and Communicates Little", arXiv:1805.09767; post-local SGD: Lin et al. 2018,
"Don't Use Large Mini-Batches, Use Local SGD", arXiv:1808.07217. For rounds that grow as the learning rate γ falls, pass
`every=lambda step: max(H, int((c / γ(step)) ** 2))`, with a constant c: Gu et al. 2024, "A Quadratic Synchronization
Rule for Distributed Deep Learning", arXiv:2310.14423.

**async_model_average.** Ranks train at their own pace, and their weights are averaged in the background.

    x_r ← x_r − γ d(g_r(x_r))                              in every step, without waiting
    x_r ← x_r + (1/|A|) Σ_{j in A} x̂_j − x̂_r              when an exchange ends

x̂_j are the weights of rank j at launch; A is the set of ranks that still train. Progress during the exchange is kept.
Gan et al. 2021, "BAGUA", arXiv:2107.01499, section 3.

**diloco.** Ranks take local steps, then a step of an outer optimizer whose gradient is their mean progress.

For a the anchor (the weights that all ranks last agreed on) and H local steps between exchanges:

    x_r ← x_r − γ d(g_r(x_r))                     in every step
    Δ   ← (1/n) Σ_r (a − x_r)                     after every H-th step
    a   ← outer optimizer's step on a with gradient Δ
    x_r ← a

With `fragments`, the fragments of the weights are exchanged in turn within the H steps, which spreads the load of the
network. With `delay`, training continues during an exchange, and `mix` says how its result lands.

Douillard et al. 2023, "DiLoCo: Distributed Low-Communication Training of Language Models", arXiv:2311.08105.

Other inner stages and outer optimizers make SlowMo, Streaming DiLoCo, SparseLoCo, MuLoCo and NoLoCo of it, and not
CO2: "More methods" in docs/algorithms.md.

Wang et al. 2019, "SlowMo: Improving Communication-Efficient Distributed SGD with Slow Momentum", arXiv:1910.00643;
Douillard et al. 2025, "Streaming DiLoCo with overlapping communication: Towards a Distributed Free Lunch",
arXiv:2501.18512; Sarfi et al. 2025 (SparseLoCo), arXiv:2508.15706; Thérien et al. 2025, "MuLoCo: Muon is a practical
inner optimizer for DiLoCo", arXiv:2505.23725; Kolehmainen et al. 2025 (NoLoCo), arXiv:2506.10911; Sun et al. 2024,
"CO2: Efficient Distributed Training with Full Communication-Computation Overlap", arXiv:2401.16265.

**decoupled_diloco.** Rounds of DiLoCo that nobody waits for, with the set C of ranks that have made H steps.

    x_r ← x_r − γ d(g_r(x_r))                     in every step, without waiting
    Δ   ← (1/|C|) Σ_{r in C} (a − x_r)            when enough ranks are ready; C and a are equal on all ranks
    a'  ← outer optimizer's step on a with gradient Δ
    x_r ← x_r + a' − x̂_r  for r in C,  x_r + a' − a  for all others;  a ← a'

x̂_r are the weights at launch. The progress that a rank has not contributed, x_r − a, stays with it, so none is lost. If
all ranks are in C, and make no step until the landing, this is `diloco(H)`. If k of n ranks are in each C, the anchor
moves n/k times as far as with all: choose a smaller lr for a small quorum. In the paper, a server has the anchor,
contributions have weights by tokens (`weight=` of `attach`), and norms and directions are averaged apart.

Douillard et al. 2026, "Decoupled DiLoCo for Resilient Distributed Pre-training", arXiv:2604.21428. With BySpeed: Liu et
al. 2024, "Asynchronous Local-SGD Training for Language Modeling" (DyLU), arXiv:2401.09135.
"""

from dataclasses import dataclass, replace
from math import sqrt
from typing import Any, ClassVar, overload

import torch
from torch import Tensor

from ..arguments import Natural, checked, describe, instance, integer, message, real
from ..buckets import Bucket
from ..comm import Comm
from ..expressions import written
from ..keeping import finite, update_if_finite_, wide_copy
from ..lanes import temporaries
from ..rules import Algorithm, after_step, during_backward, free_running, together
from ..schedules import Bound, Every, Fragment
from ..stages import Around, Mean, Stage, State


@checked
def local_sgd(every: Every = 8, start: Bound = 0) -> Algorithm:
    """Average the weights once in `every` steps. Sends 2 (n − 1)/n times their size, divided by `every`, per step.

    Args:
        every: H, the number of local steps between averages; or a function as in `bk.after_step`.
        start: before this step, average gradients instead (post-local SGD); or a function as in `bk.after_step`.
    """
    average = after_step(Mean(), every=every, start=start)
    return during_backward(Mean(), stop=start) + average if start else average


@checked
def async_model_average(warmup_steps: Natural = 0, interval: float = 0.0) -> Algorithm:
    """Average the weights as often as the network allows. Stragglers do not slow down other ranks.

    Each flight sends 2 (n − 1)/n times the size of the weights. Ranks may make different numbers of steps: a rank that
    has finished takes part with weight 0 until all have finished. A checkpoint does not contain flights in progress.

    Args:
        warmup_steps: the number of first steps that average gradients, so that ranks start from equal weights.
        interval: the seconds between the landing of a flight and the launch of the next.
    """
    flight = free_running(Mean(), interval=interval, start=warmup_steps)
    return during_backward(Mean(), stop=warmup_steps) + flight if warmup_steps else flight


@dataclass(frozen=True, repr=False, init=False)
class OuterStep(Around):
    """Δ ← inner(a − x);  a ← a step of `optimizer` on a with gradient Δ;  x ← a.

    The anchor is a. If `inner` gives ranks different results, each rank has its own anchor, and Δ ← a − inner(x) brings
    the anchors closer. If a result is not finite, it is passed on, and the anchor and the state do not change.

    Args:
        optimizer: a class of torch.optim, or a subclass of Optimizer.
        inner: the average: `Mean()`, or `ErrorFeedback(CompressedMean())`, or an average with neighbours only.
        options: keyword arguments for the optimizer; of SGD by default lr=0.8, momentum=None, nesterov=True.
            `momentum=None` follows the number of ranks n (in `Hierarchical`, of nodes): it is 1 − lr/√n, in two digits,
            from 0.1 to 0.9.
    """

    optimizer: type[torch.optim.Optimizer]
    options: tuple[tuple[str, Any], ...]
    averages: ClassVar[bool] = False
    copies: ClassVar[float] = 11
    elementwise: ClassVar = {"anchor": "mean", "outer": "mean"}
    follows: ClassVar[tuple[str, ...]] = ("anchor",)
    anchored: ClassVar[bool] = True

    def __init__(self, optimizer: type[torch.optim.Optimizer], inner: Stage = Mean(), **options: Any) -> None:
        options = dict(options.pop("options", ())) | options  # as dataclasses.replace passes them
        if not options and optimizer is torch.optim.SGD:
            options = {"lr": 0.8, "momentum": None, "nesterov": True}
        instance("inner", inner, Stage, "a stage such as Mean()")
        if not (isinstance(optimizer, type) and issubclass(optimizer, torch.optim.Optimizer)):
            raise TypeError(message("optimizer", "a class such as torch.optim.SGD", optimizer))
        for name, value in options.items():
            for number in value if isinstance(value, tuple | list) else [value]:
                if isinstance(number, float):
                    real(name, number)
        try:
            optimizer([torch.zeros(1, dtype=torch.float32)], **by_ranks(options, 1))
        except Exception as error:  # of any type: optimizers check their options in their own ways
            kind = ValueError if isinstance(error, ValueError) else TypeError
            given = ", ".join(f"{name}={describe(value)}" for name, value in options.items())
            raise kind(f"{optimizer.__name__} cannot be made with the options {given}: {error}") from error
        vars(self).update(optimizer=optimizer, inner=inner, options=tuple(options.items()))

    def init(self, bucket: Bucket, comm: Comm) -> State:
        return {"anchor": wide_copy(bucket.flat), "outer": {}, "inner": self.inner.init(bucket, comm)}

    def __call__(self, x: Tensor, state: State, comm: Comm) -> Tensor:
        a, outer = state["anchor"], state["outer"]
        with temporaries() as new:
            stepped = new(a).copy_(a)
            if self.inner.same_on_all_ranks:
                stepped.grad = self.inner(torch.sub(a, x, out=new(a)), state["inner"], comm)
            else:
                stepped.grad = a - self.inner(new(a).copy_(x), state["inner"], comm)
            optimizer = self.optimizer([stepped], **by_ranks(dict(self.options), comm.size))
            if x.is_cuda and "capturable" in optimizer.defaults and "capturable" not in dict(self.options):
                # The device tests whether to keep the step. If the host counted steps, it would wait for this test.
                optimizer.param_groups[0]["capturable"] = True
            optimizer.state[stepped] = {name: new(value).copy_(value) for name, value in outer.items()}
            optimizer.step()
            ok = finite(stepped)
            update_if_finite_(a, stepped, where=ok)
            for name, value in optimizer.state[stepped].items():
                if isinstance(value, Tensor):
                    if name not in outer:
                        outer[name] = torch.zeros_like(value)
                    update_if_finite_(outer[name], value, where=ok.to(value.device))
            return x.copy_(stepped)

    def _on(self, comm: Comm) -> "OuterStep":
        return replace(self, options=tuple(by_ranks(dict(self.options), comm.size).items()))

    def _known_loss(self, every: Every, ranks: int, adam: bool) -> str:
        options, every = by_ranks(dict(self.options), ranks), getattr(every, "most", every)
        lr, mu, nesterov = (options.get(name, 0.0) for name in ("lr", "momentum", "nesterov"))
        tried, step = ranks > 1 and adam, f"an outer step with lr={lr} and momentum={mu}"
        if self.optimizer is not torch.optim.SGD:
            return ""
        if lr >= (most := 2 * (1 + mu) / (1 + 2 * mu * nesterov)):  # the anchor swings ever further
            why = f"overshoots, as from lr={most:.3g} on: in a test on 8 ranks lr=2 and momentum=0.3 ended at 3.84 bits"
            return f"{step} {why} per byte, and lr=1 and momentum=0.5 at 3.10"
        if lr > 1.5 * sqrt(ranks) * (1 - mu) and tried:
            why = f"is long for {ranks} ranks with Adam: in tests lr=0.7, momentum=0.9 ended 8% to 17% behind DDP"
            return f"{step} {why} on 2 to 16 ranks, and momentum=None, which follows the number of ranks, 2% to 13%"
        if isinstance(every, int) and every >= 16 and ranks >= 8 and tried:
            why = "end behind DDP with Adam: in tests by 7% on 8 ranks and 13% on 16 after 50 rounds, and by 1.5%"
            return (
                f"{ranks} ranks that average every {every} steps {why} with torch.optim.Muon on the matrices (MuLoCo)"
            )
        return ""

    def __repr__(self) -> str:
        name = f"{self.optimizer.__module__}.{self.optimizer.__qualname__}"
        known = getattr(torch.optim, self.optimizer.__name__, None) is self.optimizer
        shown = [f"torch.optim.{self.optimizer.__name__}" if known else name]
        shown += [repr(self.inner)] * (self.inner != Mean())
        shown += [f"{key}={written(value)}" for key, value in self.options]
        return f"OuterStep({', '.join(shown)})"


@overload
def diloco(
    every: Every = 500, *, inner: Stage = Mean(), delay: int = 0, fragments: int = 1, mix: float | None = None,
    lr: float = 0.8, momentum: float | None = None, nesterov: bool = True, dampening: float = 0.0,
    weight_decay: float = 0.0,
) -> Algorithm: ...  # fmt: skip
@overload
def diloco(
    every: Every, optimizer: type[torch.optim.Optimizer], inner: Stage = Mean(), delay: int = 0, fragments: int = 1,
    mix: float | None = None, **options: Any,
) -> Algorithm: ...  # fmt: skip
@checked
def diloco(
    every: Every = 500, optimizer: type[torch.optim.Optimizer] = torch.optim.SGD, inner: Stage = Mean(),
    delay: int = 0, fragments: int = 1, mix: float | None = None, **options: Any,
) -> Algorithm:  # fmt: skip
    """Train alone for `every` steps, then take a step of an outer optimizer with the mean progress as its gradient.

    Sends 2 (n − 1)/n times the size of the weights, divided by `every`, per step. Costs memory for the anchor (a copy
    of the weights), the state of the outer optimizer, and with `delay` two more copies during a flight.

    Args:
        every: H, the number of local steps; or, with one fragment, a function as in `bk.after_step`.
        optimizer: the class of the outer optimizer. On CUDA the host waits in every exchange if this class (such as
            Adagrad) cannot count its steps on the device, with the option `capturable`.
        inner: the average of anchor − weights; `ErrorFeedback(CompressedMean())` sends a quarter of the bytes.
        delay: the number of steps after which the result is applied; training continues meanwhile.
        fragments: the number of fragments of similar size that weights are divided into.
        mix: α, as in `bk.after_step`: the share of a rank's own weights that stays. None keeps all progress in flight.
        options: arguments of the outer optimizer, as in `OuterStep`. By default its momentum follows the number of
            ranks (`python -m bench.frontier.by_ranks`); the paper has lr=0.7, momentum=0.9, nesterov=True.
    """
    step = OuterStep(optimizer, inner, **options)
    return together(
        after_step(step, every=every, delay=delay, offset=offset, mix=mix, where=part)
        for offset, part in turns(every, fragments)
    )


@checked
def decoupled_diloco(
    every: Every = 24, quorum: int | None = None, grace: float | None = None,
    optimizer: type[torch.optim.Optimizer] = torch.optim.SGD, inner: Stage = Mean(), fragments: int = 1,
    **options: Any,
) -> Algorithm:  # fmt: skip
    """Train without waiting: the rounds of `diloco` run in the background, with the ranks that have made their steps.

    Each round sends 2 (n − 1)/n times the size of the weights, from all ranks. Costs the memory of `diloco` and, in a
    flight, a copy of the weights, the anchor and the outer optimizer's state.

    Args:
        every: H, the steps after which a rank is ready; or, with one fragment, `BySpeed(H)` (DyLU) or a function.
        quorum, grace: as in `bk.free_running`: a round begins when `quorum` ranks are ready (None: all), or `grace`
            seconds after the first.
        optimizer, inner, fragments, options: as in `diloco`; `inner` has no state here. One fragment flies at a time.
    """
    step = OuterStep(optimizer, inner, **options)
    return together(
        free_running(step, every=every, offset=offset, quorum=quorum, grace=grace, where=part)
        for offset, part in turns(every, fragments)
    )


def by_ranks(options: dict[str, Any], ranks: int) -> dict[str, Any]:
    """Return the options of an outer optimizer, with μ(ranks) as the momentum if it is None."""
    if options.get("momentum", 0.0) is not None:
        return options
    mu = 1 - float(options.get("lr", 0.0)) / sqrt(ranks)
    return {**options, "momentum": round(min(0.9, max(0.1, mu)), 2)}


def turns(every: Every, fragments: int) -> list[tuple[int, Fragment | None]]:
    """Return (offset, fragment) for each of `fragments` that take turns within `every` steps."""
    if integer("fragments", fragments, 1) == 1:
        return [(0, None)]
    if not isinstance(every, int):
        raise ValueError(f"fragments={fragments} take turns within rounds of one length; every must be a number")
    if fragments > integer("every", every, 1):
        raise ValueError(f"fragments={fragments} cannot take turns within every={every} steps; every must be larger")
    return [(k * every // fragments, Fragment(k, fragments)) for k in range(fragments)]
