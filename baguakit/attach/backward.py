"""Launch buckets of gradients in a backward pass, in the same order on every rank; land them when the pass ends."""

import logging
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from itertools import repeat
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable

from ..buckets import is_view
from ..flights import BACKWARD, GradientRunner, Life, RuleRunner, Turn, Weighing
from ..keeping import Joint, tensors_of
from ..lanes import current_stream
from .landings import GRAD, LeafStreams, within_backward
from .setup import AttachSetup

log = logging.getLogger("baguakit")
TRAINABLE = attrgetter("requires_grad")
OUTSIDE = -1  # autograd's task number when no backward runs


class Backward:
    """The current backward pass: a task of autograd's engine. The next backward or step notices that one has failed."""

    def __init__(self, life: Life[AttachSetup], landed: Callable[[list[int]], None]) -> None:
        self.life, self.clock, self.decisions = life, life.clock, life.decisions
        self.landed = landed  # called at the end with the ids of parameters whose gradients have landed
        self.runners: Sequence[GradientRunner] = []  # of the rules on gradients, in order
        self.task: int | None = None  # the number of the current backward, or of one that has failed
        self.mark: Callable[[], Any] = lambda: None  # returns None once autograd has discarded that backward
        self.next = 0  # the index in `order` of the next bucket to launch
        self.missing: list[set[Tensor]] = []  # by index in `order`: parameters whose gradients have not arrived
        self.places: dict[Tensor, list[int]] = {}  # for each parameter, the indices in `order` of its buckets
        self.frozen = False  # some parameters in the buckets of `order` are frozen
        self.dropped = False  # the latest backward failed on some rank, so that no rank uses its gradients
        self.divided = False  # some of the optimizers have stepped in this step, and others have not
        self.passes = 0  # backward passes landed since the last step
        self.reached: set[Tensor] = set()  # parameters with a gradient of this backward
        self.touched: set[Tensor] = set()  # parameters with a gradient since the last landing, even under no_sync
        self.leaves = LeafStreams() if current_stream(life.setup.device) is not None else None
        self.arrived: dict[Tensor, None] | None = None  # parameters in the order in which gradients arrive, if recorded
        self.first = True  # no backward has ended yet
        self.held: list[tuple[Tensor, Tensor]] = []  # parameters, and their values at the first backward
        self.weights: Weighing = lambda: None  # of all ranks in this backward
        self.weight: float | None = None  # of this rank in this step; None: no backward has averaged gradients

    def take(self, runners: Sequence[GradientRunner]) -> None:
        for runner, before in zip(runners, self.runners, strict=False):
            runner.flown = before.flown
        self.runners, self.names = runners, self.life.setup.names
        self.log: Any = self.life.log
        self.acting: list[GradientRunner] = []
        self.delay = 0  # of this backward's gradients: all acting rules have the same delay
        self.scale: Tensor | None = None  # of the loss of this backward
        self.order: list[tuple[GradientRunner, int]] = []  # the buckets of this backward, in the order of launch

    def gradient_ready(self, p: Tensor, final: bool) -> None:
        """Launch the buckets that have all their gradients, now that a gradient has come to `p.grad`.

        If not `final`, hooks may still change the gradient, so its buckets are launched at the end of backward.
        """
        if self.leaves is not None:
            self.leaves.note(p)
        if not self.clock.synchronising:
            self.touched.add(p)
            return
        task = torch._C._current_graph_task_id()
        if task != self.task:
            self.begin(task)
        self.touched.add(p)
        self.reached.add(p)
        if self.arrived is not None:
            self.arrived[p] = None
        if self.passes:
            self.check_another_pass(p)
        for place in self.places.get(p, ()) if final else ():
            self.missing[place].discard(p)
        while self.next < len(self.order) and not self.missing[self.next]:
            self.launch_next()

    def begin(self, task: int) -> None:
        if self.task is not None and self.mark() is not None:  # reentrant checkpointing: a backward within a backward
            self.start_over()
        self._begin(task)
        if torch.is_grad_enabled() and self.order:
            self.check_graph()
        if self.first and self.order:
            runner, i = self.order[-1]
            last = list(filter(TRAINABLE, runner.buckets[i].params))[-1:]
            self.held = [(p, p.detach().clone()) for p in last]
        at_end = partial(self.end, task)
        Variable._execution_engine.queue_callback(at_end)  # and autograd holds the only reference to it
        self.mark = weakref.ref(at_end)

    def check_graph(self) -> None:
        """Warn that `backward(create_graph=True)` averages gradients, not their graph. With a delay, raise an error."""
        if self.delay:
            raise RuntimeError(
                f"backward(create_graph=True) brings gradients with a graph, and {self.acting[0].rule!r} lands those "
                "of an earlier backward, without one; leave create_graph out, or give no delay="
            )
        warnings.warn(
            "gradients of backward(create_graph=True) land as the mean, with the graph of this rank: what a second "
            "backward() brings is averaged, and what torch.autograd.grad makes of them is of this rank alone; average "
            "that by bk.primitives.mean_",
            stacklevel=2,
        )

    @torch.no_grad()
    def average(self, params: Collection[Tensor]) -> None:
        """Average the gradients of `params` as if a backward had just accumulated them."""
        self._begin(OUTSIDE)
        self.touched.update(params)
        self.reached.update(params)
        for p in params if self.passes else ():
            self.check_another_pass(p)
        self.end(OUTSIDE)

    def _begin(self, task: int) -> None:
        check_unconverted(self.runners, self.names)
        self.end_failed()
        self.task, self.reached = task, set()
        self.begun = self.log.now()
        self.prepare()
        if self.clock.tell is None:  # else when ranks that have run out of batches know of this backward
            self.weigh()
        self.missing, self.places, self.frozen = [], {}, False
        for place, (runner, i) in enumerate(self.order):
            params = runner.buckets[i].params
            trainable = set(filter(TRAINABLE, params))
            self.frozen |= len(trainable) < len(params)
            self.missing.append(trainable)
            for p in trainable:
                self.places.setdefault(p, []).append(place)

    def prepare(self) -> None:
        """Determine the buckets to launch, and whether new states are held until all flights have ended."""
        setup = self.life.runtime.setup
        self.next, self.scale = 0, None if setup.scaler is None else setup.loss_scale()
        acting = [runner for runner in self.runners if runner.rule.acts(self.clock.step)]
        if acting != self.acting:
            self.decisions.settle()  # later decisions may be on another lane
            for runner in self.acting:
                if runner not in acting:
                    runner.drop()
        self.acting, self.delay = acting, acting[0].rule.delay if acting else 0
        if self.divided and self.delay and self.scale is None:  # a scaler may have skipped a step
            self.task = None
            raise RuntimeError(
                f"{acting[0].rule!r} lands gradients of an earlier backward, and the optimizers of a step have a "
                "backward each; attach each model with its own optimizer"
            )
        self.order = [(runner, i) for runner in acting for i in range(len(runner.buckets))]
        if len(self.order) > 1 or not all(each.rule.stage.same_on_all_ranks and each.guards for each in acting):
            self.hold_states()
        else:
            self.decisions.joint = None

    def weigh(self) -> None:
        if self.acting:
            mine = self.life.ask()
            self.weight, self.weights = (self.weight or 0.0) + mine, self.life.weigh(mine)
            for runner in self.acting:
                runner.weights = self.weights

    def hold_states(self) -> None:
        """Update states only after all flights have ended, when each rank knows which gradients any rank has."""
        states = [state for runner in self.acting for state in runner.states if state]
        remember = any(True for state in states for _ in tensors_of(state))
        self.decisions.joint = (self.decisions.joint or Joint()) if remember else None

    def announce(self) -> None:
        """In `join()`, announce a backward to ranks that have run out of batches. An error is raised on all ranks."""
        try:
            self.clock.announce(Turn.BACKWARD)
        except BaseException:
            self.touched = set()
            self.start_over()
            raise

    @torch.no_grad()
    def launch_next(self) -> None:
        if self.next == 0:
            self.announce()
            if self.clock.tell is not None:
                self.weigh()
        runner, i = self.order[self.next]
        params, whole = runner.buckets[i].params, not self.missing[self.next] and not self.frozen
        if any(map(is_, map(GRAD, params), repeat(None))):
            whole = False
            if gone := [p for p in params if p in self.reached and p.grad is None]:
                raise within_backward(f"{self.names[gone[0]]} has lost its gradient")
        self.next += 1
        if len(self.order) == 1 and not whole:
            self.hold_states()  # a state must not change if its gradient is missing
        if self.leaves is not None:
            self.leaves.follow(params, None if self.delay else runner.channel.lane)
        runner.launch_bucket(i, self.clock.step, self.touched, self.scale, self.decisions.joint, whole)

    @torch.no_grad()
    def end(self, task: int) -> None:
        """End a backward: launch the buckets that still lack gradients, and land all buckets."""
        if task != self.task:
            return
        self.log.parts.append((BACKWARD, self.begun, self.log.now()))
        for p, before in self.held:
            if not torch.equal(p.detach(), before):
                raise within_backward(f"{self.names[p]} has changed")
        self.first, self.held = False, []
        if not self.order:
            self.announce()
        while self.next < len(self.order):
            self.launch_next()
        self.task, landed = None, list[int]()
        self.dropped = self.life.land(self.acting, self.delay)
        if self.leaves is not None:
            self.leaves.landed({runner.channel.lane for runner in self.acting})
        if self.dropped and self.scale is None:
            log.warning("a backward failed on another rank: this rank drops its gradients, and no rank steps with them")
            self.drop_gradients()
        else:
            for runner in self.acting:
                landed += runner.land(self.scale)
            self.passes += 1
        self.touched.clear()
        self.landed(landed)

    def drop_gradients(self) -> None:
        for p in self.names:
            p.grad = None

    @torch.no_grad()
    def end_failed(self) -> bool:
        """End a backward that failed here: other ranks drop the step, or this raises. Return whether any waits."""
        if self.task is None:
            return False
        started, self.touched = self.next, set()
        if started == 0:
            self.announce()
        if not self.order or self.life.runtime.comm.size == 1:
            self.start_over()
            return False
        self.task = None
        if why := self.why_not_dropped():
            raise self.life.runtime.monitor.fail(
                f"a backward failed on rank {self.life.runtime.comm.rank} after {started} of {len(self.order)} "
                f"buckets had been launched, and was caught; the step cannot be dropped on all ranks: {why}"
            )
        self.launch_filled(failed=True)
        log.warning("a backward failed on this rank: all ranks drop the step")
        return True

    def launch_filled(self, failed: bool) -> bool:
        """Launch remaining buckets with zeros (NaN if `failed`). Return True if a backward is known to have failed."""
        for runner, i in self.order[self.next :]:
            self.next += 1
            runner.launch_filled(i, self.clock.step, self.decisions.joint, failed)
        return self.life.land(self.acting)

    def shadow(self) -> None:
        """On a rank without batches, launch zeros while other ranks run a backward. No gradient of this rank is set."""
        self.prepare()
        self.weigh()
        self.hold_states()
        failed = self.launch_filled(failed=False)
        for runner in self.acting:
            runner.flown = runner.flown or not failed

    def drop_failed(self) -> None:
        """If a backward failed on this rank and the error was caught, drop its gradients, and the step on all ranks."""
        if self.end_failed():
            self.dropped = True
            self.drop_gradients()

    def start_over(self) -> None:
        """Wait for the launched buckets of this backward, and discard their results."""
        self.task = None
        for runner in self.acting:
            runner.start_over()
        self.decisions.settle()  # decisions on earlier backward passes, which stay valid
        self.decisions.forget()

    def why_not_dropped(self) -> str:
        if self.delay:
            return "they step with delayed gradients; let the exception end this rank, and resume from a checkpoint"
        if self.next == len(self.order):
            return "they have all the gradients; let the exception end this rank, and resume from a checkpoint"
        launched = [runner.buckets[i] for runner, i in self.order[: self.next]]
        if any(is_view(p.grad, view) for each in launched for p, view in zip(each.params, each.views, strict=True)):
            return "its gradients lie in the buckets; use zero_grad(set_to_none=True)"
        if self.acting[0].channel.lane.clock.type == "cuda" and self.scale is None:
            return "on CUDA ranks run ahead of their gradients; pass attach a GradScaler, or do not catch the exception"
        return ""

    def check_another_pass(self, p: Tensor) -> None:
        """Raise a RuntimeError if this backward, not the first of a step, adds to a gradient that a rule replaced."""
        for runner, i in (self.order[place] for place in self.places.get(p, ())):
            replaces = runner.flown and (runner.rule.delay or not runner.rule.stage.averages)
            if replaces and runner.landed_on(i, self.reached):
                raise RuntimeError(
                    f"a second backward has added gradients to what {runner.rule!r} put in place of those of the "
                    "first; use att.no_sync() for all but the last backward of a step, or zero_grad() between "
                    "them; of several networks, freeze those that this backward is not for, or attach each model "
                    "with its own optimizer"
                )

    def step_ended(self) -> None:
        self.passes, self.divided, self.weight = 0, False, None
        for runner in self.runners:
            runner.step_ended()


