"""The user's handle, the `Life` and the runner of stages in the hooks of DDP or FSDP2.

A hook passes buckets one by one, and may change them.
"""

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable

from ..arguments import message
from ..buckets import Bucket, values
from ..comm import Comm, check_device
from ..flights import Attached, Life, RuleRunner, load_bucket, save_runner, whole_of
from ..keeping import Joint
from ..lanes import Phases
from ..report import Report, Row, make_report
from ..rules import Algorithm, Rule, during_backward, rules_of
from ..runtime.agreement import Setup, check_scaler, check_weight
from ..runtime.runtime import or_abandon, warm_up
from ..stages import Stage, init_stage
from ..topology.chosen import chooses


@dataclass(eq=False)
class HookRunner(RuleRunner):
    """A runner of a rule on the buckets of a hook. When buckets change, each parameter keeps its part of the state."""

    names: dict[Tensor, str] = field(default_factory=dict)  # of parameters, or of tensors that stand for them
    # {bucket number in the hook: bucket number in this runner}. The runner numbers buckets in order of first launch.
    places: dict[int, int] = field(default_factory=dict)
    memory: Mapping[str, Any] | None = None  # from `save_runner`, for buckets that have not come since
    same_ranks: bool = True  # `memory` is from as many ranks
    remembers_any: bool = False  # its flights depend on the flights before them

    def fit(self, called: int, flat: Tensor, params: Sequence[Tensor]) -> int:
        """Use `flat`, which holds `params` in order, as the hook's bucket `called`. Return its number in the runner."""
        i = self.places.get(called, len(self.buckets))
        if i < len(self.buckets):
            if [*map(id, self.buckets[i].params)] == [*map(id, params)]:
                self.buckets[i] = Bucket.of(flat, params)
                return i
            self.forget_from(i)
        self.places[called] = i
        bucket, comm = Bucket.of(flat, params), self.channel.comm.for_flight(self.round, None, self.number(i), {})
        state = self.channel.together("new buckets", lambda _: init_stage(self.rule.stage, bucket, comm))
        self.buckets.append(bucket)
        self.states.append(state)
        self.remembers_any = self.remembers()
        self.ledgers.append(self.new_ledger(i))
        if self.memory is not None:
            load_bucket(self, i, self.names, self.memory, self.same_ranks)
        return i

    def forget_from(self, i: int) -> None:
        """Drop the buckets from `i` on, and keep the state of their parameters in `memory`."""
        self.memory, self.same_ranks = self.saved(), True
        for by_bucket in (self.buckets, self.states, self.ledgers):
            del by_bucket[i:]
        self.places = {called: place for called, place in self.places.items() if place < i}

    def saved(self) -> dict[str, Any]:
        """Return the state as `save_runner` does, with the loaded state of parameters that no bucket has held since."""
        self.drop()
        saved = save_runner(self, self.names)
        names: dict[str, Any] = {name: {} for name in self.names.values()}  # nothing is missing of one that never came
        before = {} if self.memory is None else self.memory["parameters"]
        saved["parameters"] = {**names, **before, **saved["parameters"]}
        if self.memory is not None:
            if whole := whole_of(self.memory, self.names) | set(saved.get("whole", ())):
                saved["whole"] = sorted(whole)
            if not self.buckets:
                saved["cut"], saved["own"] = self.memory["cut"], self.memory["own"]
        return saved

    def take_off(
        self,
        i: int,
        step: int,
        scale: Tensor | None,
        joint: Joint | None,
        mean: Callable[..., Tensor] | None = None,
        out: Tensor | None = None,
        landed: Callable[[Tensor], Any] = lambda x: None,
    ) -> None:
        """Launch bucket `i`, which is overwritten. The result, times the loss `scale`, is written to `out`, if given.

        `mean(stage, x, state, comm)` stands in for the stage. `landed(result)` ends the work, even after a failure.
        """
        if i in self.air:  # of a backward that an exception ended: its result is dropped
            self.arrive(i)
        state = self.states[i]

        def fly(stage: Stage, flat: Tensor, comm: Comm) -> Phases:
            target = flat if out is None else out
            try:
                with contextlib.nullcontext() if joint is None else joint.flight(state, self.guards, lambda: flat):
                    if scale is not None:
                        flat.mul_(scale.reciprocal())
                    by_stage = self.phases_of(stage, flat, state, comm)
                    result = (yield from by_stage) if mean is None else mean(stage, flat, state, comm)
                    if result is not target:
                        target.copy_(result)
                    if scale is not None:
                        target.mul_(scale)
            finally:
                landed(target)

        self.launch(i, step, fly)

    def arrive_all(self) -> bool:
        """Wait for every flight in the air, and end the round. Return False: failed backwards are not detected."""
        self.drop()
        self.round += 1
        if len(self.params()) == len(self.names):  # all have come
            self.memory = None
        return False


