"""The works of an attachment: its groups, lanes, hooks and monitor, from their making to their end."""

import weakref
from collections.abc import Callable
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..comm import Comm, store_of
from ..lanes import lane
from ..primitives import mean_
from .agreement import agree, broadcast_optimizers, broadcast_tensors
from .backward import Backward, GradientRoute
from .checkpoint import load_routes, save_routes
from .clock import Clock
from .conflicts import check_others
from .freerunning import FreeRunner
from .monitor import LEFT, RAISED, Monitor
from .plan import Plan
from .recutting import recut
from .routes import Route, Track, WeightRoute, buckets_of, together
from .seeing.logbook import Logbook, part_of
from .steps import Steps, and_then

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
        since: the step at which the buckets were cut.
        log: what training did since then.
        tuned: the bucket size and the flows that tuning has ended with, if it has: part of the state.
        listeners: called whenever a step has ended.
    """

    def __init__(self, make: Callable[..., Plan], comm: Comm, broadcast: bool) -> None:
        self.make, self._broadcast, self.comm = make, broadcast, comm
        self.tuned: dict[str, int] | None = None
        self.listeners: list[Callable[[], None]] = []
        self.plan, self.name = agree(comm, self.make_plan)
        self.clock, self.over = Clock(), False
        self._hooks: list[Any] = []
        self.tracks: list[Track] = []
        self.host: Comm | None = None
        self.runners: list[FreeRunner] = []
        self.monitor = self._make_monitor(comm)
        self.monitor.start()
        try:
            self._make_tracks(comm)
            if broadcast:
                self.together("broadcast", self._begin_as_rank_0)
            self._hook()
            self.steps.launch_between()
        except BaseException as error:
            self.abandon(error)
            raise
        _at_work.add(self)

    # Made once, in this order, alike on all ranks

    def make_plan(self) -> Plan:
        """The plan of this rank, checked beside those of other attachments."""
        plan = self.make()
        check_others(plan, [other.plan for other in _at_work if other is not self and not other.over])
        return plan

    def _make_monitor(self, comm: Comm) -> Monitor:
        store = store_of(comm.group, f"{self.name}/monitor") if comm.size > 1 else None
        return Monitor(
            store, comm.rank, comm.size, self.plan.timeout, self._abort, loud=self.plan.device.type == "cuda"
        )

    def _make_tracks(self, comm: Comm) -> None:
        plan = self.plan
        flies_on = any(rule.delay or rule.window == "free_running" for rule in plan.rules)
        for number in range(1 + flies_on):
            own = comm.own(f"{self.name}/{number}", plan.timeout, plan.device) if comm.size > 1 else comm
            self.tracks.append(Track(number, lane(plan.device), own))
        if any(rule.window == "free_running" for rule in plan.rules):
            flat = Comm(comm.group)
            self.host = flat.own(f"{self.name}/host", plan.timeout, torch.device("cpu")) if comm.size > 1 else flat

    def _make_route(self, i: int) -> Route:
        rule = self.plan.rules[i]
        track = self.tracks[-1 if rule.delay or rule.window == "free_running" else 0]
        kind = GradientRoute if rule.what == "grad" else WeightRoute
        return kind(i, rule, buckets_of(self.plan.cuts[i], rule, track.comm), track, self.monitor)

    def _begin_as_rank_0(self, comm: Comm) -> None:
        if comm.size > 1:
            broadcast_tensors([*self.plan.model.parameters(), *self.plan.model.buffers()], comm, self.plan.device)
            broadcast_optimizers(self.plan.optimizers, comm, self.plan.device)

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
        self.backward = Backward(gradients, plan.names, self.clock, self._scale, self._gradients_landed, self.log)

    def _hook(self) -> None:
        """Cut the buckets of the plan, and hook the parameters and optimizers that it speaks of."""
        self.cut()
        params = dict.fromkeys(p for route in self.backward.routes for p in route.params())
        self._hooks += [p.register_post_accumulate_grad_hook(self._gradient_ready) for p in params]
        for optimizer in self.plan.optimizers:
            before: Any = optimizer.register_step_pre_hook(self._before_step)
            hooks: Any = optimizer._optimizer_step_pre_hooks
            hooks.move_to_end(before.id, last=False)  # others must find what has landed
            self._hooks.append(before)
            self._hooks.append(optimizer.register_step_post_hook(self._after_step))

    def _recut(self) -> None:
        """The set of trainable parameters has changed, on all ranks: cut the buckets anew, and carry over the state.

        New parameters begin as on rank 0, and the gradients that they already have are averaged exactly.
        """
        known, state = set(self.plan.names), self.state_dict()
        for route in self.routes:
            route.drop()
        self.plan, _ = self.together("new buckets", lambda comm: agree(comm, self.make_plan))
        self.remove_hooks()
        self._hook()
        self.load_state_dict(state)
        new = [p for p in self.plan.names if p not in known]
        acting = [r for r in self.routes if isinstance(r, GradientRoute) and r.rule.acts(self.clock.step)]
        claimed = {p for route in acting for p in route.params()}

        def catch_up(comm: Comm) -> None:
            if self._broadcast and comm.size > 1:
                broadcast_tensors(new, comm, self.plan.device)
            mean_([p.grad for p in new if p in claimed and p.grad is not None], comm)

        self.together("new parameters", catch_up)

    def _keep_up(self) -> None:
        """Notice parameters that have been unfrozen, frozen, added or removed since the buckets were cut."""
        trainable = (p for p in self.plan.model.parameters() if p.requires_grad)
        if any(p is not q for p, q in zip_longest(trainable, self.plan.names)):
            self._recut()

    def state_dict(self) -> dict[str, Any]:
        """See `Attachment.state_dict`."""
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
        same_ranks = state["ranks"] == self.tracks[0].comm.size
        if same_ranks and "tuned" in state:
            self.tuned = dict(state["tuned"])
            recut(self, **self.tuned)
        load_routes(self.routes, self.plan.names, state["rules"], same_ranks)
        self.clock.step = self.steps.loaded = int(state["step"])
        self.log.clear()
        self.steps.launch_between()

    def together(self, what: str, work: Callable[[Comm], Any]) -> Any:
        """Do `work(comm)` on the first lane, as all ranks do, and wait for it."""
        return together(what, work, self.tracks[0], self.monitor)

    # What hooks do

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Returns the arguments for the step where it must take others: the optimizer is the first of them."""
        if not self.steps.begun:
            self._keep_up()
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if not callable(closure):
            self.steps.before(optimizer)
            self.log.begin(part_of(optimizer))
            return None
        self.log.begin(part_of(optimizer))
        followed = and_then(closure, lambda: self.steps.before(optimizer))
        return ((args[0], followed, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": followed})

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        self.log.end(part_of(optimizer))
        if self.steps.after(optimizer):
            self._step_ended()

    def _gradients_landed(self) -> None:
        self._keep_up()
        if not self.plan.optimizers:  # then every backward that lands is a step
            self.log.step_ended(self.clock.step)
            self.clock.step += 1
            self._step_ended()

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
            for runner in self.runners:
                runner.finish()
            for route in self.routes:
                route.drop()
        except BaseException as error:
            self.abandon(error)
            raise
        self.over = True
        self.monitor.leave(LEFT)
        self._close(wait=True)

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
        for comm in self._own_comms():
            comm.abort()

    def _close(self, wait: bool) -> None:
        for track in self.tracks:
            track.lane.close(wait)
        for comm in self._own_comms():
            comm.close()

    def _own_comms(self) -> list[Comm]:
        """The groups that were made for this attachment: none with one rank, which uses the one it was given."""
        comms = [*(track.comm for track in self.tracks), *([self.host] if self.host else [])]
        return [comm for comm in comms if comm.size > 1]
