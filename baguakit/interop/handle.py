"""The handle of stages in the hooks of DDP or FSDP2."""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd import Variable

from ..buckets import real, values
from ..comm import Comm
from ..flights import Clock, Decisions, opened, sealed
from ..keeping import Joint
from ..report import Report, make_report
from ..rules import Rule
from ..runtime import Runtime, Setup, as_time, check_scaler, warm_up
from ..stages import Stage, State
from .runners import HookRunner


class Handle:
    """Stages at work in the hooks of a wrapped model; made by `ddp` and `fsdp`. A context manager: leaving it detaches.

    A *round*, and a *step*, is a backward whose gradients are averaged.
    """

    _alike: ClassVar[bool] = True  # a stage that agrees gives all ranks the same result

    def __init__(self, make: Callable[[], Setup], comm: Comm, timeout: Any) -> None:
        if comm.membership.changes:
            raise ValueError("DDP and FSDP keep their own groups, which cannot change; bk.elastic needs bk.attach")
        self._clock, self._task = Clock(), -1
        self._runtime = Runtime("hook", make, comm, timeout, self._aborted)
        self._setup, self._channel = self._runtime.setup, self._runtime.channels[0]
        rules, names = self._setup.rules, self._setup.names
        self._decisions = Decisions(None, self._alike)
        with self._runtime.or_abandon():
            # The buckets are not known yet: none is larger than all parameters of a dtype.
            for dtype in {p.dtype for p in names}:
                most = values(p for p in names if p.dtype == dtype)
                largest = torch.empty((), dtype=dtype.to_real(), device=self._setup.device).expand(most)
                warm_up([rule.stage for rule in rules], [largest], self._channel)
        self._runners = [HookRunner(i, rule, [], self._channel, names=names) for i, rule in enumerate(rules)]

    # For the user

    @property
    def step(self) -> int:
        """Return the number of backward passes whose gradients have been averaged."""
        return self._clock.step

    def report(self) -> Report:
        """Return bytes, formats and seconds exposed, by rule and bucket, since the buckets were made. Local."""
        steps = max([0, *(each.launches for runner in self._runners for each in runner.ledgers)])
        return make_report(self._runners, [self._channel], steps)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the stages: tensors by parameter name, and counters, as of `bk.attach`. Local.

        Each rank saves its own.

        Raises:
            PeerError: a rank is at fault; on a GPU, half a sum may have reached the state.
        """
        self._runtime.monitor.check()
        self._decisions.settle()
        rules = {str(i): runner.saved() for i, runner in enumerate(self._runners)}
        state = {"version": 1, "ranks": self._channel.comm.size, "step": self._clock.step, "rules": rules}
        return sealed(state, self._runtime)

    def load_state_dict(self, state: dict[str, Any], strict: bool = True) -> None:
        """Continue from the point where `state_dict` was called. Local, but every rank calls it, between two backward
        passes.

        The tensors are read when the buckets next come: do not change them until the next backward has ended. `strict`
        and what is raised are as of `Attachment.load_state_dict`.
        """
        state = opened(state, self._runtime, self._runners, strict)
        self._decisions.settle()
        for i, runner in enumerate(self._runners):
            runner.recall(state["rules"][str(i)], state["ranks"] == self._channel.comm.size)
        self._clock.step = int(state["step"])

    def detach(self) -> None:
        """Take the hooks out, wait for what is in the air, and close groups and threads. Idempotent."""
        self._runtime.finish(self._drain)

    def __repr__(self) -> str:
        return self._runtime.describe("Handle", (len(each.buckets) for each in self._runners), self.step)

    def __enter__(self) -> "Handle":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None:
            self.detach()
        else:
            self._runtime.abandon(error)

    # For hooks

    def _begin(self) -> HookRunner | None:
        """Return the runner whose rule acts in the backward under way, if any. Called by each hook."""
        self._runtime.monitor.check()
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._decisions.settle()
            if self._task != -1:  # an exception ended the backward before
                self._decisions.forget()
            self._task = task
            Variable._execution_engine.queue_callback(lambda: self._land(task))
        return next((runner for runner in self._runners if runner.rule.acts(self._clock.step)), None)

    def _take_off(self, runner: HookRunner, i: int, work: Callable[[Stage, Tensor, State, Comm], Any]) -> None:
        """Launch bucket `i` of a runner: its flights decide together if they remember something."""
        if runner.remembers_any and self._decisions.joint is None:
            self._decisions.joint = Joint()
        runner.take_off(i, self._clock.step, work, self._decisions.joint if runner.remembers_any else None)

    def _show_fault(self, x: Tensor) -> None:
        """Let the gradients `x`, which have landed, be NaN on a GPU if the monitor has given up by now."""
        if fault := self._channel.monitor.fault:
            fault.multiply_([real(x)])

    def _land(self, task: int) -> None:
        """Land all flights: backward has ended."""
        if task != self._task or self._runtime.over:
            return
        self._task = -1
        acting = [runner for runner in self._runners if runner.rule.acts(self._clock.step)]
        self._decisions.begin(acting)
        for runner in acting:
            runner.land()
        self._clock.step += 1

    def _drain(self) -> None:
        self._decisions.settle()
        for runner in self._runners:
            runner.drop()

    def _aborted(self) -> None:
        """Let no hook wait in vain: the groups have been aborted."""


def make_hook_setup(
    rules: tuple[Rule, ...],
    names: dict[Tensor, str],
    frozen: Sequence[str],
    device: torch.device,
    timeout: Any,
    scaler: Any,
    lines: Sequence[str],
) -> Setup:
    """Return the setup of a handle; `lines` is further text that must be the same on all ranks.

    Raises:
        TypeError, ValueError: `timeout` or `scaler` is invalid.
    """
    check_scaler(scaler, rules)
    lines = (*map(repr, rules), f"scaler={scaler is not None}", *lines)
    return Setup(rules, names, tuple(frozen), device, as_time(timeout), scaler, lines)
