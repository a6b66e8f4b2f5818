"""Search for the best bucket size and number of flows of an attachment in the first steps of training.

All ranks time the same steps, gather the times, and use the slowest rank's time. So all ranks make the same choice at
the same step. The search begins at the fastest row of a plan, or at the current setting. It continues with neighbours
of the best setting so far, on the grid of sizes and flows, until no neighbour is better:

    t(c) = max over ranks of the median time of a step with the setting c;     best ← c  where  t(c) < 0.97 t(best)
"""

import logging
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm
from typing import Any

from ..arguments import Declared, Positive, checked, message
from .planning import BUCKET_BYTES, Plan, distinct
from .prediction import every_of, lasting
from .probing import now

log = logging.getLogger("baguakit")
SETTLING = 2  # steps after a change of buckets that are not timed
GAIN = 0.03  # the share of time by which a setting must be faster than the best before it


@dataclass(frozen=True)
class Trial(Declared):
    """The result of some steps with `bucket_bytes` and `flows`: `seconds` is the time of a step on the slowest rank."""

    bucket_bytes: int
    flows: int
    seconds: float

    @property
    def setting(self) -> tuple[int, int]:
        """Return the setting that was tried."""
        return self.bucket_bytes, self.flows

    def __str__(self) -> str:
        size, flows = f"{self.bucket_bytes / 2**20:g} MiB", f"{self.flows} flow{'s' * (self.flows != 1)}"
        return f"buckets of {size} over {flows}: {self.seconds * 1e3:.2f} ms a step"


def best_of(trials: Sequence[Trial]) -> Trial:
    """Return the best trial: the first, or a later trial that was faster by `GAIN` than the best trial before it."""
    best = trials[0]
    for trial in trials[1:]:
        if trial.seconds < (1 - GAIN) * best.seconds:
            best = trial
    return best


def next_of(trials: Sequence[Trial], sizes: Sequence[int], flows: Sequence[int]) -> tuple[int, int] | None:
    """Return an untried grid neighbour of the best setting, of another size if possible; None if all were tried."""
    best, tried = best_of(trials), {trial.setting for trial in trials}
    i, j = sizes.index(best.bucket_bytes), flows.index(best.flows)
    around = [(i + 1, j), (i - 1, j), (i, j + 1), (i, j - 1)]
    settings = [(sizes[a], flows[b]) for a, b in around if 0 <= a < len(sizes) and 0 <= b < len(flows)]
    return next((setting for setting in settings if setting not in tried), None)


class Tuner:
    """A search for the best bucket size and number of flows. `autotune` makes it. Print it.

    Attributes:
        trials: the trials of the settings tried so far.
        over: whether the search has ended, and nothing is timed any more.
        log: the sentences that were logged (logger "baguakit").
    """

    def __init__(self, att: Any, start: tuple[int, int], sizes: list[int], flows: list[int], steps: int) -> None:
        self._att, self._engine, self._setting = att, att.tunable, start
        self._sizes, self._flows = sizes, flows
        lasting(att.rules)  # raises if functions tell when rules start or stop
        # The search begins when stages have warmed up, and rules that serve as warm-ups have stopped.
        ends = [(rule.start, rule.stop or 0, getattr(rule.stage, "warmup_steps", 0)) for rule in att.rules]
        self._begin = max(map(max, ends))
        self._period = lcm(*map(every_of, att.rules))
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
        """Return the best trial so far; None before the first trial has ended."""
        return best_of(self.trials) if self.trials else None

    def __str__(self) -> str:
        best = self.best
        return "\n".join(f"{'→' if trial is best else ' '} {trial}" for trial in self.trials) or "nothing tried yet"

    __repr__ = __str__

    def _step_ended(self) -> None:
        if self._engine.tuned is not None:
            self._end("already tuned, as the state that was loaded says")
        elif self._last is not None and self._engine.setting != self._setting:
            self._end("stopped: the buckets have been cut otherwise")
        elif self._att.step >= self._begin:
            if self._last is None:
                self._att.recut(*self._setting)
            else:
                self._times.append(now(self._engine.setup.device) - self._last)
                if len(self._times) == self._skipped + self._steps:
                    self._judge()
            self._last = now(self._engine.setup.device)

    def _judge(self) -> None:
        taken, self._times, k = self._times[self._skipped :], [], self._period
        mine = statistics.median(sum(taken[i : i + k]) / k for i in range(0, len(taken), k))
        trial = Trial(*self._setting, max(self._engine.together("tuning", lambda comm: comm.gather_objects(mine))))
        self.trials.append(trial)
        self._say(str(trial))
        after, best = next_of(self.trials, self._sizes, self._flows), best_of(self.trials)
        self._setting = best.setting if after is None else after
        self._att.recut(*self._setting)
        if after is None:
            self._engine.tuned = {"bucket_bytes": best.bucket_bytes, "flows": best.flows}
            self._end(f"tuned after {len(self.trials)} trial{'s' * (len(self.trials) != 1)}: {best}")

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
    att: Any,
    plan: Plan | None = None,
    *,
    bucket_bytes: Sequence[Positive] = BUCKET_BYTES,
    flows: Sequence[Positive] | None = None,
    steps: Positive = 8,
) -> Tuner:
    """Let an attachment find the size of its buckets, and its number of flows, in its first steps. Every rank calls it.

        with bk.attach(model, optimizer, algorithm) as att:
            bk.tune.autotune(att)
            train()

    Tuning begins after warm-ups. Each setting is used for two steps that are not timed, and then for `steps` steps. If
    rules exchange in every k-th step, both numbers are rounded up to multiples of k. New buckets keep the state of
    stages, except parts to be made anew (`power_sgd`: factors). Results are the same as with buckets set by hand.

    The setting that was found is a part of `att.state_dict()`: a resumed run uses it and does not tune again.

    Args:
        att: returned by `bk.attach`.
        plan: begin at its fastest row for the attached rules; None: begin at the setting of the attachment.
        bucket_bytes: the sizes to try, in bytes.
        flows: the numbers of flows to try; None: the numbers in the plan, or without a plan the current number only.
        steps: the number of timed steps per setting; their median counts.

    Returns:
        A `Tuner`: `tuner.over`, `tuner.best`, `tuner.log`; print it.

    Raises:
        ValueError: a rule is free running, or starts or stops by a function, or an argument is invalid.
        TypeError: `att` is not what `bk.attach` returned.
    """
    if not hasattr(att, "tunable"):
        raise TypeError(message("att", "an Attachment, which bk.attach returned", att))
    for rule in att.rules:
        if rule.window == "free_running":
            raise ValueError(f"under {rule!r} ranks are at different steps and nobody waits: there is nothing to tune")
    engine, here = att.tunable, att.tunable.setting
    rows = [row for row in plan.rows if row.algorithm.rules == att.rules] if plan is not None else []
    start = (rows[0].bucket_bytes, rows[0].flows) if rows else here
    if flows is None:
        flows = plan.network.flows() if plan is not None else ()
    counts = sorted({start[1], here[1], *flows})
    if engine.runtime.comm.size == 1:  # then nothing is sent
        start, counts = (start[0], here[1]), [here[1]]
    if counts != [1] and engine.comm._by_nccl(engine.setup.device):
        raise ValueError(f"flows={tuple(counts)} divide what travels over gloo; on CUDA tune bucket_bytes alone")
    wanted = [start[0], *sorted(bucket_bytes)]
    sizes = distinct(att.rules, {name: p for p, name in engine.setup.names.items()}, wanted)
    return Tuner(att, start, sorted(sizes), counts, steps)
