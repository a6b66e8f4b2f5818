"""The works of an attachment: its groups, lanes, hooks and monitor, from their making to their end."""

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..comm import FLAT, Comm, abort_all, error_in
from ..lanes import lane
from .agreement import agree, take_from
from .backward import Backward, BackwardHooks
from .checkpoint import load_routes, save_routes
from .clock import Clock
from .conflicts import check_others
from .errands import together
from .freerunning import FreeRunner
from .gradients import GradientRoute
from .plan import Plan, parts_of, track_of
from .records import LEFT, RAISED
from .recutting import check_kinds, keep_up, recut
from .routes import Route, Track, WeightRoute, buckets_of
from .seeing.logbook import Logbook, part_of
from .start import own_comm, start_monitor, warm_up
from .steps import Steps, and_then
from .strangers import Strangers

_at_work: "weakref.WeakSet[Engine]" = weakref.WeakSet()


class Engine:
    """Everything that carries out a plan on this rank.

    Attributes:
        plan: what is carried out; another one when parameters come or go.
        routes: a rule with its buckets, each.
        tracks: a lane and its groups, each: one for what stays within a step, another for what flies on.
        host: a group that moves CPU tensors, for free-running rules.
        make: makes the plan, with `bucket_bytes=` for another size.
        comm: the group that was given.
        strangers: optimizers that step the model's parameters and are not attached.
        since: the step at which the buckets were cut.
        log: what training did since then.
        tuned: the bucket size and the flows that tuning has ended with, if it has: part of the state.
        listeners: called whenever a step has ended.
    """

    def __init__(self, make: Callable[..., Plan], comm: Comm, timeout: Any) -> None:
        self.make, self.comm = make, comm
        self.tuned: dict[str, int] | None = None
        self.listeners: list[Callable[[], None]] = []
        self.clock, self.over = Clock(), False
        self._hooks: list[Any] = []
        self.tracks: list[Track] = []
        self.host: Comm | None = None
        self.runners: list[FreeRunner] = []
        self.name, self.monitor = start_monitor(comm, "attach", timeout, self._abort, self._broken)
        self.plan = self._agree()
        try:
            self._make_tracks(comm)
            if self.plan.broadcast:
                self.together("broadcast", lambda comm: take_from(0, self.plan, comm))
            self.hook()
            self.steps.launch_between()
        except BaseException as error:
            self.abandon(error)
            raise
        _at_work.add(self)

    # Made once, in this order, alike on all ranks

    def make_plan(self, make: Callable[[], Plan] | None = None) -> Plan:
        """The plan of this rank, checked beside those of other attachments."""
        plan = (make or self.make)()
        check_others(plan, [other.plan for other in _at_work if other is not self and not other.over])
        return plan

    def _agree(self) -> Plan:
        try:
            plan = agree(self.monitor, self.make_plan)
        except BaseException:  # which all ranks raise
            self.over = True
            self.monitor.leave(LEFT)
            raise
        self.monitor.device = plan.device
        return plan

    def _make_tracks(self, comm: Comm) -> None:
        plan = self.plan
        free = any(rule.window == "free_running" for rule in plan.rules)
        for number in range(1 + any(map(track_of, plan.rules))):
            name, parts = f"{self.name}/{number}", parts_of(plan, number)
            own = own_comm(comm, name, plan.timeout, plan.device, self.monitor, parts)
            self.tracks.append(Track(number, lane(plan.device), own))
        if free:
            flat, cpu = Comm(comm.group), torch.device("cpu")
            self.host = own_comm(flat, f"{self.name}/host", plan.timeout, cpu, self.monitor, {FLAT})

    def _make_route(self, i: int) -> Route:
        rule = self.plan.rules[i]
        track = self.tracks[track_of(rule)]
        kind = GradientRoute if rule.what == "grad" else WeightRoute
        return kind(i, rule, buckets_of(self.plan.cuts[i], rule, track.comm), track, self.monitor)

    def cut(self) -> None:
        """Cut the buckets of the plan."""
        plan, host, self.since = self.plan, self.host, self.clock.step
        self.log = Logbook(plan.device, on=self.tracks[0].comm.size > 1)
        self.routes = [self._make_route(i) for i in range(len(plan.rules))]
        gradients = [r for r in self.routes if isinstance(r, GradientRoute)]
        weights = [r for r in self.routes if isinstance(r, WeightRoute)]
        free = [r for r in weights if r.rule.window == "free_running"]
        if host and not self.runners:
            self.runners = [FreeRunner(route, host, self.monitor) for route in free]
        for runner, route in zip(self.runners, free, strict=True):
            runner.route = route  # new buckets; an agreement under way stays
        self.steps = Steps(weights, self.runners, plan.optimizers, self.clock, self.log)
        hooks = BackwardHooks(partial(check_kinds, self, gradients), self._scale, self._gradients_landed)
        self.backward = Backward(gradients, plan.names, self.clock, hooks, self.log)
        for each in self.routes:
            warm_up([each.rule.stage], [bucket.flat for bucket in each.buckets], each.track.comm, self.monitor)
            each.make_states()

    def hook(self) -> None:
        """Cut the buckets of the plan, and hook the parameters and optimizers that it speaks of."""
        self.cut()
        plan = self.plan
        params = dict.fromkeys(p for route in self.backward.routes for p in route.params())
        self._hooks += [p.register_post_accumulate_grad_hook(self._gradient_ready) for p in params]
        for optimizer in plan.optimizers:
            before: Any = optimizer.register_step_pre_hook(self._before_step)
            hooks: Any = optimizer._optimizer_step_pre_hooks
            hooks.move_to_end(before.id, last=False)  # others must find what has landed
            self._hooks.append(before)
            self._hooks.append(optimizer.register_step_post_hook(self._after_step))
        self.strangers = Strangers(plan.model, plan.optimizers)
        self._hooks.append(register_optimizer_step_post_hook(self.strangers.stepped))

    def state_dict(self) -> dict[str, Any]:
        """See `Attachment.state_dict`."""
        self.backward.settled()
        ranks = self.tracks[0].comm.size
        return {
            "version": 1,
            "ranks": ranks,
            "step": self.clock.step,
            "rules": save_routes(self.routes, self.plan.names),
            **({} if self.tuned is None else {"tuned": dict(self.tuned)}),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Attachment.load_state_dict`."""
        self.clock.outside("load_state_dict()")
        self.backward.settled()
        same_ranks = state["ranks"] == self.tracks[0].comm.size
        if same_ranks and "tuned" in state:
            self.tuned = dict(state["tuned"])
            recut(self, **self.tuned)
        load_routes(self.routes, self.plan.names, state["rules"], same_ranks)
        self.clock.step = self.steps.loaded = int(state["step"])
        self.log.clear()
        self.steps.launch_between()

    def together(self, what: str, work: Callable[[Comm], Any], meet: bool = False) -> Any:
        """Do `work(comm)` on the first lane, as all ranks do, and wait for it; `meet` those that may not come first."""
        if meet:
            self.clock.outside(what)
            self._end_failed()
        return together(what, work, self.tracks[0], self.monitor, meet)

    # What hooks do

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Returns the arguments for the step where it must take others: the optimizer is the first of them."""
        if torch._C._current_graph_task_id() != -1:
            raise RuntimeError(
                f"{type(optimizer).__name__} steps within a backward, before the gradients of all ranks have landed; "
                "step when backward has returned"
            )
        self.strangers.ours = True
        if not self.steps.begun:
            self._end_failed()
            check_kinds(self, self.steps.routes)
            if not self.backward.dropped:
                keep_up(self)
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if not callable(closure):
            self._begin_step(optimizer)
            self.log.begin(part_of(optimizer))
            return None
        self.log.begin(part_of(optimizer))
        followed = and_then(closure, lambda: self._begin_step(optimizer))
        return ((args[0], followed, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": followed})

    def _begin_step(self, optimizer: Optimizer) -> None:
        if not self.backward.dropped:
            self.steps.before()

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        self.strangers.ours = False
        self.log.end(part_of(optimizer))
        if not self.backward.dropped:
            if self.steps.after(optimizer):
                self._step_ended()
        elif self.steps.skip(optimizer):
            self.backward.dropped = False

    def _end_failed(self) -> None:
        """A backward that failed here and was caught costs all ranks the step, this one as well."""
        if self.backward.end_failed():
            self.backward.dropped = True
            self.backward.drop_gradients()

    def _gradients_landed(self) -> None:
        keep_up(self)
        if self.backward.dropped:
            return
        if not self.plan.optimizers:  # then every backward that lands is a step
            self.log.step_ended(self.clock.step)
            self.clock.step += 1
            self._step_ended()
        else:
            self.strangers.landed(self.backward.passes)

    def _gradient_ready(self, p: Tensor) -> None:
        self.backward.gradient_ready(p)

    def _step_ended(self) -> None:
        self.backward.step_ended()
        for listener in list(self.listeners):
            listener()

    def _scale(self) -> Tensor | None:
        scaler = self.plan.scaler
        return scaler._scale if scaler is not None and scaler.is_enabled() else None

    # The end

    def finish(self) -> None:
        """Wait for what is in the air (weights under way are dropped), and close groups and threads."""
        if self.over:
            return
        self.remove_hooks()
        try:
            self.backward.end_failed()
            self.backward.settled()
            for runner in self.runners:
                runner.finish()
            for route in self.routes:
                route.drop()
            self.monitor.compare(self.comm.rank - 1, self.comm.rank + 1, sure=True)
            self.monitor.check()
        except BaseException as error:
            self.abandon(error)
            raise
        self.over = True
        self.monitor.leave(LEFT)
        self._close(wait=True)
        self.strangers.ended(self.clock.step, any(any(route.launches) for route in self.routes))

    def remove_hooks(self) -> None:
        """Take every hook out of the model and the optimizers."""
        hooks, self._hooks = self._hooks, []
        for hook in hooks:
            hook.remove()

    def abandon(self, error: BaseException) -> None:
        """End without waiting for anybody, and tell the others why."""
        if self.over:
            return
        self.over = True
        self.remove_hooks()
        self.monitor.leave(RAISED, f"{type(error).__name__}: {error}")
        self._abort()
        self._close(wait=False)

    def _abort(self) -> None:
        abort_all(group for comm in self._own_comms() for group in comm.groups())

    def _broken(self) -> str:
        return error_in(group for comm in self._own_comms() for group in comm.groups())

    def _close(self, wait: bool) -> None:
        for track in self.tracks:
            track.lane.close(wait)
        for comm in self._own_comms():
            comm.close()

    def _own_comms(self) -> list[Comm]:
        """The groups that were made for this attachment: none with one rank, which uses the one it was given."""
        comms = [*(track.comm for track in self.tracks), *([self.host] if self.host else [])]
        return [comm for comm in comms if comm.size > 1]
