"""The life of rules in the hooks of a trainer: from the agreement of all ranks to the end of groups and threads.

    agree, groups and lanes, runners  →  begin … land, in each step  →  drain, close
                                      ↖  state_dict, load_state_dict

`bk.attach` and the hooks of DDP and FSDP2 launch in different places, so each of them has a subclass of `Life`. This
module holds what the subclasses share: agreement, landing, saved states and the end. `Attached` is the user's view.
"""

import contextlib
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..comm import Comm, Weights, number, row_of, weights_over
from ..keeping import Joint
from ..lanes import Moment, between, moment, passed
from ..monitor import Collective, PeerError
from ..runtime.agreement import AnySetup
from ..runtime.runtime import Runtime, or_abandon
from ..windows import Window
from .checkpoint import save_runner
from .gradients import FAILED, GradientRunner
from .runner import RECORDED, RuleRunner, Weighing
from .sealing import opened, sealed


class Turn(IntEnum):
    """The next collective of a rank: a backward, the start of a step, or the end of a step."""

    BACKWARD, BEGIN, END = 1, 2, 3


@dataclass(eq=False)
class Clock:
    """The step of an attachment, and the modes that its user has entered."""

    step: int = 0  # optimizer steps made since the attachment was made
    synchronising: bool = True  # false inside `no_sync()`, where gradients are only accumulated
    tell: Callable[[int], None] | None = None  # in `join()`: announces the next collective to ranks out of batches
    joined: str = ""  # the current call of `join()`; "" outside

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        before, self.synchronising = self.synchronising, False
        try:
            yield
        finally:
            self.synchronising = before

    def announce(self, what: Turn) -> None:
        """In `join()`, announce the next collective to ranks that have run out of batches. Otherwise do nothing."""
        if self.tell is not None:
            self.tell(what)

    def outside(self, what: str) -> None:
        """Raise a RuntimeError inside `join()`: a rank that has run out of batches would not make the call `what`."""
        if self.joined:
            raise RuntimeError(
                f"all ranks make {what} together, and inside att.join() one that has run out of batches would not; "
                "call it before or after"
            )


STEP, BACKWARD = "step", "backward"


@dataclass(frozen=True)
class StepRecord:
    """The times of one optimizer step. The step begins when the previous step ends, or when the log is cleared."""

    step: int
    begin: Moment
    end: Moment
    parts: tuple[tuple[str, Moment, Moment], ...]  # each with its name


@dataclass(eq=False)
class Logbook:
    """The latest steps on this rank, recorded by hooks. A moment is as in `lanes`: the host does not wait for it."""

    device: torch.device  # of the recorded moments
    on: bool  # False records nothing
    steps: deque[StepRecord] = field(default_factory=lambda: deque(maxlen=RECORDED))

    def __post_init__(self) -> None:
        clock = time.perf_counter if self.device.type == "cpu" else partial(moment, self.device)
        self.now: Callable[[], Moment] = clock if self.on else lambda: None  # the current moment
        self.clear()

    def clear(self) -> None:
        self.steps.clear()
        self.parts: list[tuple[str, Moment, Moment]] = []  # of the current step, as in its `StepRecord`
        self._since = self.now()

    def step_ended(self, step: int) -> None:
        if self.on:
            now = self.now()
            self.steps.append(StepRecord(step, self._since, now, tuple(self.parts)))
            self._since = now
        self.parts = []

    def seconds_per_step(self) -> float | None:
        """Return the mean time of the steps that the device has finished; None if there are none. Waits for nothing."""
        over = [record for record in self.steps if passed(record.end)]
        return between(over[0].begin, over[-1].end) / len(over) if over else None


REST = 1.0  # seconds that a lane may still compute; if it does so for longer, it waits for a rank that is lost


@dataclass(eq=False)
class Decisions:
    """The decisions, one after each backward, whether states keep their changes. With a delay, several are pending."""

    joint: Joint | None = None  # holds the changes of states by a backward's flights; None if no decision is needed
    alike: bool = True  # stages that agree give all ranks the same results, so that ranks need not ask each other
    _under_way: deque[tuple[RuleRunner, Collective]] = field(default_factory=deque, init=False)

    def begin(self, runners: Sequence[RuleRunner]) -> None:
        """Start the decision for the flights of `runners`: it runs on the lane after these flights. Does not wait."""
        if (joint := self.joint) is None or not runners:
            return
        flags = {runner: runner.flags for runner in runners if isinstance(runner, GradientRunner)}
        agree = not (self.alike and all(runner.rule.stage.same_on_all_ranks for runner in runners))

        def of_used(whose: tuple[GradientRunner, int] | None, state: Tensor) -> Tensor | None:
            return None if whose is None else whose[0].used(flags[whose[0]], whose[1], state)

        def settle(comm: Comm) -> None:
            def on_all_ranks(ok: Tensor) -> Tensor:
                return comm.all_reduce(ok.to(torch.uint8), dist.ReduceOp.MIN).bool()

            for runner, each in flags.items():
                stage = runner.rule.stage
                # A rank whose backward failed sends NaN, so an average of all ranks is NaN. Other stages need flags.
                if each.rows is not None and not (stage.averages and stage.same_on_all_ranks):
                    joint.note(each.rows[:, 0] != FAILED)
            joint.settle(on_all_ranks if agree else None, of_used)

        # Without `agree`, a rank whose gradients are all there may decide at once, and launch nothing here.
        begun = runners[0].channel.begin("the decision on what to keep", settle, shared=agree)
        self._under_way.append((runners[0], begun))

    def settle(self, but: int = 0, alone: bool = False) -> None:
        """Wait for all decisions but the newest `but`. If a rank is lost, raise or, if `alone`, decide alone."""
        lanes = {runner.channel.lane for runner, _ in self._under_way} if alone else set()
        try:
            while len(self._under_way) > but:
                runner, collective = self._under_way.popleft()
                runner.channel.monitor.wait_for(collective)
        except PeerError:
            if not alone:
                raise
            for lane in lanes:
                lane.rest(REST)
            self._under_way.clear()
            if self.joint is not None:
                self.joint.settle()

    def forget(self) -> None:
        if self.joint is not None:
            self.joint.forget()


