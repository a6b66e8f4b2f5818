"""Membership in an elastic group: `join`, the group's `Comm`, and attachments that continue in the next round."""

import contextlib
import functools
import gc
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

import torch
import torch.distributed as dist

from ..arguments import Positive, Range, checked, integer, text
from ..attach import Engine
from ..comm import Comm, let_go
from ..monitor import PeerError
from .carrying import Carrying, Kept, keep
from .doors import Knocks
from .rendezvous import Round, Settings, endpoint_of, silent_of
from .rounds import PROGRESS, Left, Rounds, log, run

FIRST_STEPS = 3.0  # seconds for the first steps of a round
GLOO = re.compile(r"(Gloo \w+ failed|\[\S*gloo/\S+:\d+\])")  # how errors of gloo begin
FRUITLESS = 3  # regroups in a row, without a step or a lost rank, after which the error is raised


@dataclass(frozen=True)
class Change:
    """A change of the group.

    Attributes:
        rank, ranks: the rank of this process and the number of ranks, from now on.
        before: for each rank, its rank before the change; None for a rank that has joined.
        lost: the names of lost ranks, which begin with host and process number.
        step: the number of optimizer steps made since training began; all ranks continue with the next step.
        seconds: the time since this rank noticed the end of the round; 0 on a rank that joins.
        why: the reason for the change, a sentence; "" on a rank that joins.
    """

    rank: int
    ranks: int
    before: tuple[int | None, ...]
    lost: tuple[str, ...]
    step: int
    seconds: float
    why: str