class HookLife(Life[Setup]):
    """The life of stages in the hooks of a wrapped model. Each backward with averaging counts as a step and a round."""

    def __init__(self, make: Callable[[], Setup], comm: Comm, timeout: Any) -> None:
        if comm.membership.changes:
            raise ValueError("DDP and FSDP keep their own groups, which cannot change; bk.elastic needs bk.attach")
        super().__init__("hook", make, comm, timeout)
        self.agree()
        self.task, setup, self.channel = -1, self.setup, self.runtime.channels[0]
        with or_abandon(self):
            # The buckets are not known yet, so warm up for the largest possible bucket: all parameters of a dtype.
            for dtype in {p.dtype for p in setup.names}:
                most = values(p for p in setup.names if p.dtype == dtype)
                largest = torch.empty((), dtype=dtype.to_real(), device=setup.device).expand(most)
                warm_up([rule.stage for rule in setup.rules], [largest], self.channel)
        self.runners = [HookRunner(i, rule, [], self.channel, names=setup.names) for i, rule in enumerate(setup.rules)]

    def make_setup(self) -> Setup:
        setup = self.make()
        check_device(self.comm.group, setup.device, self.comm.flows)
        check_scaler(setup.scaler, setup.rules)
        for rule in setup.rules:
            rule.stage.check(self.comm)
        first = f"scaler={setup.scaler is not None}", check_weight(setup.weight, setup.rules)
        return replace(setup, lines=(*map(repr, setup.rules), *first, *setup.lines))

    def begin(self) -> HookRunner | None:
        """Return the runner whose rule acts in this backward, if any. The first call in a backward begins a step."""
        self.runtime.monitor.check()
        task = torch._C._current_graph_task_id()
        if task != self.task:
            self.decisions.settle()
            if self.task != -1:  # an exception ended the backward before
                self.decisions.forget()
            self.task = task
            Variable._execution_engine.queue_callback(lambda: self.end(task))
            self.weights = self.weigh(self.ask())
            for runner in self.runners:
                runner.weights = self.weights
        return next(iter(self.acting()), None)

    def launch(self, runner: HookRunner, called: int, flat: Tensor, params: Sequence[Tensor], *how: Any) -> int:
        """Launch the bucket that the hook numbers `called`, by `take_off(…, *how)`. Return the runner's number."""
        i = runner.fit(called, flat, params)
        if not runner.ledgers[0].launches:
            self.since = self.clock.step
        if runner.remembers_any and self.decisions.joint is None:  # all flights of a backward change states, or none
            self.decisions.joint = Joint()
        joint = self.decisions.joint if runner.remembers_any else None
        runner.take_off(i, self.clock.step, self.setup.loss_scale(), joint, *how)
        return i

    def show_fault(self, x: Tensor) -> None:
        """On a GPU, set the landed gradients `x` (n,) to NaN if the monitor has found an error."""
        if fault := self.channel.monitor.fault:
            fault.multiply_([x])

    def end(self, task: int) -> None:
        """Land all flights, and count the step. Autograd calls this when the backward `task` has ended."""
        if task == self.task and not self.runtime.over:
            self.task = -1
            self.land(self.acting())
            self.weights()  # also if no rule has acted
            self.clock.step += 1

    def rows(self) -> Iterable[Row]:
        """Return the rows of a report that belong to no rule."""
        return ()

    def save(self, runner: Any, flights: bool, same_ranks: bool) -> dict[str, Any]:
        saved: dict[str, Any] = runner.saved()
        return saved

    def load(self, state: dict[str, Any], same_ranks: bool) -> None:
        """Store the saved states of the rules. Each bucket gets its part in its next `fit`."""
        for i, runner in enumerate(self.runners):
            saved = state["rules"][str(i)]
            if runner.buckets:
                runner.forget_from(0)
            runner.memory, runner.same_ranks = saved, same_ranks
            runner.round, runner.to_average = int(saved["round"]), []


class Handle(Attached):
    """The handle that `ddp` and `fsdp` return, for stages in a model's hooks. The end of its `with` block detaches.

    Each backward whose gradients are averaged is a *step* and a *round*.
    """

    _life: HookLife

    def report(self) -> Report:
        """Return a report of bytes, formats and exposed seconds since the buckets were made, by rule and bucket. Local.

        With `weights=` in `fsdp`, the report also has rows for the gathered weights, by FSDP module.
        """
        report = make_report(self._life)
        return replace(report, rows=(*report.rows, *self._life.rows()))


def rules_on_gradients(stage: Any) -> tuple[Rule, ...]:
    """Return the rules of a stage, or of an algorithm on gradients. Raise an error if a hook cannot run them."""
    if isinstance(stage, Stage):
        stage = during_backward(stage)
    elif not isinstance(stage, Algorithm | tuple | list) or not stage:
        raise TypeError(message("stage", "a stage such as Mean(), or an algorithm on gradients", stage))
    rules = rules_of(stage, name="stage")
    for i, rule in enumerate(rules):
        if rule.what == "data":
            raise TypeError(f"{rule!r} acts on weights, which gradient hooks do not see; use bk.attach(model, …)")
        if rule.delay:
            raise ValueError(
                f"{rule!r} lands gradients in a later backward, and a hook returns those of its own; use bk.attach, or "
                "omit delay="
            )
        if rule.where is not None:
            raise ValueError(f"{rule!r} acts on some parameters, hooks on whole buckets; use bk.attach, or omit where=")
        if chooses(rule.stage):
            raise ValueError(f"{rule!r} must know the first bucket, and a hook does not name it; use bk.attach")
        for other in rules[:i]:
            if rule.overlaps(other):
                raise ValueError(f"{other!r} and {rule!r} act in the same steps; separate them with start= and stop=")
    return rules
