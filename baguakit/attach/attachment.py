"""An attachment: the hooks, groups and threads that carry out some rules on a model, and what a user can ask of it."""

import contextlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from itertools import zip_longest
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..comm import Comm, store_of
from ..lanes import lane
from ..primitives import mean_
from ..rules import Algorithm
from .agreement import agree, broadcast_optimizers, broadcast_tensors
from .backward import Backward, GradientRoute
from .checkpoint import load_route, save_route
from .clock import Clock
from .consensus import consensus_distance, merge_
from .freerunning import FreeRunner
from .monitor import LEFT, RAISED, Monitor
from .plan import Plan, make_plan
from .report import Report, make_report
from .routes import Route, Track, WeightRoute, buckets_of, together
from .steps import Steps


class Attachment:
    """Rules at work on a model; made by `attach`. A context manager: leaving it detaches."""

    def __init__(self, make: Callable[[], Plan], comm: Comm, broadcast: bool) -> None:
        self._make, self._broadcast = make, broadcast
        self.plan, self.name = agree(comm, make)
        self.clock = Clock()
        self._hooks: list[Any] = []
        self._tracks: list[Track] = []
        self._host: Comm | None = None
        self.monitor = self._make_monitor(comm)
        self.monitor.start()
        try:
            self._make_tracks(comm)
            if broadcast:
                together("broadcast", self._begin_as_rank_0, self._tracks[0], self.monitor)
            self._hook()
            self._steps.launch_between()
        except BaseException as error:
            self._abandon(error)
            raise

    # Made once, in this order, alike on all ranks

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
            self._tracks.append(Track(number, lane(plan.device), own))
        if any(rule.window == "free_running" for rule in plan.rules):
            flat = Comm(comm.group)
            self._host = flat.own(f"{self.name}/host", plan.timeout, torch.device("cpu")) if comm.size > 1 else flat

    def _make_route(self, i: int) -> Route:
        rule = self.plan.rules[i]
        track = self._tracks[-1 if rule.delay or rule.window == "free_running" else 0]
        kind = GradientRoute if rule.what == "grad" else WeightRoute
        return kind(i, rule, buckets_of(self.plan.cuts[i], rule, track.comm), track, self.monitor)

    def _begin_as_rank_0(self, comm: Comm) -> None:
        if comm.size > 1:
            broadcast_tensors([*self.plan.model.parameters(), *self.plan.model.buffers()], comm, self.plan.device)
            broadcast_optimizers(self.plan.optimizers, comm, self.plan.device)

    def _hook(self) -> None:
        """Cut the buckets of the plan, and hook the parameters and optimizers that it speaks of."""
        plan, host = self.plan, self._host
        self.routes = [self._make_route(i) for i in range(len(plan.rules))]
        gradients = [r for r in self.routes if isinstance(r, GradientRoute)]
        weights = [r for r in self.routes if isinstance(r, WeightRoute)]
        self._runners = [FreeRunner(r, host, self.monitor) for r in weights if host and r.rule.window == "free_running"]
        self._steps = Steps(weights, self._runners, plan.optimizers, self.clock)
        self._backward = Backward(gradients, plan.names, self.clock, self._scale, self._gradients_landed)
        params = dict.fromkeys(p for route in gradients for p in route.params())
        self._hooks += [p.register_post_accumulate_grad_hook(self._backward.gradient_ready) for p in params]
        for optimizer in plan.optimizers:
            self._hooks.append(optimizer.register_step_pre_hook(self._before_step))
            self._hooks.append(optimizer.register_step_post_hook(self._after_step))

    def _recut(self) -> None:
        """The set of trainable parameters has changed, on all ranks: cut the buckets anew, and carry over the state.

        New parameters begin as on rank 0, and the gradients that they already have are averaged exactly.
        """
        known, state = set(self.plan.names), self.state_dict()
        for route in self.routes:
            route.drop()
        self.plan, _ = together("new buckets", lambda comm: agree(comm, self._make), self._tracks[0], self.monitor)
        self._remove_hooks()
        self._hook()
        self.load_state_dict(state)
        new = [p for p in self.plan.names if p not in known]
        claimed = {
            p for r in self.routes if isinstance(r, GradientRoute) and r.rule.acts(self.step) for p in r.params()
        }

        def catch_up(comm: Comm) -> None:
            if self._broadcast and comm.size > 1:
                broadcast_tensors(new, comm, self.plan.device)
            mean_([p.grad for p in new if p in claimed and p.grad is not None], comm)

        together("new parameters", catch_up, self._tracks[0], self.monitor)

    def _keep_up(self) -> None:
        """Notice parameters that have been unfrozen, frozen, added or removed since the buckets were cut."""
        trainable = (p for p in self.plan.model.parameters() if p.requires_grad)
        if any(p is not q for p, q in zip_longest(trainable, self.plan.names)):
            self._recut()

    # What hooks do

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        if not self._steps.begun:
            self._keep_up()
        self._steps.before(optimizer)

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        if self._steps.after(optimizer):
            self._backward.step_ended()

    def _gradients_landed(self) -> None:
        self._keep_up()
        if not self.plan.optimizers:  # then every backward that lands is a step
            self.clock.step += 1
            self._backward.step_ended()

    def _scale(self) -> Tensor | None:
        scaler = self.plan.scaler
        return scaler._scale if scaler is not None and scaler.is_enabled() else None

    # What a user can ask

    @property
    def rules(self) -> tuple[Any, ...]:
        """The rules at work."""
        return self.plan.rules

    @property
    def step(self) -> int:
        """Optimizer steps made since the attachment was."""
        return self.clock.step

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Only accumulate gradients in the backward passes of the body, as with `DistributedDataParallel.no_sync`.

        The first backward outside averages what has been accumulated. Local.
        """
        before, self.clock.synchronising = self.clock.synchronising, False
        try:
            yield
        finally:
            self.clock.synchronising = before

    def merge(self) -> None:
        """Overwrite every parameter and floating buffer with its exact mean over all ranks. Collective.

        For evaluation and checkpoints, where ranks have weights of their own.
        """
        plan = self.plan
        together("merge()", lambda comm: merge_(plan.model, comm, plan.device), self._tracks[0], self.monitor)

    def consensus_distance(self) -> float:
        """How far apart the ranks' weights are: sqrt( (1/n) Σ_r ‖x_r − x̄‖² ), x̄ being their mean. Collective."""
        params = list(self.plan.names)
        what = "consensus_distance()"
        return float(together(what, lambda comm: consensus_distance(params, comm), self._tracks[0], self.monitor))

    def report(self) -> Report:
        """Bytes sent and seconds exposed, by rule and bucket, over the latest flights. Local; print it."""
        return make_report(self.routes, self._tracks, self._host, self.clock.step)

    def state_dict(self) -> dict[str, Any]:
        """What the rules remember: tensors by parameter name, and counters. Local.

        Each rank saves its own. The tensors are copies, which `torch.load(weights_only=True)` accepts. Waits for
        flights in the air, and saves what they bring; but those of free-running rules are left out.
        """
        rules = {str(i): save_route(route, self.plan.names) for i, route in enumerate(self.routes)}
        return {"version": 1, "ranks": self._tracks[0].comm.size, "step": self.clock.step, "rules": rules}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken. Local, but every rank calls it.

        The order of a resume is: attach, load the model, load the optimizer, and then this. Buckets may be cut
        otherwise. With another number of ranks what is elementwise is kept, averaged or zeroed as its stage declares,
        and the rest is made anew, which the log ("baguakit") says.
        """
        if len(state["rules"]) != len(self.routes):
            raise ValueError(f"this state is of {len(state['rules'])} rules, and {len(self.routes)} are attached")
        same_ranks = state["ranks"] == self._tracks[0].comm.size
        self.clock.step, self._steps.loaded = int(state["step"]), True
        for i, route in enumerate(self.routes):
            load_route(route, self.plan.names, state["rules"][str(i)], same_ranks)
        self._steps.launch_between()

    def detach(self) -> None:
        """Remove every hook, wait for what is in the air (weights under way are dropped), and close groups and threads.

        Free-running rules answer the other ranks until all have detached. Calling it again does nothing.
        """
        if self._remove_hooks():
            try:
                for runner in self._runners:
                    runner.finish()
                for route in self.routes:
                    route.drop()
            except BaseException as error:
                self._abandon(error)
                raise
            self.monitor.leave(LEFT)
            self._close(wait=True)

    def __enter__(self) -> "Attachment":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.detach()
        elif self._remove_hooks():
            self._abandon(error)

    # The end

    def _remove_hooks(self) -> bool:
        """Whether there were any: an attachment ends once."""
        hooks, self._hooks = self._hooks, []
        for hook in hooks:
            hook.remove()
        return bool(hooks)

    def _abandon(self, error: BaseException) -> None:
        """End without waiting for anybody, and tell the others why."""
        self._remove_hooks()
        self.monitor.leave(RAISED, f"{type(error).__name__}: {error}")
        self._abort()
        self._close(wait=False)

    def _abort(self) -> None:
        if self._tracks and self._tracks[0].comm.size > 1:
            for comm in [*(track.comm for track in self._tracks), *([self._host] if self._host else [])]:
                comm.abort()

    def _close(self, wait: bool) -> None:
        for track in self._tracks:
            track.lane.close(wait)
        if self._tracks and self._tracks[0].comm.size > 1:
            for comm in [*(track.comm for track in self._tracks), *([self._host] if self._host else [])]:
                comm.close()


def attach(
    model: nn.Module,
    optimizer: Any,
    *algorithms: Algorithm,
    comm: Comm | None = None,
    bucket_bytes: int = 25 << 20,
    broadcast: bool = True,
    scaler: Any = None,
    timeout: float | timedelta | None = None,
) -> Attachment:
    """Let algorithms work on a model while it trains. Nothing else changes: not the model, not the optimizer.

        with bk.attach(model, optimizer, bk.algorithms.bytegrad()):
            train()

    Collective: all ranks of the group attach the same, in the same order. An error on one rank is raised on all.

    Args:
        model: any module; its trainable parameters are on one device.
        optimizer: the optimizer; or a sequence of them, and a step ends when the last has stepped; or None for rules
            on gradients only.
        algorithms: what to do, such as `bk.algorithms.bytegrad()`: rules, or tuples of rules.
        comm: the group; None means all ranks. With a mesh, `hierarchical` algorithms know the nodes.
        bucket_bytes: parameters travel together in buckets of about this size.
        broadcast: begin with the weights, buffers and optimizer state of rank 0.
        scaler: the GradScaler in use, so that stages see gradients without its factor; weight rules want torch's
            `ShardedGradScaler`, with which all ranks skip a step together.
        timeout: seconds (or a timedelta) after which a flight is given up and the rank at fault is named; None: 600.

    Returns:
        An `Attachment`: a context manager, or call its `detach()`.

    Raises:
        ValueError, TypeError: something cannot work, or ranks attach differently; on every rank.
    """
    comm = Comm() if comm is None else comm
    if not isinstance(comm, Comm):
        raise TypeError(f"comm= takes a bk.Comm, not {type(comm).__name__}")
    return Attachment(
        lambda: make_plan(model, optimizer, algorithms, comm, bucket_bytes, timeout, scaler), comm, broadcast
    )
