"""The engine of an attachment: its runners, made from its setup, and made anew with their state when that changes."""

import weakref
from collections.abc import Callable
from functools import partial
from operator import is_
from typing import Any

from ..comm import Comm
from ..primitives import mean_
from .monitor import PeerError
from .runners.freerunning import FreeRunner
from .runners.gradients import GradientRunner
from .runners.journal import Journal
from .runners.runner import RuleRunner, buckets_of
from .runners.weights import WeightRunner
from .runtime.agreement import agree, broadcast_tensors, take_from
from .runtime.runtime import Runtime
from .runtime.start import warm_up
from .setup.conflicts import check_others
from .setup.setup import AttachSetup, channel_of
from .state.checkpoint import load_runners, save_runner
from .training.backward import Backward
from .training.clock import Clock
from .training.logbook import Logbook
from .training.other_optimizers import OtherOptimizers
from .training.steps import Steps

_engines: "weakref.WeakSet[Engine]" = weakref.WeakSet()


class Engine:
    """The parts of an attachment that carry out its setup on this rank.

    Attributes:
        make: makes the setup, with `bucket_bytes=` for another size.
        comm: the group that the user gave.
        timeout: as the user gave it.
        runtime: monitor, groups and lanes.
        runners: one for each rule.
        free_runners: those of free-running rules.
        other_optimizers: optimizers that step the model's parameters and are not attached.
        since: the step at which the buckets were made.
        log: the times of training since then.
        tuned: the bucket size and the flows that tuning has found, if it has ended: part of the state.
        listeners: called after each step.
        rebuilt: called when new buckets have been made.
    """

    def __init__(self, make: Callable[..., AttachSetup], comm: Comm, timeout: Any) -> None:
        self.make, self.comm, self.timeout, self.clock = make, comm, timeout, Clock()
        self.tuned: dict[str, int] | None = None
        self.listeners: list[Callable[[], None]] = []
        self.rebuilt: Callable[[], None] = lambda: None
        self.runtime: Runtime[AttachSetup]
        if comm.membership is None:
            self.start(self.take_from_rank_0, self.begin)
        else:
            comm.membership.start(self)
        self.other_optimizers = OtherOptimizers(self.setup.model, self.setup.optimizers)
        _engines.add(self)

    def start(self, fill: Callable[[], Any], load: Callable[[], Any]) -> None:
        """Make the runtime, the buckets and the runners. Collective.

        Args:
            fill: brings weights and optimizer state to where they begin, before buckets copy them.
            load: loads what rules remember, and launches the first flights.
        """
        self.free_runners: list[FreeRunner] = []
        self.runtime = Runtime("attach", lambda: self.make_setup(self.make), self.comm, self.timeout)
        with self.runtime.or_abandon():
            fill()
            self.make_buckets()
            load()

    def take_from_rank_0(self) -> None:
        """Overwrite weights, buffers and optimizer state by those of rank 0, if that was asked for. Collective."""
        if self.setup.broadcast:
            self.together("broadcast", lambda comm: take_from(0, self.setup, comm))

    def begin(self) -> None:
        """Launch the flights that land when the first step begins."""
        self.steps.launch_between()

    @property
    def setup(self) -> AttachSetup:
        """Return the setup that is carried out."""
        return self.runtime.setup

    @property
    def flows(self) -> int:
        """Return the number of connections over which messages are divided."""
        return self.runtime.channels[0].comm.flows

    def make_setup(self, make: Callable[[], AttachSetup]) -> AttachSetup:
        """Make the setup of this rank, and check that it fits those of other attachments."""
        setup = make()
        check_others(setup, [each.setup for each in _engines if each is not self and not each.runtime.over])
        return setup

    def together(self, label: str, work: Callable[[Comm], Any], meet: bool = False) -> Any:
        """Do `work(comm)` on the first lane, on all ranks, and return its result. See `Channel.begin`."""
        if meet:
            self.clock.outside(label)
            self.backward.drop_failed()
        return self.runtime.channels[0].together(label, work, meet)

    # Buckets

    def make_buckets(self) -> None:
        """Make the buckets of the setup, and the runners that launch and land them."""
        setup, channels, self.since = self.setup, self.runtime.channels, self.clock.step
        self.log = Logbook(setup.device, on=self.runtime.comm.size > 1)
        self.runners: list[RuleRunner] = []
        for i, (rule, params_of_buckets) in enumerate(zip(setup.rules, setup.buckets_of_rules, strict=True)):
            channel, kind = channels[channel_of(rule)], GradientRunner if rule.what == "grad" else WeightRunner
            self.runners.append(kind(i, rule, buckets_of(params_of_buckets, rule, channel.comm), channel))
        on_gradients = [runner for runner in self.runners if isinstance(runner, GradientRunner)]
        on_weights = [runner for runner in self.runners if isinstance(runner, WeightRunner)]
        free = [runner for runner in on_weights if runner.rule.window == "free_running"]
        if self.runtime.host and not self.free_runners:
            self.free_runners = [FreeRunner(runner, self.runtime.host) for runner in free]
        for free_runner, runner in zip(self.free_runners, free, strict=True):
            free_runner.runner = runner  # new buckets; an agreement under way continues
        self.steps = Steps(on_weights, self.free_runners, setup.optimizers, self.clock, self.log)
        self.backward = Backward(on_gradients, setup.names, self.clock, setup.loss_scale, self.log)
        for each in self.runners:
            warm_up([each.rule.stage], [bucket.flat for bucket in each.buckets], each.channel)
            each.make_states()
            if self.comm.membership is not None:
                each.journal = Journal(len(each.buckets))
        self.rebuilt()

    def recut(self, bucket_bytes: int, flows: int) -> None:
        """Continue with buckets of another size and over other flows. Collective, unless nothing changes."""
        flows = flows if self.runtime.comm.size > 1 else self.flows
        if (bucket_bytes, flows) == (self.setup.bucket_bytes, self.flows):
            return
        if flows > 1 and self.setup.device.type == "cuda":
            raise ValueError(f"flows={flows} divide what travels over gloo, and these parameters travel by NCCL; use 1")
        self._rebuild(partial(self.make, bucket_bytes=bucket_bytes), f"new buckets over {flows} flows", flows)

    def follow_parameters(self) -> None:
        """Make new buckets if parameters have been unfrozen, frozen, added or removed, on all ranks.

        New parameters begin as on rank 0, and the gradients that they already have are averaged exactly.
        """
        known = self.runtime.setup.names
        trainable = [p for p in self.runtime.setup.model.parameters() if p.requires_grad]
        if len(trainable) == len(known) and all(map(is_, trainable, known)):
            return
        self.clock.outside("a change of the trainable parameters")
        self._rebuild(self.make, "other parameters", self.flows)
        new = [p for p in self.setup.names if p not in known]
        acting = [runner for runner in self.backward.runners if runner.rule.acts(self.clock.step)]
        averaged = {p for runner in acting for p in runner.params()}

        def catch_up(comm: Comm) -> None:
            if self.setup.broadcast and comm.size > 1:
                broadcast_tensors(new, comm, self.setup.device)
            mean_([p.grad for p in new if p in averaged and p.grad is not None], comm)

        self.together("new parameters", catch_up)

    def _rebuild(self, make: Callable[..., AttachSetup], label: str, flows: int) -> None:
        """Agree on a new setup, make its buckets and groups, and carry over the state. Collective."""
        setup = agree(self.runtime.monitor, lambda: self.make_setup(make), label)  # nothing has changed if this raises
        state, touched = self.state_dict(), self.backward.touched
        for runner in self.runners:
            runner.drop()
        if flows != self.flows:
            self.runtime.use_flows(flows)
        self.make, self.runtime.setup = make, setup
        self.make_buckets()
        self.backward.touched = touched
        self._load_rules(state, same_ranks=True)

    # The state

    def state_dict(self, flights: bool = True, same_ranks: bool = True) -> dict[str, Any]:
        """See `Attachment.state_dict`, and for the arguments `save_runner`."""
        if flights:
            self.backward.decisions.settle()
        saved = [save_runner(runner, self.setup.names, flights, same_ranks) for runner in self.runners]
        return {
            "version": 1,
            "ranks": self.runtime.comm.size,
            "step": self.clock.step,
            "rules": {str(i): each for i, each in enumerate(saved)},
            **({} if self.tuned is None else {"tuned": dict(self.tuned)}),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Attachment.load_state_dict`."""
        self.clock.outside("load_state_dict()")
        self.backward.decisions.settle()
        same_ranks = state["ranks"] == self.runtime.comm.size
        if same_ranks and "tuned" in state:
            self.tuned = dict(state["tuned"])
            self.recut(**self.tuned)
        self._load_rules(state, same_ranks)
        self.log.clear()

    def _load_rules(self, state: dict[str, Any], same_ranks: bool) -> None:
        load_runners(self.runners, self.setup.names, state["rules"], same_ranks)
        self.clock.step = self.steps.loaded = self.since = int(state["step"])
        self.steps.launch_between()

    def keep_step(self) -> None:
        """Keep what a step has changed, where ranks may be lost: a flight that is lost later does not take it back."""
        self.backward.decisions.settle_all(max((rule.delay for rule in self.setup.rules), default=0))
        for runner in self.runners:
            if runner.journal is not None:
                runner.journal.step_ended()

    # The end

    def finish(self) -> None:
        """Wait for what is in the air (weights under way are dropped), and close groups and threads. Idempotent."""
        if not self.runtime.over:
            try:
                self.runtime.finish(self._drain)
            except PeerError:
                if self.comm.membership is None:
                    raise  # else another rank was lost when it had trained to the end
            self.other_optimizers.ended(self.clock.step, any(any(runner.launches) for runner in self.runners))
            if self.comm.membership is not None:
                self.comm.membership.ended(self)

    def abandon(self, error: BaseException) -> None:
        """End without waiting for any rank, and tell the others why. Idempotent."""
        self.runtime.abandon(error)
        self.runtime.take_hooks_out()  # between two rounds of an elastic group they are in
        if self.comm.membership is not None:
            self.comm.membership.ended(self)

    def _drain(self) -> None:
        self.backward.end_failed()
        self.backward.decisions.settle()
        for free_runner in self.free_runners:
            free_runner.finish()
        for runner in self.runners:
            runner.drop()
        monitor = self.runtime.monitor
        monitor.compare(monitor.rank - 1, monitor.rank + 1, sure=True)
        monitor.check()
