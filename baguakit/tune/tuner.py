"""Finds the bucket size and the number of flows for an attachment, in the first steps of real training.

All ranks time the same steps, tell each other, and go by the slowest; what follows is computed by each from the same
numbers, so that all do the same at the same step. The search begins at the prediction of a plan, or at what the
attachment has, and goes on to neighbours of the best so far, on the grid of sizes and flows, until none is better:

    t(c) = max over ranks of the median step under c;     best ← c  where  t(c) < (1 − gain) t(best)
"""

import logging
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm
from typing import Any, Protocol

import torch

from ..arguments import check_fields, checked, real, said, whole
from ..rules import Rule, rules_of
from .choices import counted, distinct
from .planning import BUCKET_BYTES, Plan

log = logging.getLogger("baguakit")
SETTLING = 2  # steps after other buckets that are not timed

Setting = tuple[int, int]
"""A bucket size and a number of flows."""


class Attached(Protocol):
    """The attachment that is tuned."""

    _engine: Any

    @property
    def rules(self) -> tuple[Rule, ...]: ...

    def recut(self, bucket_bytes: int | None = None, flows: int | None = None) -> None: ...


@dataclass(frozen=True)
class Trial:
    """Some steps under one setting, `bucket_bytes` and `flows`: what the slowest rank's took, in seconds."""

    bucket_bytes: int
    flows: int
    seconds: float

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def setting(self) -> Setting:
        """The settings that were tried."""
        return self.bucket_bytes, self.flows

    def __str__(self) -> str:
        flows = counted(self.flows, "flow")
        return f"buckets of {self.bucket_bytes / 2**20:g} MiB over {flows}: {self.seconds * 1e3:.2f} ms a step"


def best_of(trials: Sequence[Trial], gain: float) -> Trial:
    """The first, or a later one that was better by `gain` than the best before it."""
    best = trials[0]
    for trial in trials[1:]:
        if trial.seconds < (1 - gain) * best.seconds:
            best = trial
    return best


def next_of(trials: Sequence[Trial], sizes: Sequence[int], flows: Sequence[int], gain: float) -> Setting | None:
    """A neighbour on the grid of the best so far that has not been tried: other sizes first. None if all have."""
    size, count = best_of(trials, gain).setting
    i, j = sizes.index(size), flows.index(count)
    around = [(i + 1, j), (i - 1, j), (i, j + 1), (i, j - 1)]
    tried = {trial.setting for trial in trials}
    settings = [(sizes[a], flows[b]) for a, b in around if 0 <= a < len(sizes) and 0 <= b < len(flows)]
    return next((setting for setting in settings if setting not in tried), None)


