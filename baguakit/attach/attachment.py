"""An attachment: the hooks, groups and threads that carry out some rules on a model, and what a user can ask of it."""

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..comm import Comm, store_of
from ..lanes import lane
from ..rules import Algorithm
from .agreement import agree, broadcast_model, broadcast_optimizers
from .backward import Backward, GradientRoute
from .clock import Clock
from .consensus import consensus_distance, merge_
from .freerunning import FreeRunner
from .monitor import LEFT, RAISED, Monitor
from .plan import Plan, make_plan
from .report import Report, make_report
from .routes import Route, Track, WeightRoute, buckets_of
from .steps import Steps


class Attachment:
    """Rules at work on a model; made by `attach`. A context manager: leaving it detaches."""

    def __init__(self, plan: Plan, comm: Comm, name: str, broadcast: bool) -> None:
        self.plan, self.name, self.clock = plan, name, Clock()
        self._hooks: list[Any] = []
        self._tracks: list[Track] = []
        self._host: Comm | None = None
        self.monitor = self._make_monitor(comm)
        self.monitor.start()
        try:
            self._make_tracks(comm)
            if broadcast and comm.size > 1:
                broadcast_model(plan.model, self._tracks[0].comm, plan.device)
                broadcast_optimizers(plan.optimizers, self._tracks[0].comm, plan.device)
            self.routes = [self._make_route(i) for i in range(len(plan.rules))]
            self._hook()
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

    def _hook(self) -> None:
        plan = self.plan
        self._gradient_routes = [r for r in self.routes if isinstance(r, GradientRoute)]
        weights = [r for r in self.routes if isinstance(r, WeightRoute)]
        host = self._host
        self._runners = [FreeRunner(r, host, self.monitor) for r in weights if host and r.rule.window == "free_running"]
        self._steps = Steps(weights, self._runners, plan.optimizers, self.clock)
        self._backward = Backward(self._gradient_routes, plan.names, self.clock, self._scale, self._gradients_landed)
        if self._gradient_routes:
            params = dict.fromkeys(p for route in self._gradient_routes for p in route.params())
            self._hooks += [p.register_post_accumulate_grad_hook(self._backward.gradient_ready) for p in params]
        for optimizer in plan.optimizers:
            self._hooks.append(optimizer.register_step_pre_hook(self._before_step))
            self._hooks.append(optimizer.register_step_post_hook(self._after_step))
        self._steps.launch_between()

    # What hooks do

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        self._steps.before(optimizer)

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        if self._steps.after(optimizer):
            self._backward.step_ended()

    def _gradients_landed(self) -> None:
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
        track = self._tracks[0]
        track.lane.run(lambda: merge_(self.plan.model, track.comm, self.plan.device)).result()

    def consensus_distance(self) -> float:
        """How far apart the ranks' weights are: sqrt( (1/n) Σ_r ‖x_r − x̄‖² ), x̄ being their mean. Collective."""
        track = self._tracks[0]
        params = list(self.plan.names)
        return float(track.lane.run(lambda: consensus_distance(params, track.comm)).result())

    def report(self) -> Report:
        """Bytes sent and seconds exposed, by rule and bucket, over the latest flights. Local; print it."""
        return make_report(self.routes, self._tracks, self._host, self.clock.step)

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
    plan, name = agree(comm, lambda: make_plan(model, optimizer, algorithms, comm, bucket_bytes, timeout, scaler))
    return Attachment(plan, comm, name, broadcast)
