"""Gradients: buckets launched as backward makes them, in the same order on every rank, and landed when it ends."""

import logging
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable

from ..buckets import is_view
from ..keeping import Joint, tensors_of
from .clock import BACKWARD as A_BACKWARD
from .clock import Clock
from .errands import Errand, end
from .gradients import GradientRoute, decide
from .leaves import LeafStreams
from .seeing.logbook import BACKWARD, Logbook

log = logging.getLogger("baguakit")


@dataclass(frozen=True)
class BackwardHooks:
    """The questions and news of a backward.

    Attributes:
        check: called before the first gradient of a backward; raises if the buckets do not fit any more.
        scale: the loss scale in force, or None.
        landed: called when gradients have landed.
    """

    check: Callable[[], None]
    scale: Callable[[], Tensor | None]
    landed: Callable[[], None]


class Backward:
    """The state of the backward under way.

    A backward is one task of autograd's engine, known by its number. An exception ends a task without a word: autograd
    forgets its callbacks, which is noticed when the next one begins, or the optimizer steps.

    Args:
        routes: the rules on gradients, in order.
        names: of the trainable parameters, for messages.
        clock: read for the step and for `no_sync`.
        hooks: what it asks and tells.
        log: told when backward begins and ends.
    """

    def __init__(
        self,
        routes: Sequence[GradientRoute],
        names: dict[Tensor, str],
        clock: Clock,
        hooks: BackwardHooks,
        log: Logbook,
    ) -> None:
        self.routes, self.names, self.clock, self.hooks, self.log = routes, names, clock, hooks, log
        self.task: int | None = None  # of the backward under way, or that has failed
        self.mark: Callable[[], Any] = lambda: None  # returns None once autograd has forgotten that backward
        self.acting: list[GradientRoute] = []
        self.order: list[tuple[GradientRoute, int]] = []  # the buckets of this backward, in the order of their launch
        self.next = 0
        self.missing: list[set[Tensor]] = []
        self.places: dict[Tensor, list[int]] = {}
        self.joint: Joint | None = None  # decides what the flights of this backward keep, if they must together
        self.decision: Errand | None = None
        self.dropped = False  # the latest backward failed on some rank: no rank steps with it
        self.passes = 0  # backward passes landed since the last step
        self.reached: set[Tensor] = set()  # has a gradient of this backward
        self.touched: set[Tensor] = set()  # has a gradient since the last landing, under no_sync as well
        self.missed: set[Tensor] = set()  # had none at a landing since the last optimizer step
        self.leaves = LeafStreams()

    def gradient_ready(self, p: Tensor) -> None:
        """A gradient has been accumulated into `p.grad`."""
        self.leaves.note(p)
        if not self.clock.synchronising:
            self.touched.add(p)
            return
        task = torch._C._current_graph_task_id()
        if task != self.task:
            self.begin(task)
        self.touched.add(p)
        self.reached.add(p)
        if self.passes:
            self.check_another_pass(p)
        for place in self.places.get(p, ()):
            self.missing[place].discard(p)
        while self.next < len(self.order) and not self.missing[self.next]:
            self.launch_next()

    def begin(self, task: int) -> None:
        """The first gradient of a backward."""
        self.hooks.check()
        if self.task is not None and self.mark() is not None:  # this one runs within that one: reentrant checkpointing
            self.start_over()
        self.end_failed()
        self.task, self.reached = task, set()
        self.log.begin(BACKWARD)
        self.prepare()
        self.missing = [set(route.buckets[i].params) for route, i in self.order]
        self.places = {}
        for place, params in enumerate(self.missing):
            for p in params:
                self.places.setdefault(p, []).append(place)
        self.mark = at_end(lambda: self.end(task))

    def prepare(self) -> None:
        """Find out which buckets will be launched, and whether they decide together."""
        self.next = 0
        self.acting = [route for route in self.routes if route.rule.acts(self.clock.step)]
        self.order = [(route, i) for route in self.acting for i in range(len(route.buckets))]
        if not self.must_decide_together():
            self.joint = None
        elif self.joint is None:
            self.joint = Joint()

    def must_decide_together(self) -> bool:
        """Return whether what one flight of this backward keeps depends on the results of others."""
        if not any(True for route in self.acting for _ in tensors_of(dict(enumerate(route.states)))):
            return False
        return len(self.order) > 1 or not all(route.rule.stage.agrees and route.guards for route in self.acting)

    def announce(self) -> None:
        """Tell ranks that have run out of batches what comes; if that raises, it does so on all ranks."""
        try:
            self.clock.ask(A_BACKWARD)
        except BaseException:
            self.touched = set()
            self.start_over()
            raise

    @torch.no_grad()
    def launch_next(self) -> None:
        if self.next == 0:
            self.announce()
        route, i = self.order[self.next]
        self.next += 1
        route.track.lane.follow(self.leaves.of(route.buckets[i].params))
        route.launch_bucket(i, self.clock.step, self.touched, self.hooks.scale(), self.joint)

    @torch.no_grad()
    def end(self, task: int) -> None:
        """Backward has ended: launch the buckets that miss a gradient, and land all."""
        if task != self.task:
            return
        self.log.end(BACKWARD)
        if not self.order:
            self.announce()
        while self.next < len(self.order):
            self.launch_next()
        self.settled()
        self.decide()
        self.task = None
        failed = [route.arrive_all() for route in self.acting]
        self.leaves.landed({route.track.lane for route in self.acting})
        self.dropped = any(failed)
        if self.dropped and self.hooks.scale() is None:
            log.warning("a backward failed on another rank: this rank drops its gradients, and no rank steps with them")
            self.drop_gradients()
        else:
            for route in self.acting:
                route.land(self.touched)
                self.missed |= set(route.params()) - self.touched
            self.passes += 1
        self.touched.clear()
        self.hooks.landed()

    def decide(self) -> None:
        """Keep what the flights of this backward would, if all their results are finite. Nobody waits for it."""
        if self.joint is not None:
            self.decision = decide(self.joint, self.acting)

    def settled(self) -> None:
        """Wait until the states are those after the latest backward."""
        decision, self.decision = self.decision, None
        if decision is not None:
            end(decision)

    def drop_gradients(self) -> None:
        """Drop all gradients: a backward has failed, here or on another rank, and no rank steps with it."""
        for p in self.names:
            p.grad = None

    @torch.no_grad()
    def end_failed(self) -> bool:
        """If a backward has failed here, let the other ranks, which wait for its buckets, drop their step as well.

        Returns whether they do.

        Raises:
            PeerError: they cannot: they may have stepped already.
        """
        if self.task is None:
            return False
        started, self.touched = self.next, set()
        if started == 0:
            self.announce()
        if not self.order or self.acting[0].track.comm.size == 1:
            self.start_over()
            return False
        self.task = None
        if why := self.why_not_dropped():
            raise self.acting[0].monitor.fail(
                f"a backward failed on rank {self.acting[0].track.comm.rank} after {started} of {len(self.order)} "
                f"buckets had been launched, and was caught; the step cannot be dropped on all ranks: {why}"
            )
        while self.next < len(self.order):
            route, i = self.order[self.next]
            self.next += 1
            route.launch_failed(i, self.clock.step, self.joint)
        self.settled()
        self.decide()
        for route in self.acting:
            route.arrive_all()
        log.warning("a backward failed on this rank: all ranks drop the step")
        return True

    def start_over(self) -> None:
        """Forget what this backward has launched."""
        self.task = None
        for route in self.acting:
            route.drop()
        if self.joint is not None:
            self.joint.forget()

    def why_not_dropped(self) -> str:
        """Return why the other ranks cannot be told to drop a step, or ""."""
        views = [
            is_view(p.grad, view)
            for route, i in self.order[: self.next]
            for p, view in zip(route.buckets[i].params, route.buckets[i].views, strict=True)
        ]
        if self.next == len(self.order):
            return "they have all the gradients; let the exception end this rank, and resume from a checkpoint"
        if any(views):
            return "its gradients lie in the buckets; use zero_grad(set_to_none=True)"
        if self.acting[0].buckets[0].flat.is_cuda and self.hooks.scale() is None:
            return "on CUDA ranks run ahead of their gradients; pass attach a GradScaler, or do not catch the exception"
        return ""

    def check_another_pass(self, p: Tensor) -> None:
        """Raise a RuntimeError if this backward, the second or later of a step, cannot be averaged after the first.

        A gradient that the first has missed means another round, which only stages without memory bear. A rule that
        puts something else in the place of the gradient wants it gone before gradients are added again.
        """
        for route in self.acting:
            stage = route.rule.stage
            if p in self.missed and stage.remembers() and any(p is q for q in route.params()):
                raise RuntimeError(
                    f"{self.names[p]} got a gradient after a backward without it was averaged by {route.rule!r}, "
                    "which remembers what it did; use checkpoint(use_reentrant=False), or att.no_sync() for all but "
                    "the last backward of a step"
                )
            for place in self.places.get(p, ()) if route.flown and not stage.averages else ():
                other, i = self.order[place]
                if other is route and route.landed_on(i, self.reached):
                    raise RuntimeError(
                        f"a second backward has added gradients to what {route.rule!r} put in place of those of the "
                        "first; use att.no_sync() for all but the last backward of a step, or zero_grad() between them"
                    )

    def step_ended(self) -> None:
        """The optimizer has stepped."""
        self.missed.clear()
        self.passes = 0
        for route in self.routes:
            route.step_ended()


@dataclass(eq=False)
class Callback:
    """Called by autograd when a backward has ended."""

    act: Callable[[], None]

    def __call__(self) -> None:
        self.act()


def at_end(act: Callable[[], None]) -> "weakref.ref[Callback]":
    """Let autograd call `act` when the backward under way has ended, and hold the only reference to it."""
    callback = Callback(act)
    Variable._execution_engine.queue_callback(callback)
    return weakref.ref(callback)