class Tuner:
    """Tuning under way; made by `autotune`. Print it.

    Attributes:
        trials: what has been tried so far.
        over: whether it has ended; then nothing is timed any more.
        log: what happened, a sentence each, as told to the logger "baguakit".
    """

    def __init__(
        self, att: Attached, start: Setting, sizes: Sequence[int], flows: Sequence[int], steps: int, gain: float
    ) -> None:
        self._att, self._engine, self._setting = att, att._engine, start
        self._sizes, self._flows, self._gain = sizes, flows, gain
        self._begin = max(map(settled, att.rules))
        self._period = lcm(*(rule.every for rule in att.rules))
        self._steps = -(-steps // self._period) * self._period
        self._skipped = -(-SETTLING // self._period) * self._period
        self.trials: list[Trial] = []
        self.log: list[str] = []
        self.over = False
        self._times: list[float] = []
        self._last: float | None = None
        if self._engine.tuned is None:
            self._engine.listeners.append(self._step_ended)
            self._say(f"tuning from {Trial(*start, 0.0)}".partition(":")[0])
        else:
            self._end("already tuned, before this state was saved")

    @property
    def best(self) -> Trial | None:
        """The best so far; None before the first trial has ended."""
        return best_of(self.trials, self._gain) if self.trials else None

    def stop(self) -> None:
        """End here, with the buckets as they are. Every rank calls it at the same step; local."""
        if not self.over:
            self._end("stopped")

    def __str__(self) -> str:
        best = self.best
        return "\n".join(f"{'→' if trial is best else ' '} {trial}" for trial in self.trials) or "nothing tried yet"

    __repr__ = __str__

    def _step_ended(self) -> None:
        if self._engine.tuned is not None:
            self._end("already tuned, as the state that was loaded says")
        elif self._last is not None and setting_of(self._engine) != self._setting:
            self._end("stopped: the buckets have been cut otherwise")
        elif self._engine.clock.step >= self._begin:
            self._go_on()

    def _go_on(self) -> None:
        if self._last is None:
            self._att.recut(*self._setting)
        else:
            self._times.append(self._now() - self._last)
            if len(self._times) == self._skipped + self._steps:
                self._judge()
        self._last = self._now()

    def _now(self) -> float:
        device = self._engine.plan.device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    def _judge(self) -> None:
        taken, self._times, k = self._times[self._skipped :], [], self._period
        mine = statistics.median(sum(taken[i : i + k]) / k for i in range(0, len(taken), k))
        told: list[float] = self._engine.together("tuning", lambda comm: comm.gather_objects(mine))
        trial = Trial(*self._setting, max(told))
        self.trials.append(trial)
        self._say(str(trial))
        after, best = next_of(self.trials, self._sizes, self._flows, self._gain), best_of(self.trials, self._gain)
        self._setting = best.setting if after is None else after
        self._att.recut(*self._setting)
        if after is None:
            self._engine.tuned = {"bucket_bytes": best.bucket_bytes, "flows": best.flows}
            self._end(f"tuned after {counted(len(self.trials), 'trial')}: {best}")

    def _end(self, why: str) -> None:
        self.over = True
        if self._step_ended in self._engine.listeners:
            self._engine.listeners.remove(self._step_ended)
        self._say(why)

    def _say(self, sentence: str) -> None:
        self.log.append(sentence)
        log.info("%s", sentence)


@checked
def autotune(
    att: Attached,
    plan: Plan | None = None,
    *,
    bucket_bytes: Sequence[int] = BUCKET_BYTES,
    flows: Sequence[int] | None = None,
    steps: int = 8,
    gain: float = 0.03,
) -> Tuner:
    """Let an attachment find the size of its buckets, and its number of flows, in its first steps. Every rank calls it.

        with bk.attach(model, optimizer, algorithm) as att:
            bk.tune.autotune(att)
            train()

    Training goes on as always, and nothing runs beside it. Warm-ups are waited for. Each setting is used for some
    steps, of which the first two are not counted; with rules that exchange in every k-th step, for whole periods. What
    is remembered is carried from buckets to buckets, and what a stage cannot carry (`power_sgd`: its factors) it makes
    anew. Results change by no more than other buckets change them: not at all where a sum does not depend on its place
    in a bucket.

    When it is over, `att.state_dict()` says so, and a run resumed from that takes the same setting and does not tune
    again; one saved before tunes anew.

    Args:
        att: what `bk.attach` returned.
        plan: where to begin: at its fastest row for the rules attached. None: at what the attachment has.
        bucket_bytes: the sizes to go among, in bytes.
        flows: the numbers of flows to go among; None: those of the plan, and without one no others than there are.
        steps: how many steps of a setting are counted; their median is.
        gain: by how much a setting must be faster to be taken for better.

    Returns:
        A `Tuner`: `tuner.over`, `tuner.best`, `tuner.log`; print it.

    Raises:
        ValueError: a rule is free running, so that ranks are at different steps, or an argument is impossible.
        TypeError: `att` is not what `bk.attach` returned.
    """
    engine = getattr(att, "_engine", None)
    if engine is None or not hasattr(att, "recut"):
        raise TypeError(said("att", "an Attachment, which bk.attach returned", att))
    for rule in att.rules:
        if rule.window == "free_running":
            raise ValueError(f"under {rule!r} ranks are at different steps and nobody waits: there is nothing to tune")
    real("gain", gain, 0, below=1)
    row = next((row for row in plan.rows if rules_of(row.algorithm) == att.rules), None) if plan is not None else None
    here = setting_of(engine)
    start = here if row is None else (row.bucket_bytes, row.flows)
    if flows is None:
        flows = plan.network.flows() if plan is not None else ()
    counts = sorted({start[1], here[1], *(whole("flows", k, 1) for k in flows)})
    if engine.comm.size == 1:  # then nothing is sent
        start, counts = (start[0], here[1]), [here[1]]
    if counts != [1] and engine.plan.device.type == "cuda":
        raise ValueError(f"flows={tuple(counts)} divide what travels over gloo; on CUDA tune bucket_bytes alone")
    wanted = sorted({start[0], *(whole("bucket_bytes", size, 1) for size in bucket_bytes)})
    named = {name: p for p, name in engine.plan.names.items()}
    sizes = distinct(att.rules, named, [start[0], *wanted])
    return Tuner(att, start, sorted(sizes), counts, whole("steps", steps, 1), gain)


def settled(rule: Rule) -> int:
    """The step from which a rule does what it will go on doing: its own warm-up, or its place as one, is over."""
    return max(rule.start, rule.stop or 0, getattr(rule.stage, "warmup_steps", 0))


def setting_of(engine: Any) -> Setting:
    """The bucket size and the flows of an attachment at this moment."""
    return engine.plan.bucket_bytes, engine.tracks[0].comm.flows