class Life(Generic[AnySetup]):
    """The rules that one trainer uses on this rank, from the agreement of all ranks to the end; see also `Runtime`."""

    alike = True  # a stage that agrees gives all ranks the same result
    runtime: Runtime[AnySetup]  # monitor, groups and lanes
    decisions: Decisions  # whether states keep the changes of a backward

    def __init__(self, kind: str, make: Callable[..., AnySetup], comm: Comm, timeout: Any) -> None:
        self.kind, self.make, self.comm, self.timeout = kind, make, comm, timeout
        self.clock, self.since = Clock(), 0  # the step, and that at which the buckets were made
        self.runners: list[Any] = []  # one for each rule
        self.log = Logbook(torch.device("cpu"), on=False)  # the times of training since the buckets were made
        self.unhook = contextlib.ExitStack()  # takes hooks out, at the end
        self.constant: Weights | None = None  # the weights of ranks, if they are numbers that differ
        self.idle = False  # this rank has run out of batches, so that its weight is 0

    def agree(self) -> None:
        """Agree with all ranks on the setup, and make the runtime. Collective: an error is raised on all ranks."""
        self.decisions = Decisions(alike=self.alike)
        if self.comm._weights is not None:
            raise ValueError("comm has weights already; give its weight as weight=, and a Comm without weights")
        self.runtime = Runtime(self.kind, self.make_setup, self.comm, self.timeout, self.aborted)
        weight = self.setup.weight
        if weight is not None and not callable(weight):
            with or_abandon(self.runtime):
                own = self.together("the weights of ranks", lambda comm: comm.weighted(weight))
                self.constant = own._weights
                for rule in self.setup.rules:
                    rule.stage.check(own)
        if len(self.setup.kinds) > 1 and all(rule.what == "grad" for rule in self.setup.rules):  # known to rank 0
            warnings.warn(
                f"ranks train on {' and '.join(sorted(self.setup.kinds))}: all get the same gradients, but the "
                "optimizer of each device rounds in its own way, and so replicas drift apart; call merge() every few "
                "hundred steps, or add a rule on weights, such as bk.algorithms.local_sgd(every=500)",
                stacklevel=2,
            )

    def make_setup(self) -> AnySetup:
        return self.make()

    @property
    def setup(self) -> AnySetup:
        return self.runtime.setup

    def together(self, label: str, work: Callable[[Comm], Any], meet: bool = False) -> Any:
        return self.runtime.channels[0].together(label, work, meet)

    def ask(self) -> float:
        """Return the weight of what this rank has just learned from, if a function gives it; else 1."""
        if self.idle or not callable(self.setup.weight):
            return 0.0 if self.idle else 1.0
        weight = self.setup.weight()
        return number(weight.item() if isinstance(weight, Tensor) and weight.numel() == 1 else weight)

    def weigh(self, mine: float) -> Weighing:
        """Begin to exchange the weights of ranks, if functions give them; return a function that waits for them."""
        if (channel := self.runtime.weighing) is None:
            constant = self.constant
            return lambda: constant
        row = row_of(mine, self.runtime.channels[0].comm)
        begun = channel.begin("the weights of ranks", lambda comm: weights_over(comm, row))
        return partial(self.runtime.monitor.wait_for, begun)

    def acting(self) -> list[Any]:
        step = self.clock.step
        return [runner for runner in self.runners if runner.rule.what == "grad" and runner.rule.acts(step)]

    def land(self, acting: Sequence[Any], but: int = 0) -> bool:
        """Land the buckets of this backward, once all are launched; with a delay, those of an earlier backward.

        First wait for all decisions but the newest `but`. Return True if it is known that the landed backward failed.
        """
        self.decisions.settle(but)
        self.decisions.begin(acting)
        failed = [runner.arrive_all() for runner in acting]
        return any(failed)

    def check(self) -> None:
        """Raise the PeerError that the monitor has found, if any. On a GPU, later results may be unfinished sums.

        Raise nothing if the ranks of the group may change: there the host has already waited for every flight.
        """
        if not self.comm.membership.changes:
            self.runtime.monitor.check()

    def state_dict(self, flights: bool = True, same_ranks: bool = True) -> dict[str, Any]:
        """Return the state of `Attached.state_dict`, without its seal. The arguments are those of `save_runner`."""
        if flights:
            self.decisions.settle()
        return {
            "version": 1,
            "ranks": self.runtime.comm.size,
            "step": self.clock.step,
            "rules": {str(i): self.save(each, flights, same_ranks) for i, each in enumerate(self.runners)},
        }

    def save(self, runner: RuleRunner, flights: bool, same_ranks: bool) -> dict[str, Any]:
        return save_runner(runner, self.setup.names, flights, same_ranks)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.clock.outside("load_state_dict()")
        self.decisions.settle()
        self.load(state, state["ranks"] == self.runtime.comm.size)
        self.clock.step = self.since = int(state["step"])

    def load(self, state: dict[str, Any], same_ranks: bool) -> None:
        raise NotImplementedError

    def finish(self) -> None:
        """Remove the hooks, wait for flights in the air, and close groups and threads. Idempotent."""
        if not self.runtime.over:
            self.unhook.close()
            try:
                self.runtime.finish(self.drain)
            finally:
                self.close()

    def abandon(self, error: BaseException | None) -> None:
        """Remove the hooks, and end without waiting for any rank. Tell the other ranks the error. Idempotent."""
        self.unhook.close()
        self.close()
        self.runtime.abandon(error)

    def drain(self) -> None:
        """Wait for flights in the air, and drop them; raise a PeerError if another rank launched different flights."""
        self.decisions.settle()
        for runner in self.runners:
            runner.drop()
        monitor = self.runtime.monitor
        monitor.compare(monitor.rank - 1, monitor.rank + 1, sure=True)
        monitor.check()

    def close(self) -> None:
        for each in [each for runner in self.runners for state in runner.states for each in state.values()]:
            if isinstance(each, Window):
                each.close()

    def aborted(self) -> None:
        """Wake up hooks that wait, because the groups have been aborted. Any thread may call this."""