class Membership(Rounds):
    """The membership of this process in a group whose ranks come and go."""

    changes: ClassVar[bool] = True

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.bodies = 0  # the number of `recoverable` blocks that have ended
        self._engines: list[Engine] = []
        self._kept: dict[Engine, Kept | None] = {}  # of attachments outside of a round; None: never in one
        self._callbacks: list[Callable[[Change], None]] = []
        self._joined: Change | None = None  # by which this rank joined: callbacks get it when they are registered
        self._fruitless = 0

    def step(self) -> int:
        engines = self._at_work()
        free = any(rule.window == "free_running" for engine in engines for rule in engine.setup.rules)
        return -1 if free else max([engine.clock.step for engine in engines], default=0)

    def _at_work(self) -> list[Engine]:
        return [engine for engine in list(self._engines) if engine not in self._kept]

    def elastic(self, call: str) -> "Membership":
        return self

    def start(self, engine: Engine) -> None:
        """Start an attachment in this round, or in a later round if this round breaks. Collective."""
        if self.round is None:
            raise RuntimeError("this rank has left the group with its last attachment; call bk.elastic.join again")
        self._kept[engine] = None
        self._engines.append(engine)
        try:
            try:
                self._joined = self._start(engine)
            except PeerError as error:
                self.regroup(error)
        except BaseException:
            self.ended(engine)
            raise

    def _start(self, engine: Engine) -> Change | None:
        """Start an attachment in this round; return a `Change`, or None if no rank has trained before."""
        assert self.round is not None
        round, survivors = self.round, self.round.survivors()
        carrying = Carrying(engine, self._kept.get(engine) if round.rank in survivors else None, survivors)
        try:
            engine.start(carrying.fill, carrying.load)
        except BaseException:
            if carrying.kept is not None:
                self._kept[engine] = carrying.kept
            raise
        del self._kept[engine]
        if not self._kept:
            self._latest = (round.number, round.rank)  # this rank has a whole state
        if not survivors:
            return None
        before = tuple(member.rank if rank in survivors else None for rank, member in enumerate(round.members))
        return Change(round.rank, round.size, before, (), engine.clock.step, 0.0, "")

    def ended(self, engine: Engine) -> None:
        """Forget an attachment that is detached; leave the group if no attachment is left."""
        self._kept.pop(engine, None)
        self._engines = [each for each in self._engines if each is not engine]
        if not self._engines:
            self.end_round(gone=True)

    def on_regroup(self, callback: Callable[[Change], None]) -> None:
        self._callbacks.append(callback)
        if self._joined is not None:
            try:
                callback(self._joined)
            except RuntimeError as error:
                if not self._is_loss(error):
                    raise
                self.regroup(error)

    # A step

    @contextlib.contextmanager
    def recoverable(self) -> Iterator[None]:
        self._touched = time.monotonic()
        self._joined = None
        step = self.step()
        buffers = [(x, x.clone()) for engine in self._engines for x in engine.setup.model.buffers()]
        try:
            yield
        except RuntimeError as error:
            if not self._is_loss(error):
                raise
            self.bodies += 1
            with torch.no_grad():
                for x, before in buffers if self.step() == step else ():
                    x.copy_(before)
            self.regroup(error)
        else:
            self._fruitless, self._stuck, self.bodies = 0, None, self.bodies + 1
            if self.why:
                self.regroup(PeerError(self.why))
            elif self.pausing.due(self.step()):
                self.regroup(None)
        self._touched = time.monotonic()

    def _is_loss(self, error: RuntimeError) -> bool:
        """Return whether a lost rank may have caused `error`: a PeerError, a network error, or one after the round."""
        return isinstance(error, (PeerError, dist.DistError)) or bool(self.why) or bool(GLOO.match(str(error)))

    def regroup(self, error: BaseException | None) -> None:
        """Enter the next round; continue from the last complete step. `error` is None if a pause ended the round."""
        began, old = time.monotonic(), self.round
        why = str(self.pausing.plan["why"] if error is None else error)
        self._stuck = self._stuck or (None if error is None else began)
        error = self._keep(error)
        if self.leaving:
            self.end_round(gone=True)
            raise Left
        refused, says = 0, 0.0
        while True:
            self.cut, tried, was_stuck = "", self._names(), self.is_stuck()
            self.meet()
            why = self.cut or why
            try:
                changes = [self._start(engine) for engine in self._engines]
                self._report(changes[0], old, why, time.monotonic() - began, error)
                run(free, "free")
                return
            except ValueError as differs:
                refused += 1
                for engine in self._engines:
                    engine.make_setup(engine.make)  # raises if this group cannot work, such as pairs of an odd number
                # If a new rank has another setup, the new rank raises this error and ends; the other ranks meet again.
                if refused == FRUITLESS or self.round is None or self.round.rank not in self.round.survivors():
                    raise
                self._keep(differs)
            except RuntimeError as again:  # a rank was lost while all started, or in callbacks
                if not self._is_loss(again) or self._fruitless >= FRUITLESS:
                    raise
                if was_stuck and not self.cut and tried == self._names():
                    patience = self.settings.patience
                    raise PeerError(f"no step for {patience:g} s, and nobody is lost: {again}") from again
                self._keep(again)
                if cut := self._cut_from():
                    if time.monotonic() > says:
                        says = time.monotonic() + PROGRESS
                        log.warning("%s cannot reach %s, and all meet again: %s", self.name, cut, again)
                    time.sleep(self.settings.keep_alive)  # so that ranks do not meet many times in a second

    def _names(self) -> list[str]:
        return [] if self.round is None else [member.name for member in self.round.members]

    def _cut_from(self) -> str:
        """Return the names of members whose doors do not answer, joined by commas. Wait some seconds for answers."""
        knocks, members = Knocks(), () if self.round is None else self.round.members
        while (silent := silent_of(members, knocks)) is None:  # for a few seconds
            time.sleep(0.02)
        knocks.end()
        return ", ".join(silent)

    def _keep(self, error: BaseException | None) -> BaseException | None:
        """Stop all attachments, and store their states. Return the error that ended the round, or None."""
        for engine in self._at_work():
            if error is None:
                try:
                    self._kept[engine] = keep(engine, None)
                except PeerError as late:
                    error = late
            if error is not None:
                self.broken(self.round, str(error))
                self._kept[engine] = keep(engine, error)
        for engine in self._engines:
            if hasattr(engine, "runtime"):
                engine.runtime.abandon(error)
        return error

    def _report(self, change: Change | None, old: Round | None, why: str, seconds: float, error: Any) -> None:
        """If `change` is given, complete it, and pass it to the callbacks of `on_regroup`; rank 0 logs it."""
        if change is None or self.round is None:
            return
        here = self._names()
        gone = tuple(member.name for member in old.members if member.name not in here) if old is not None else ()
        change = replace(change, lost=gone, seconds=seconds, why=why)
        self._fruitless = self._fruitless + 1 if error is not None and not gone else 0
        if self._fruitless >= FRUITLESS:
            if not self._cut_from():
                raise PeerError(f"{FRUITLESS} regroups, in which no rank was lost, have not helped: {why}") from error
            self._fruitless = 0  # until the patience ends
        if change.rank == 0:
            lost = f"; lost: {', '.join(gone)}" if gone else ""
            log.warning("%d ranks go on from step %d after %.1f s%s; %s", change.ranks, change.step, seconds, lost, why)
        # Until its first step, a rank that has joined passes the latest change to each callback that it registers.
        self._joined = change if change.before[change.rank] is None or self._joined is not None else None
        for callback in self._callbacks:
            callback(change)


