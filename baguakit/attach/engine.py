"""The engine of an attachment makes a runner for each rule, and new runners when the setup changes.

The engine launches and lands flights of weights at the start and at the end of a step. A step starts when one of the
optimizers is about to step, and ends when all optimizers have stepped.
"""

import warnings
import weakref
from collections.abc import Callable, Collection
from functools import partial
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..comm import Comm, check_device, number
from ..flights import FreeRunner, GradientRunner, Life, Logbook, Turn, WeightRunner, buckets_of, load_runners
from ..monitor import PeerError
from ..rules import Rule, known_losses
from ..runtime.agreement import agree, agrees, broadcast_tensors, channel_of, named
from ..runtime.runtime import or_abandon, warm_up
from ..stages import remembered
from .aside import stand_aside
from .backward import Backward
from .broadcast import mean_gradients_, take_from
from .landings import Landings, OtherOptimizers
from .setup import AttachSetup, better_order, check_others

MANY = 32  # backward passes without a step before a warning; a GradScaler at its start skips fewer
Make = Callable[..., AttachSetup]
_engines: "weakref.WeakSet[Engine]" = weakref.WeakSet()


class Engine(Life[AttachSetup]):
    """The `Life` of an attachment. `make(ever)` makes the setup of parameters that are, or were (`ever`), trainable."""

    def __init__(self, make: Make, comm: Comm, timeout: Any) -> None:
        super().__init__("attach", make, comm, timeout)
        self.tuned: dict[str, int] | None = None  # the result of tuning, if it has ended; saved with the state
        self.ever: Collection[Tensor] = ()  # have been trainable: frozen ones keep their bucket and state
        self.listeners: list[Callable[[], None]] = []  # called after each step
        self.rebuilt: Callable[[], None] = lambda: None  # called when new buckets have been made
        comm.membership.start(self)
        stand_aside(self.setup.model, comm, self.clock, self.unhook)
        if self._may_reorder():
            self.backward.arrived = {}
        self.other_optimizers = OtherOptimizers(self.setup.model, self.setup.optimizers)
        self.landings = {each: Landings(each) for each in self.setup.optimizers}
        _engines.add(self)

    def start(self, fill: Callable[[], Any], load: Callable[[], Any]) -> None:
        """Start, also after ranks have changed: `fill` sets weights, `load` the rules' state. Collective."""
        self.agree()
        self.free: FreeRunner | None = None  # of all free-running rules
        self.begun, self.stepped = False, set[Optimizer]()  # a step has begun; optimizers that have stepped in it
        self.loaded: int | None = None  # the step of the state that has been loaded
        with or_abandon(self.runtime):
            adam, comm = all("Adam" in type(each).__name__ for each in self.setup.optimizers), self.runtime.comm
            for sentence in known_losses(self.setup.rules, comm.size, adam) if comm.rank == 0 else ():
                warnings.warn(sentence, stacklevel=5)
            fill()
            self.backward = Backward(self, self.gradients_landed)
            self.make_buckets()
            load()

    @property
    def setting(self) -> tuple[int, int]:
        """Return (the bytes of a bucket, the number of flows), both of which `recut` changes."""
        return self.setup.bucket_bytes, self.flows

    def take_from_rank_0(self) -> None:
        if self.setup.broadcast:
            self.together("broadcast", lambda comm: take_from(0, self.setup, comm))

    @property
    def flows(self) -> int:
        return self.runtime.channels[0].comm.flows

    def make_setup(self, make: Make | None = None) -> AttachSetup:
        setup = (make or self.make)(self.ever)
        check_others(setup, [each.setup for each in _engines if each is not self and not each.runtime.over])
        return setup

    def together(self, label: str, work: Callable[[Comm], Any], meet: bool = False) -> Any:
        if meet:
            self.clock.outside(label)
            self.backward.drop_failed()
        return super().together(label, work, meet)

    # Buckets

    def make_buckets(self) -> None:
        setup, channels, self.since = self.setup, self.runtime.channels, self.clock.step
        self.ever, self._ids = setup.names, frozenset(map(id, setup.names))
        self.log = Logbook(channels[0].lane.clock, on=self.runtime.comm.size > 1)
        self.close()
        self.runners = []
        for i, (rule, cut) in enumerate(zip(setup.rules, setup.buckets_of_rules, strict=True)):
            channel, kind = channels[channel_of(rule)], GradientRunner if rule.what == "grad" else WeightRunner
            self.runners.append(kind(i, rule, buckets_of(cut, rule, channel.comm), channel))
            self.runners[-1].weights = partial(getattr, self, "constant")
        self.on_weights = [runner for runner in self.runners if isinstance(runner, WeightRunner)]
        free = [runner for runner in self.on_weights if agrees(runner.rule)]
        if self.runtime.host and self.free is None:
            weight = 1.0 if setup.weight is None else None if callable(setup.weight) else number(setup.weight)
            self.free = FreeRunner(free, self.runtime.host, weight)
        for pace, runner in zip(self.free.paces if self.free else (), free, strict=True):
            pace.runner = runner  # new buckets; an agreement under way continues
        self.backward.take([runner for runner in self.runners if isinstance(runner, GradientRunner)])
        for each in self.runners:
            warm_up([each.rule.stage], [bucket.flat for bucket in each.buckets], each.channel)
            each.make_states()
            stage, but = each.rule.stage, "anchor" if each.rule.stage.anchored else ""
            own = any(path != but for state in each.states for path, *_ in remembered(stage, state))
            if own and each.rule.window == "free_running":
                raise ValueError(f"{each.rule!r} remembers something; a free-running rule takes a stage without state")
            if self.comm.membership.changes:
                each.journal = []
        self.rebuilt()

    def recut(self, bucket_bytes: int, flows: int) -> None:
        """Make buckets of `bucket_bytes`, and use `flows` connections. Collective, unless both are unchanged."""
        flows = flows if self.runtime.comm.size > 1 else self.flows
        if (bucket_bytes, flows) == self.setting:
            return
        check_device(self.comm.group, self.setup.device, flows)
        make = self.make if bucket_bytes == self.setup.bucket_bytes else partial(self.make, bucket_bytes=bucket_bytes)
        self._rebuild(make, f"new buckets over {flows} flows", flows)

    def _may_reorder(self) -> bool:
        """Return whether there are several buckets of gradients, and new buckets after the first step lose no state."""
        if self.free is not None or self.runtime.comm.size == 1 or self.comm.membership.changes:
            return False  # ranks are at different steps; or there is one rank; or a new rank would have other buckets
        runners = self.backward.runners
        kept = (remembered(runner.rule.stage, state) for runner in runners for state in runner.states)
        own = any(carry is None for each in kept for _, _, carry in each)
        return not own and any(len(runner.buckets) > 1 for runner in runners)

    def follow_gradients(self) -> None:
        """Order buckets as gradients arrived on rank 0 in the first step, as DDP does, if launches come earlier so."""
        arrived, self.backward.arrived = self.backward.arrived or (), None
        cuts = [[bucket.params for bucket in runner.buckets] for runner in self.backward.runners]
        mine = better_order(cuts, arrived, self.setup.names, self.setup.sizes["grad"])
        order = self.together("the order of gradients", lambda comm: comm.broadcast_object(mine))
        if order is not None:
            self._rebuild(partial(self.make, order=order), "the order of gradients")

    def follow_parameters(self) -> None:
        """Make new buckets if parameters have become trainable, been added or been removed. All ranks do so together.

        A parameter that is frozen later stays in its bucket. With `broadcast`, a new parameter starts with rank 0's
        values. A gradient that it already has is averaged without compression.
        """
        known, ids, params = self.runtime.setup.names, self._ids, self.runtime.setup.model.parameters()
        held = [p for p in params if p.requires_grad or id(p) in ids or p.grad is not None]  # frozen after a backward
        if len(held) == len(known) and all(map(is_, held, known)):
            return
        self.ever = set(held)
        self.clock.outside("a change of the trainable parameters")
        self._rebuild(self.make, "other parameters")
        averaged = {p for runner in self.acting() for p in runner.params() if p not in known}
        if late := [p for p in self.setup.names if p in averaged]:
            self.together("gradients of new parameters", partial(mean_gradients_, late, weights=self.backward.weights))
            for each in self.landings.values():
                each.fresh.update(map(id, late))

    def gradients_landed(self, params: Collection[int]) -> None:
        if self.backward.dropped:
            return
        for each in self.landings.values():
            each.fresh.update(params)
        self.follow_parameters()
        if not self.landings:  # no optimizer: then every backward that lands is a step
            self.end_step()
        elif self.backward.passes == MANY:
            self.other_optimizers.warn(
                f"{MANY} backward passes have been averaged since the attached optimizer stepped: give attach the "
                "optimizer that trains, or use att.no_sync() while gradients are accumulated"
            )

    def _rebuild(self, make: Make, label: str, flows: int | None = None, begin: bool = True) -> None:
        """Agree on a new setup, and carry over the state. With `begin`, broadcast new parameters. Collective."""
        known = self.setup.names
        setup = agree(self.runtime.monitor, lambda: self.make_setup(make), label)  # nothing has changed if this raises
        state = self.state_dict()
        for runner in self.runners:
            runner.drop()
        if flows not in (None, self.flows):
            self.runtime.use_flows(flows)
        self.make, self.runtime.setup = make, setup
        new = [p for p in setup.names if p not in known]
        if new and begin and setup.broadcast:  # before the rules copy their values
            self.together("new parameters", lambda comm: broadcast_tensors(new, comm, setup.device))
        self.make_buckets()
        names = {p: known.get(p, f"new {name}") for p, name in setup.names.items()}  # a removal may rename others
        load_runners(self.runners, names, state["rules"], same_ranks=True, made=True)
        self.begin()

    # Steps

    @torch.no_grad()
    def begin(self) -> None:
        """Launch the flights that land when the next step begins, unless a step has begun."""
        for runner in () if self.begun else self.on_weights:
            if runner.rule.window == "between_steps" and runner.exchanges(self.clock.step) and not runner.air:
                self.launch(runner, keep=True)

    def launch(self, runner: WeightRunner, keep: bool) -> None:
        runner.weights, runner.weight = self.weigh(runner.weight), 0.0
        runner.launch_all(self.clock.step, keep)

    @torch.no_grad()
    def begin_step(self, land: bool = True) -> None:
        """Begin a step, unless it has begun. This is called before each optimizer steps.

        Flights that were launched between the steps land now; if `land` is False, they land when this step ends. With a
        closure, `land` is False, because the optimizer may later restore weights that it saved before the closure.
        """
        if not self.begun:
            self.begun = True
            if land and self.on_weights:
                self._land_between()
            beginners = [each for each in self.on_weights if each.round == 0 and self._takes_first_step(each.rule)]
            if beginners:
                self.clock.announce(Turn.BEGIN)
            for runner in beginners:
                runner.make_states()

    def _land_between(self) -> None:
        for runner in self.on_weights:
            if runner.rule.window == "between_steps" and runner.air:
                runner.land_all()

    def _takes_first_step(self, rule: Rule) -> bool:
        """Return True if `rule` begins in this step, and its state has a copy of the weights that was not loaded."""
        first = rule.begun(self.clock.step) and not rule.begun(self.clock.step - 1)
        known = self.loaded is not None and rule.begun(self.loaded)
        return first and not known and any(each.follows for each in rule.stage.whole())

    @torch.no_grad()
    def end_step(self) -> None:
        """End a step: land the flights that are due, exchange weights, and launch flights that land in later steps."""
        step, self.begun = self.clock.step, False
        if self.on_weights:
            self.clock.announce(Turn.END)
            weight = self.ask() if self.backward.weight is None else self.backward.weight
            for runner in self.on_weights if callable(self.setup.weight) else ():
                runner.weight += weight if runner.rule.acts(step) else 0.0
        try:
            if self.on_weights:
                self._land_between()
            for runner in self.on_weights:
                if runner.rule.delay and runner.is_due(step):
                    runner.land_all()
            for runner in self.on_weights:
                after = runner.rule.window == "after_step" or runner.rule.stage.one_sided
                if after and runner.exchanges(step):
                    self.launch(runner, keep=runner.rule.delay > 0 and runner.rule.mix is None)
                    if runner.rule.delay == 0:
                        runner.land_all()
        finally:  # the optimizer has stepped, even if the exchange after it has been lost
            self.log.step_ended(step)
            self.clock.step = step + 1
        self.begin()
        if self.free is not None:
            self.free.step_ended(self.clock.step)
        self.backward.step_ended()
        if self.backward.arrived is not None and not self.clock.joined:
            self.follow_gradients()
        if self.comm.membership.changes:  # the loss of a rank in a later flight does not undo this step
            self.decisions.settle(max((rule.delay for rule in self.setup.rules), default=0), alone=True)
            for runner in self.runners:
                runner.commit()
        for listener in list(self.listeners):
            listener()

    # The state

    def state_dict(self, flights: bool = True, same_ranks: bool = True) -> dict[str, Any]:
        state = super().state_dict(flights, same_ranks)
        if self.tuned is not None:
            state["tuned"] = dict(self.tuned)
        if self.setup.order:
            state["order"] = list(self.setup.order)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.resume(self.clock.step)
        self.log.clear()

    def resume(self, step: int) -> None:
        self.clock.step = self.loaded = self.since = step
        self.begin()

    def load(self, state: dict[str, Any], same_ranks: bool) -> None:
        """Load the states of the rules. With `same_ranks`, first make the buckets that the saved training had."""
        if same_ranks and "tuned" in state:
            self.tuned = dict(state["tuned"])
            self.recut(**self.tuned)
        if same_ranks and (order := tuple(state.get("order", ()))) != self.setup.order:
            self._rebuild(partial(self.make, order=order), "the order of the loaded state")
        self.backward.arrived = None  # a resumed training keeps the buckets of the state
        saved = {name for rule in state["rules"].values() for name in rule["parameters"]}
        params = named(self.setup.model).items()
        if frozen := [p for p, name in params if name in saved and p not in self.setup.names]:  # frozen now only
            self.ever = {*self.setup.names, *frozen}
            self._rebuild(self.make, "parameters of the loaded state", begin=False)
        load_runners(self.runners, self.setup.names, state["rules"], same_ranks)

    # The end

    def finish(self) -> None:
        if not self.runtime.over:
            try:
                super().finish()
            except PeerError:
                if not self.comm.membership.changes:
                    raise  # in an elastic group, the loss of a rank at the end is no error
            others, waiting = self.other_optimizers, [each.optimizer for each in self.landings.values() if each.passes]
            if self.clock.step == 0:  # the rules may have waited for a step that never came
                if others.found and not any(log.launches for each in self.runners for log in each.ledgers):
                    raise RuntimeError(
                        f"{others.found} has trained the model and is not the optimizer that was attached, so that no "
                        "rule ever flew: each rank has trained alone; give attach the optimizer that trains"
                    )
                if waiting and not self.backward.runners:
                    others.waits(waiting[0])
            self.comm.membership.ended(self)

    def abandon(self, error: BaseException | None) -> None:
        super().abandon(error)
        self.comm.membership.ended(self)

    def drain(self) -> None:
        self.backward.end_failed()
        if self.free is not None:
            self.free.finish()
        super().drain()
