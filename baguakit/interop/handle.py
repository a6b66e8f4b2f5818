"""What a user holds of stages at work in somebody else's hooks, and what all such hooks share."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable

from ..attach.agreement import agree
from ..attach.checkpoint import check_saved
from ..attach.clock import Clock
from ..attach.monitor import LEFT, RAISED, Monitor
from ..attach.routes import Track, together
from ..attach.seeing.report import Report, make_report
from ..comm import Comm, store_of
from ..lanes import lane
from ..rules import Rule
from .routes import HookRoute


@dataclass(frozen=True, eq=False)
class Scheme:
    """What hooks will do, found out on each rank alone.

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

    def __init__(self, make: Callable[[], Scheme], comm: Comm) -> None:
        self._scheme, self._name = agree(comm, make)
        self._clock, self._task, self._over = Clock(), -1, False
        self._ends: list[Callable[[], Any]] = []  # take hooks out
        scheme = self._scheme
        store = store_of(comm.group, f"{self._name}/monitor") if comm.size > 1 else None
        loud = scheme.device.type == "cuda"
        self._monitor = Monitor(store, comm.rank, comm.size, scheme.timeout, self._abort, loud)
        self._track = Track(0, lane(scheme.device), comm)
        self._own: Comm | None = None
        self._monitor.start()
        with self._or_abandon():
            if comm.size > 1:
                self._own = comm.own(f"{self._name}/0", scheme.timeout, scheme.device)
                self._track = Track(0, self._track.lane, self._own)
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
        """What the stages remember: tensors by parameter name, and counters, as of `bk.attach`. Local.

        Each rank saves its own.
        """
        rules = {str(i): route.saved() for i, route in enumerate(self._routes)}
        return {"version": 1, "ranks": self._track.comm.size, "step": self._clock.step, "rules": rules}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken. Local, but every rank calls it, between two backward passes.

        The tensors are read when the buckets are next seen: leave them as they are until the next backward has ended.
        """
        check_saved(self._routes, state["rules"])
        for i, route in enumerate(self._routes):
            route.recall(state["rules"][str(i)], state["ranks"] == self._track.comm.size)
        self._clock.step = int(state["step"])

    def detach(self) -> None:
        """Take the hooks out, wait for what is in the air, and close groups and threads. Twice is as good as once."""
        if self._over:
            return
        with self._or_abandon():
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
            self._task = task
            Variable._execution_engine.queue_callback(lambda: self._land(task))
        return next((route for route in self._routes if route.rule.acts(self._clock.step)), None)

    def _land(self, task: int) -> None:
        """Backward has ended."""
        if task != self._task or self._over:
            return
        self._task = -1
        for route in self._routes:
            if route.rule.acts(self._clock.step):
                route.land()
        self._clock.step += 1

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
        for end in ends:
            end()

    def _abort(self) -> None:
        if self._own is not None:
            self._own.abort()

    def _close(self, wait: bool) -> None:
        self._track.lane.close(wait)
        if self._own is not None:
            self._own.close()
