"""The handle of stages at work in the hooks of DDP or FSDP2, and the parts that all such hooks share."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd import Variable

from ..attach.agreement import agree
from ..attach.checkpoint import check_saved
from ..attach.clock import Clock
from ..attach.errands import Errand, end, together
from ..attach.gradients import decide
from ..attach.records import LEFT, RAISED
from ..attach.routes import Track
from ..attach.seeing.report import Report, make_report
from ..attach.start import own_comm, start_monitor, warm_up
from ..attach.state_checks import check_state
from ..comm import FLAT, Comm, abort_all, error_in
from ..keeping import Joint
from ..lanes import lane
from ..rules import Rule
from .routes import HookRoute


@dataclass(frozen=True, eq=False)
class Scheme:
    """The plan of hooks, found out on each rank alone.

    Attributes:
        rules: on gradients, none in the same steps as another.
        names: of the parameters in the buckets, or of what stands for them.
        device: where gradients are.
        lines: what else must be the same on all ranks.
    """

    rules: tuple[Rule, ...]
    names: dict[Tensor, str]
    device: torch.device
    timeout: timedelta
    scaler: Any
    lines: tuple[str, ...]

    def described(self) -> list[str]:
        """The scheme in lines of text that must be the same on all ranks."""
        return [*map(repr, self.rules), f"scaler={self.scaler is not None}", *self.lines]


class Handle:
    """Stages at work in the hooks of a wrapped model; made by `ddp` and `fsdp`. A context manager: leaving it detaches.

    Its clock: a *round*, and a *step*, is a backward whose gradients are averaged.
    """

    _alike: ClassVar[bool] = True  # a stage that agrees brings all ranks the same

    def __init__(self, make: Callable[[], Scheme], comm: Comm, timeout: Any) -> None:
        self._clock, self._task, self._over = Clock(), -1, False
        self._ends: list[Callable[[], Any]] = []  # take hooks out
        self._own: Comm | None = None
        self._joint = Joint()
        self._decision: Errand | None = None  # on what the flights of the latest backward keep
        name, self._monitor = start_monitor(comm, "hook", timeout, self._abort, self._broken)
        try:
            self._scheme = scheme = agree(self._monitor, make)
        except BaseException:  # which all ranks raise
            self._over = True
            self._monitor.leave(LEFT)
            raise
        self._monitor.device = scheme.device
        self._remembers = any(rule.stage.remembers() for rule in scheme.rules)
        self._track = Track(0, lane(scheme.device), comm)
        with self._or_abandon():
            if comm.size > 1:
                parts = {FLAT}.union(*(rule.stage.wants_groups() for rule in scheme.rules))
                self._own = own_comm(comm, name, scheme.timeout, scheme.device, self._monitor, parts)
                self._track = Track(0, self._track.lane, self._own)
            # What the buckets will be, nobody knows yet: no larger than all parameters of a dtype.
            for dtype in {p.dtype for p in scheme.names}:
                values = sum(p.numel() for p in scheme.names if p.dtype == dtype)
                most = torch.empty((), dtype=dtype, device=scheme.device).expand(values)
                warm_up([rule.stage for rule in scheme.rules], [most], self._track.comm, self._monitor)
        self._routes = [
            HookRoute(i, rule, [], self._track, self._monitor, names=scheme.names)
            for i, rule in enumerate(scheme.rules)
        ]

    # What a user asks

    @property
    def step(self) -> int:
        """How many backward passes have had their gradients averaged."""
        return self._clock.step

    def report(self) -> Report:
        """Bytes sent and seconds exposed, by rule and bucket, since the buckets were cut. Local; print it."""
        steps = max([0, *(count for route in self._routes for count in route.launches)])
        return make_report(self._routes, [self._track], None, steps)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the stages: tensors by parameter name, and counters, as of `bk.attach`. Local.

        Each rank saves its own.
        """
        self._settled()
        rules = {str(i): route.saved() for i, route in enumerate(self._routes)}
        return {"version": 1, "ranks": self._track.comm.size, "step": self._clock.step, "rules": rules}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken. Local, but every rank calls it, between two backward passes.

        The tensors are read when the buckets are next seen: leave them as they are until the next backward has ended.
        """
        check_state(state)
        check_saved(self._routes, state["rules"])
        self._settled()
        for i, route in enumerate(self._routes):
            route.recall(state["rules"][str(i)], state["ranks"] == self._track.comm.size)
        self._clock.step = int(state["step"])

    def detach(self) -> None:
        """Take the hooks out, wait for what is in the air, and close groups and threads. Twice is as good as once."""
        if self._over:
            return
        with self._or_abandon():
            self._settled()
            for route in self._routes:
                route.drop()
        self._end()
        self._monitor.leave(LEFT)
        self._close(wait=True)

    def __enter__(self) -> "Handle":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.detach()
        else:
            self._abandon(error)

    # What hooks call

    def _begin(self) -> HookRoute | None:
        """A hook is at work in a backward: the route that acts in it, if any."""
        self._monitor.check()
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._settled()
            if self._task != -1:  # an exception ended the backward before
                self._joint.forget()
            self._task = task
            Variable._execution_engine.queue_callback(lambda: self._land(task))
        return next((route for route in self._routes if route.rule.acts(self._clock.step)), None)

    def _land(self, task: int) -> None:
        """Backward has ended."""
        if task != self._task or self._over:
            return
        self._task = -1
        acting = [route for route in self._routes if route.rule.acts(self._clock.step)]
        if self._remembers and acting:
            self._decision = decide(self._joint, acting, self._alike)
        for route in acting:
            route.land()
        self._clock.step += 1

    def _settled(self) -> None:
        """Wait until what stages remember is as after the latest backward."""
        decision, self._decision = self._decision, None
        if decision is not None:
            end(decision)

    def _scale(self) -> Tensor | None:
        scaler = self._scheme.scaler
        return scaler._scale if scaler is not None and scaler.is_enabled() else None

    def _together(self, what: str, work: Callable[[Comm], Any]) -> Any:
        return together(what, work, self._track, self._monitor)

    # The end

    @contextlib.contextmanager
    def _or_abandon(self) -> Any:
        try:
            yield
        except BaseException as error:
            self._abandon(error)
            raise

    def _abandon(self, error: BaseException) -> None:
        """End without waiting for anybody, and tell the others why."""
        if self._over:
            return
        self._end()
        self._monitor.leave(RAISED, f"{type(error).__name__}: {error}")
        self._abort()
        self._close(wait=False)

    def _end(self) -> None:
        self._over = True
        ends, self._ends = self._ends, []
        for take_out in ends:
            take_out()

    def _abort(self) -> None:
        if self._own is not None:
            abort_all(self._own.groups())

    def _broken(self) -> str:
        return "" if self._own is None else error_in(self._own.groups())

    def _close(self, wait: bool) -> None:
        self._track.lane.close(wait)
        if self._own is not None:
            self._own.close()