def free() -> None:
    """Free the process groups of past rounds. Errors and their frames keep these alive in reference cycles.

    A garbage collection stops all threads for a while, so it runs after the first steps of the new round. A thread
    that still waits for a message in a group keeps this group alive until the message times out.
    """
    pause = FIRST_STEPS
    time.sleep(pause)
    gc.collect()
    while let_go():
        time.sleep(pause)
        pause *= 2


@dataclass(frozen=True, eq=False, repr=False)
class ElasticComm(Comm):
    """A group of ranks that come and go: `group`, `rank` and `size` are those of the current round.

    Its collectives raise a `PeerError` when the round ends, so that `recoverable` can continue. The work that
    `all_reduce_later` and other methods return is an exception: it waits for a lost rank for up to ten minutes.
    """

    membership: Any = None  # type: ignore[misc]

    def follow(self, group: Any) -> None:
        vars(self).update(group=group, rank=int(group.rank()), size=int(group.size()))


def _ends_with_the_round(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def during(self: ElasticComm, *args: Any, **options: Any) -> Any:
        return self.membership.during(functools.partial(method, self, *args, **options), self.group)

    return during


_MESSAGES = "all_reduce reduce_scatter all_gather broadcast gather_objects broadcast_object exchange_each"
for _name in _MESSAGES.split():
    setattr(ElasticComm, _name, _ends_with_the_round(getattr(Comm, _name)))


@checked
def join(
    endpoint: str,
    least: Positive = 1,
    most: int = 64,
    *,
    every: Positive = 1,
    name: str = "baguakit",
    keep_alive: Annotated[float, Range(0.05, 600)] = 1.0,
    last_call: Annotated[float, Range(0.05, 600)] = 1.0,
    patience: Annotated[float, Range(1)] = 600.0,
) -> Comm:
    """Join a group whose ranks come and go; wait for enough ranks, and return the group's `Comm`.

    `comm.rank` and `comm.size` change with the group. Build the model before this call, because all ranks wait for a
    rank that is between `join` and `bk.attach`. Start the store with `python -m baguakit.store`. Anyone who can connect
    to the store can run code on every rank. docs/elastic.md has a whole program.

    A call in the main thread also sets a handler of SIGTERM, if there is none. The handler makes this rank leave.

    Args:
        endpoint: "host:port" of the store; without ":port", the port is 29400.
        least: the smallest number of ranks that train; fewer ranks wait for others, and print a line at times.
        most: the largest number of ranks, up to 64; further processes wait until a rank is lost.
        every: new ranks join after a step whose number is a multiple of this. With `diloco`, pass its `every`.
        name: distinguishes trainings that share a store.
        keep_alive: the seconds between two signs of life of a rank. A rank must answer in this time when a round ends.
        last_call: the seconds for which a new group of at least `least` ranks waits for more ranks.
        patience: the seconds for which a rank waits for a group, in this call or later, before it raises TimeoutError.
            If no step is made for this time, ranks that cannot reach all others are left out.

    Raises:
        ValueError: an argument is impossible, or `least`, `most`, `every` or `keep_alive` differs between ranks.
        TimeoutError: no group has formed within the patience, or the store cannot be reached.
    """
    integer("most", most, least, 64)
    name = text("name", name)
    membership = Membership(Settings(*endpoint_of(endpoint), name, least, most, keep_alive, last_call, patience, every))
    membership.meet()
    comm = ElasticComm(membership.group, membership=membership)
    membership.follow = comm.follow
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        # `leave` runs on a thread, because the signal may have interrupted another call to the store.
        signal.signal(signal.SIGTERM, lambda *_: run(membership.leave, "leave"))
    return comm