View = TypeVar("View", bound="Attached")


class Attached:
    """The user's view of attached rules. The end of a `with` block detaches the rules."""

    def __init__(self, life: Life[Any]) -> None:
        self._life = life

    @property
    def step(self) -> int:
        """Return the number of optimizer steps, or of averaged backward passes in the hooks of DDP or FSDP2."""
        return self._life.clock.step

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the rules: tensors by parameter name, and counters. Local.

        Each rank saves its own state. The tensors are copies, which `torch.load(weights_only=True)` accepts. Waits for
        flights in the air and saves their results; flights of free-running rules are left out. Raises a PeerError if a
        rank is at fault: on a GPU, an unfinished sum may have reached the state.
        """
        self._life.check()
        return sealed(self._life.state_dict(), self._life.runtime)

    def load_state_dict(self, state: dict[str, Any], strict: bool = True) -> None:
        """Continue from the point where `state_dict` was called. Local, but every rank calls it, between two steps.

        The order of a resume is: attach, load the model, load the optimizer, and then call this. The buckets may
        differ; if `bk.tune.autotune` had ended, all ranks make the buckets that it found best. With another number of
        ranks, elementwise tensors are kept, averaged or zeroed as their stage declares; other state is made anew, and
        this is logged ("baguakit"). The hooks of DDP and FSDP2 read the tensors when the buckets next come: do not
        change the tensors until the next backward has ended.

        Args:
            state: a result of `state_dict`, perhaps of an earlier version. DDP, FSDP, `torch.compile` or activation
                checkpointing may have wrapped the model then, or may wrap it now.
            strict: False: load a state with errors of tensors, parameters or ranks, and log the errors ("baguakit").

        Raises:
            TypeError: `state` is not such a state.
            ValueError: the state belongs to other rules; or, if `strict`: a tensor is damaged or not finite, a
                parameter that a rule has state for is missing, the state belongs to another rank, or it was not saved
                together with the states that other ranks load.
        """
        self._life.load_state_dict(opened(state, self._life.runtime, self._life.runners, strict))

    def detach(self) -> None:
        """Remove every hook, wait for flights in the air (their results are dropped), and close groups and threads.

        Free-running rules answer the other ranks until all have detached. Idempotent.
        """
        self._life.finish()

    def __repr__(self) -> str:
        life, comm = self._life, self._life.runtime.comm
        rules, over = ", ".join(map(repr, life.setup.rules)), ", detached" * life.runtime.over
        buckets = " + ".join(str(len(runner.buckets)) for runner in life.runners)
        kind, place = type(self).__name__, f"rank {comm.rank} of {comm.size}"
        return f"<{kind}: {rules}, step {self.step}, buckets: {buckets}, {place}{over}>"

    def __enter__(self: View) -> View:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None:
            self._life.finish()
        else:
            self._life.abandon(error)
