"""Gradients: buckets launched as backward makes them, in the same order on every rank, and landed when it ends."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable

from ..buckets import is_view
from ..comm import Comm
from .clock import Clock
from .routes import Route, through
from .seeing.logbook import BACKWARD, Logbook


class GradientRoute(Route):
    """A rule on gradients. Beside its last bucket travels a byte a parameter: whether any rank has a gradient."""

    used: Tensor | None = None
    untouched: list[tuple[Tensor, Tensor]]  # views that are gradients without being touched, and what they held

    def launch_bucket(self, i: int, step: int, touched: set[Tensor], scale: Tensor | None) -> None:
        """Launch bucket `i` with the gradients there are; one that is missing counts as zero."""
        if i in self.air:  # of a backward that an exception ended: its result is forgotten
            self.arrive(i)
        if i == 0:
            self.untouched = []
        bucket, stage, state = self.buckets[i], self.stage(i), self.states[i]
        flags = [has_gradient(p, touched) for p in self.params()] if i == len(self.buckets) - 1 else None
        idle = [v for p, v in zip(bucket.params, bucket.views, strict=True) if p not in touched and is_view(p.grad, v)]

        def work(flat: Tensor, comm: Comm) -> Tensor:
            bucket.load("grad")
            self.untouched += [(view, view.clone()) for view in idle]
            self.used, later = begin_flags(flags, flat, comm)
            through(stage, flat, state, comm, scale)
            if later is not None:
                later.wait()
            return flat

        self.launch(i, step, work)

    def land(self, touched: set[Tensor]) -> None:
        """Wait for all buckets; let the gradients that some rank has be views of them."""
        for i in range(len(self.buckets)):
            self.arrive(i)
        mine = [has_gradient(p, touched) for p in self.params()]
        # Only a rank that misses a gradient asks the device whether another has one.
        used = mine if all(mine) or self.used is None else [bool(u) for u in self.used.tolist()]
        for bucket in self.buckets:
            here, used = used[: len(bucket.params)], used[len(bucket.params) :]
            kept = {view.data_ptr() for view, here_used in zip(bucket.views, here, strict=True) if not here_used}
            for view, held in self.untouched:
                if view.data_ptr() in kept:
                    view.copy_(held)
            bucket.store("grad", only=None if all(here) else here)
        self.round += 1


def has_gradient(p: Tensor, touched: set[Tensor]) -> bool:
    """Whether this rank has a gradient for `p` to average."""
    return p in touched and p.grad is not None


def begin_flags(flags: list[bool] | None, like: Tensor, comm: Comm) -> tuple[Tensor | None, Any]:
    """Begin to find out which parameters have a gradient on some rank: the flags, and the work to wait for."""
    if flags is None or comm.size == 1:
        return None, None
    if all(flags):  # nearly always; and then nothing is copied to the device
        used = torch.ones(len(flags), dtype=torch.uint8, device=like.device)
    else:
        used = torch.tensor(flags, dtype=torch.uint8).to(like.device, non_blocking=True)
    return used, comm.all_reduce_later(used, dist.ReduceOp.MAX)


class Backward:
    """What has become of the backward under way.

    A backward is one task of autograd's engine, known by its number: an exception ends a task without a word, and the
    next one begins afresh.

    Args:
        routes: the rules on gradients, in order.
        names: of the trainable parameters, for messages.
        clock: read for the step and for `no_sync`.
        scale: the loss scale in force, or None.
        landed: called when gradients have landed.
        log: told when backward begins and ends.
    """

    def __init__(
        self,
        routes: Sequence[GradientRoute],
        names: dict[Tensor, str],
        clock: Clock,
        scale: Callable[[], Tensor | None],
        landed: Callable[[], None],
        log: Logbook,
    ) -> None:
        self.routes, self.names, self.clock, self.scale, self.landed = routes, names, clock, scale, landed
        self.log = log
        self.task = -1
        self.order: list[tuple[GradientRoute, int]] = []  # the buckets of this backward, in the order of their launch
        self.next = 0
        self.missing: list[set[Tensor]] = []
        self.places: dict[Tensor, list[int]] = {}
        self.touched: set[Tensor] = set()  # has a gradient since the last landing, under no_sync as well
        self.missed: set[Tensor] = set()  # had none at a landing since the last optimizer step

    def gradient_ready(self, p: Tensor) -> None:
        """A gradient has been accumulated into `p.grad`."""
        self.touched.add(p)
        if not self.clock.synchronising:
            return
        task = torch._C._current_graph_task_id()
        if task != self.task:
            self.begin(task)
        if p in self.missed:
            self.refuse_another_round(p)
        for place in self.places.get(p, ()):
            self.missing[place].discard(p)
        while self.next < len(self.order) and not self.missing[self.next]:
            self.launch_next()

    def begin(self, task: int) -> None:
        """The first gradient of a backward."""
        self.task, self.next = task, 0
        self.log.begin(BACKWARD)
        routes = [route for route in self.routes if route.rule.acts(self.clock.step)]
        self.order = [(route, i) for route in routes for i in range(len(route.buckets))]
        self.missing = [set(route.buckets[i].params) for route, i in self.order]
        self.places = {}
        for place, params in enumerate(self.missing):
            for p in params:
                self.places.setdefault(p, []).append(place)
        Variable._execution_engine.queue_callback(lambda: self.end(task))

    @torch.no_grad()
    def launch_next(self) -> None:
        route, i = self.order[self.next]
        self.next += 1
        route.launch_bucket(i, self.clock.step, self.touched, self.scale())

    @torch.no_grad()
    def end(self, task: int) -> None:
        """Backward has ended: launch the buckets that miss a gradient, and land all."""
        if task != self.task:
            return
        self.task = -1
        self.log.end(BACKWARD)
        while self.next < len(self.order):
            self.launch_next()
        routes = dict.fromkeys(route for route, _ in self.order)
        for route in routes:
            route.land(self.touched)
            self.missed |= set(route.params()) - self.touched
        self.touched.clear()
        self.landed()

    def refuse_another_round(self, p: Tensor) -> None:
        """A gradient that an earlier backward had missed means another round, which only stages without memory bear."""
        for route in self.routes:
            if route.rule.stage.remembers() and any(p is q for q in route.params()):
                raise RuntimeError(
                    f"{self.names[p]} got a gradient after a backward without it was averaged by {route.rule!r}, "
                    "which remembers what it did; use checkpoint(use_reentrant=False), or att.no_sync() for all but "
                    "the last backward of a step"
                )

    def step_ended(self) -> None:
        """The optimizer has stepped."""
        self.missed.clear()