def hooked(p: Tensor, engine: Any) -> Any:
    """Hook a parameter for `engine.backward`, after all hooks that may change the gradient; return the hook's handle.

    If a user has hooked it later, its bucket is launched at the end of this backward; then this hook is last again.
    """

    def accumulated(p: Any) -> None:
        hooks = p._post_accumulate_grad_hooks
        behind = next(reversed(hooks)) == handle.id
        if not behind:
            hooks[handle.id] = hooks.pop(handle.id)  # torch calls hooks in the order of insertion
        engine.backward.gradient_ready(p, behind)

    trains = p.requires_grad  # False for a frozen parameter of a loaded state, which torch would not hook
    handle: Any = p.requires_grad_().register_post_accumulate_grad_hook(accumulated)
    p.requires_grad_(trains)
    return handle


def check_unconverted(runners: Iterable[RuleRunner], names: dict[Tensor, str]) -> None:
    """Raise a RuntimeError if the dtype or device of a parameter of `runners` is no longer that of its bucket."""
    for bucket in [bucket for runner in runners for bucket in runner.buckets]:
        for p, view in zip(bucket.params, bucket.views, strict=True):
            if p.dtype is not view.dtype or p.device != view.device:
                raise RuntimeError(
                    f"parameter {names[p]} is {p.dtype} on {p.device} and was {view.dtype} on {view.device} when it "
                    "was attached; detach, convert the model, and attach again"
                )
