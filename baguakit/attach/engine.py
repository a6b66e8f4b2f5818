"""The engine of an attachment: its runners, made from its setup, and made anew with their state when that changes."""

import weakref
from collections.abc import Callable, Collection, Container
from functools import partial
from itertools import chain
from operator import is_
from typing import Any

from torch import Tensor

from ..comm import Comm
from ..flights import (
    Clock,
    FreeRunner,
    GradientRunner,
    Journal,
    Logbook,
    RuleRunner,
    WeightRunner,
    buckets_of,
    load_runners,
    mean_gradients_,
    save_runner,
)
from ..monitor import PeerError
from ..runtime import Runtime, agree, broadcast_tensors, channel_of, named, warm_up
from ..stages.base import remembered
from .backward import Backward
from .broadcast import take_from
from .conflicts import check_others
from .landings import Landings, OtherOptimizers
from .setup import AttachSetup, better_order
from .steps import Steps

_engines: "weakref.WeakSet[Engine]" = weakref.WeakSet()


class Engine:
    """The parts of an attachment that carry out its setup on this rank.

    Attributes:
        make: makes the setup of the parameters that are trainable or in `ever`, which is its argument; with
            `bucket_bytes=` for another size.
        comm: the group that the user gave.
        timeout: as the user gave it.
        runtime: monitor, groups and lanes.
        runners: one for each rule.
        free_runners: those of free-running rules.
        ever: the parameters that have been trainable here: they keep their place and state while they are frozen.
        other_optimizers: optimizers that step the model's parameters and are not attached.
        landings: the gradients with which each optimizer may step.
        since: the step at which the buckets were made.
        log: the times of training since then.
        tuned: the bucket size and the flows that tuning has found, if it has ended: part of the state.
        listeners: called after each step.
        rebuilt: called when new buckets have been made.
    """

    def __init__(self, make: Callable[..., AttachSetup], comm: Comm, timeout: Any) -> None:
        self.make, self.comm, self.timeout, self.clock = make, comm, timeout, Clock()
        self.tuned: dict[str, int] | None = None
        self.ever: Collection[Tensor] = ()
        self.listeners: list[Callable[[], None]] = []
        self.rebuilt: Callable[[], None] = lambda: None
        self.runtime: Runtime[AttachSetup]
        comm.membership.start(self)
        if self._may_reorder():
            self.backward.arrived = {}
        self.other_optimizers = OtherOptimizers(self.setup.model, self.setup.optimizers)
        self.landings = Landings(self.setup.optimizers)
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

    def make_setup(self, make: Callable[..., AttachSetup]) -> AttachSetup:
        """Make the setup of this rank, and check that it fits those of other attachments."""
        setup = make(self.ever)
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
        self.ever, self._ids = setup.names, frozenset(map(id, setup.names))
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
            if each.rule.window == "free_running" and each.remembers():
                raise ValueError(f"{each.rule!r} remembers something; a free-running rule takes a stage without state")
            if self.comm.membership.changes:
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

    def _may_reorder(self) -> bool:
        """Return whether all ranks can cut the buckets of gradients anew after the first step, and lose no state."""
        on_gradients = self.backward.runners
        free = any(rule.window == "free_running" for rule in self.setup.rules)  # ranks are at different steps
        states = [(runner.rule.stage, state) for runner in on_gradients for state in runner.states]
        own = any(carry is None for stage, state in states for _, _, carry in remembered(stage, state))
        alone = self.runtime.comm.size == 1 or self.comm.membership.changes  # one that joins has other buckets
        return not (free or own or alone) and any(len(runner.buckets) > 1 for runner in on_gradients)

    def follow_gradients(self) -> None:
        """Cut the buckets of gradients in the order in which those of rank 0 came in the first step, if that helps.

        As DDP does: buckets are launched in order, so that one late gradient in the first would hold up all. Collective
        after the first step, and nothing after that.
        """
        arrived = self.backward.arrived
        if arrived is None or self.clock.joined:
            return
        self.backward.arrived = None
        cuts = [[bucket.params for bucket in runner.buckets] for runner in self.backward.runners]
        mine = better_order(cuts, arrived, self.setup.names, self.setup.bucket_bytes)
        order = self.together("the order of gradients", lambda comm: comm.broadcast_object(mine))
        if order is not None:
            self._rebuild(partial(self.make, order=order), "the order of gradients", self.flows)

    def follow_parameters(self) -> None:
        """Make new buckets if parameters have become trainable, been added or removed, on all ranks.

        One that is frozen stays where it is. What was never trainable here begins as on rank 0, and gradients that it
        already has are averaged exactly.
        """
        known, ids, params = self.runtime.setup.names, self._ids, self.runtime.setup.model.parameters()
        held = [p for p in params if p.requires_grad or id(p) in ids or p.grad is not None]  # frozen after a backward
        if len(held) == len(known) and all(map(is_, held, known)):
            return
        self.ever = set(held)
        self.clock.outside("a change of the trainable parameters")
        self._rebuild(self.make, "other parameters", self.flows)
        acting = [runner for runner in self.backward.runners if runner.rule.acts(self.clock.step)]
        averaged = {p for runner in acting for p in runner.params() if p not in known}
        late = [p for p in self.setup.names if p in averaged]
        if late:
            self.together("gradients of new parameters", partial(mean_gradients_, late))
            self.landings.landed([id(p) for p in late])

    def average_gradients(self) -> None:
        """See `Attachment.average_`."""
        if self.runtime.over:
            raise RuntimeError("average_() averages with the groups of the attachment; call it before it is detached")
        if not self.backward.runners:
            raise ValueError("average_() averages gradients by rules on gradients, and this attachment has none")
        by_optimizer = [self.landings.strange(each, self.backward.touched) for each in self.setup.optimizers]
        made = chain(*by_optimizer) if by_optimizer else (p for p in self.setup.names if p.grad is not None)
        self.backward.average(set(made))

    def _rebuild(self, make: Callable[..., AttachSetup], label: str, flows: int, begin: bool = True) -> None:
        """Agree on a new setup, make its buckets and groups, and carry over the state. Collective.

        Without `begin` new parameters do not begin as on rank 0: they have been loaded.
        """
        known, steps, backward = self.setup.names, self.steps, self.backward
        setup = agree(self.runtime.monitor, lambda: self.make_setup(make), label)  # nothing has changed if this raises
        state = self.state_dict()
        for runner in self.runners:
            runner.drop()
        if flows != self.flows:
            self.runtime.use_flows(flows)
        self.make, self.runtime.setup = make, setup
        new = [p for p in setup.names if p not in known]
        if new and begin and setup.broadcast:  # before rules remember it
            self.together("new parameters", lambda comm: broadcast_tensors(new, comm, setup.device))
        self.make_buckets()
        self.steps.follow(steps)
        self.backward.follow(backward)
        names = {p: known.get(p, f"new {name}") for p, name in setup.names.items()}  # a removal may have renamed others
        load_runners(self.runners, names, state["rules"], same_ranks=True, made=True)
        self.steps.launch_between()

    # The state

    def check(self) -> None:
        """Raise the PeerError that the monitor has found: on a GPU, what came after it rests on half a sum.

        Where ranks come and go, the host has waited for every flight, and each step that it made counts.
        """
        if not self.comm.membership.changes:
            self.runtime.monitor.check()

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
            **({"order": list(self.setup.order)} if self.setup.order else {}),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Attachment.load_state_dict`."""
        self.clock.outside("load_state_dict()")
        self.backward.decisions.settle()
        same_ranks = state["ranks"] == self.runtime.comm.size
        if same_ranks and "tuned" in state:
            self.tuned = dict(state["tuned"])
            self.recut(**self.tuned)
        if same_ranks and (order := tuple(state.get("order", ()))) != self.setup.order:
            self._rebuild(partial(self.make, order=order), "the order of the loaded state", self.flows)
        self.backward.arrived = None  # a resumed training goes on with the buckets of the state
        self._take_in({name for rule in state["rules"].values() for name in rule["parameters"]})
        load_runners(self.runners, self.setup.names, state["rules"], same_ranks)
        self.clock.step = self.steps.loaded = self.since = int(state["step"])
        self.steps.launch_between()
        self.log.clear()

    def _take_in(self, saved: Container[str]) -> None:
        """Give parameters that are frozen, and were not when the state was saved, their place again."""
        params = named(self.setup.model).items()
        if frozen := [p for p, name in params if name in saved and p not in self.setup.names]:
            self.ever = {*self.setup.names, *frozen}
            self._rebuild(self.make, "parameters of the loaded state", self.flows, begin=False)

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
                if not self.comm.membership.changes:
                    raise  # else another rank was lost when it had trained to the end
            waiting = None if self.backward.runners else self.landings.waiting()
            self.other_optimizers.ended(
                self.clock.step, any(log.launches for each in self.runners for log in each.ledgers), waiting
            )
            self.comm.membership.ended(self)

    def abandon(self, error: BaseException) -> None:
        """End without waiting for any rank, and tell the others why. Idempotent."""
        self.runtime.abandon(error)
        self.runtime.take_hooks_out()  # between two rounds of an elastic group they are in
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
