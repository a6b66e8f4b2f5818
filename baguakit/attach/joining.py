"""Uneven inputs: a rank that has run out of batches answers the others until all have run out.

    at work      says what comes, a backward of step s or the start or end of that step, and does it
    run out      says that it has run out, hears what the others do, and does the same: it launches the same buckets in
                 the same order, zeros for gradients, and its weights as they are

So all ranks launch alike. What a rank says travels as a flight of its own, ahead of those that it speaks of. Ranks at
work need not wait for it, unless the number of them is the divisor.

Where gradients are averaged, all that work have the same weights, and the others take them at the end, or before
another rule follows that averages weights. In rules on weights a rank that has run out makes no progress of its own,
which is to divide by the number of all ranks.
"""

import contextlib
from collections import Counter, deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ..comm import Comm
from ..kernels.shared.uploads import uploaded
from .agreement import take_from
from .backward import Backward
from .clock import BACKWARD, BEGIN, END, unasked
from .conflicts import check_join
from .errands import Errand, begin, end
from .recutting import keep_up

if TYPE_CHECKING:
    from .engine import Engine

NOTHING = 0  # in the place of what comes, BACKWARD, BEGIN or END: this rank has run out
IN_WORDS = {BACKWARD: "a backward pass", BEGIN: "the start of a step", END: "the end of a step"}


class RanOut(RuntimeError):
    """A rank has run out of batches, and the others were to stop: they all do, between two launches."""


class Said(NamedTuple):
    """One rank's word.

    Attributes:
        what: comes next.
        step: the optimizer steps that it has made.
        answered: it has answered others, so that its weights may be old.
    """

    what: int
    step: int
    answered: int


@contextlib.contextmanager
def joined(engine: "Engine", by_all: bool, throw: bool) -> Iterator[None]:
    """See `Attachment.join`."""
    if engine.over:
        raise RuntimeError("this attachment is detached; call join() before it is")
    check_join(engine.plan, engine.plan.scaler, by_all)
    if engine.listeners:
        raise ValueError("bk.tune.autotune tunes with all ranks at work; let it end before join()")
    keep_up(engine)
    call = f"join(divide_by_initial_world_size={by_all}, throw_on_early_termination={throw})"
    engine.together(call, lambda comm: None, meet=True)
    clock, joining = engine.clock, Joining(engine, by_all, throw)
    clock.joined, clock.ask = call, joining.tell if engine.comm.size > 1 else unasked
    try:
        yield
        if not engine.over and engine.backward.end_failed():  # the last batch was skipped
            engine.backward.drop_gradients()
        clock.ask = unasked
        if not engine.over and engine.comm.size > 1:
            joining.answer()
    except RanOut:
        raise
    except BaseException as error:
        engine.abandon(error)
        raise
    finally:
        clock.joined, clock.ask = "", unasked


class Joining:
    """The talk of ranks with each other inside one `join()`.

    Args:
        engine: of the attachment.
        by_all: gradients are divided by the number of all ranks, and not of those at work.
        throw: raise a RuntimeError when a rank has run out.
    """

    def __init__(self, engine: "Engine", by_all: bool, throw: bool) -> None:
        self.engine, self.by_all, self.throw = engine, by_all, throw
        self.answered = False
        self.unread: deque[Errand] = deque()  # what has been said and need not be waited for

    # At work

    def tell(self, what: int) -> None:
        """Say what comes; wait for what the others say only where it matters."""
        self.unread.append(self._say(what))
        backward, step = self.engine.backward, self.engine.clock.step
        again, switches = what == BACKWARD and backward.passes > 0, what == END and self._weights_part(step)
        if self.by_all and not (self.throw or again or switches):
            self._read_arrived()
            return
        said = self._read_all()
        at_work = [rank for rank, each in enumerate(said) if each.what != NOTHING]
        if len(at_work) == len(said):
            return
        if self.throw:
            raise self._ran_out(said)
        if not self.by_all:
            for route in backward.routes:
                route.factor = len(said) / len(at_work)
        elif again and any(route.flown and route.landed_on(i, backward.reached) for route, i in backward.order):
            raise RuntimeError(
                "a second backward has added gradients to averaged ones, to which the ranks that have run out of "
                "batches would add none; use att.no_sync() for all but the last backward of a step"
            )
        if switches:
            self._take_from(at_work[0])

    def _weights_part(self, step: int) -> bool:
        """Return whether step `step` ends a time in which gradients are averaged, and weights are the same."""
        rules = self.engine.plan.rules
        exchanged = any(
            rule.exchanges(step + (rule.window == "between_steps")) for rule in rules if rule.what == "data"
        )
        return self._shared(step) and (exchanged or not self._shared(step + 1))

    def _shared(self, step: int) -> bool:
        return any(rule.what == "grad" and rule.acts(step) for rule in self.engine.plan.rules)

    # Run out

    def answer(self) -> None:
        """Do as the others do, until all have run out."""
        while True:
            self.unread.append(self._say(NOTHING))
            said = self._read_all()
            at_work = [rank for rank, each in enumerate(said) if each.what != NOTHING]
            self._catch_up(max(each.step for each in said))
            if not at_work:
                break
            if self.throw:
                raise self._ran_out(said)
            self.answered = True
            self._do_as(at_work[0], said[at_work[0]].what)
        self._end(said)

    @torch.no_grad()
    def _do_as(self, rank: int, what: int) -> None:
        engine = self.engine
        if what == BACKWARD:
            shadow(engine.backward)
        elif what == BEGIN:
            engine.steps.before()
        else:
            if self._weights_part(engine.clock.step):
                self._take_from(rank)
            engine.steps.before()  # what flew between the steps lands
            engine.steps.begun = False
            engine.steps.end()
            engine.backward.step_ended()

    def _catch_up(self, step: int) -> None:
        """The others have made steps that nobody had to be told of."""
        if step != self.engine.clock.step:
            self.engine.backward.step_ended()
            self.engine.clock.step = step

    def _end(self, said: list[Said]) -> None:
        """All have run out: let ranks whose weights should be the same have those of one that trained to the end."""
        for route in self.engine.backward.routes:
            route.factor = 1.0
        last = max(each.step for each in said)
        trained = [rank for rank, each in enumerate(said) if each.step == last and not each.answered]
        if len(trained) < len(said) and self._shared(last - 1):
            self._take_from(trained[0])

    # Both

    def _say(self, what: int) -> Errand:
        engine, mine = self.engine, [what, self.engine.clock.step, self.answered]

        def said(comm: Comm) -> Tensor:
            return comm.all_gather(uploaded(torch.tensor([mine], dtype=torch.int64), engine.plan.device))

        return begin("join(), what comes", said, engine.tracks[0], engine.monitor)

    def _read_arrived(self) -> None:
        while self.unread and self.unread[0].flight.done():
            said = end(self.unread.popleft())
            if said.is_cpu:  # else the host would wait for the device
                self._heard(said)

    def _read_all(self) -> list[Said]:
        said = [self._heard(end(self.unread.popleft())) for _ in range(len(self.unread))]
        return said[-1]

    def _heard(self, table: Tensor) -> list[Said]:
        """Return what each rank says; raise a PeerError on all if those at work are about to do different things."""
        said = [Said(*row) for row in table.tolist()]
        known = Counter((each.what, each.step) for each in said if each.what != NOTHING).most_common()
        if len(known) > 1:
            rank = next(r for r, each in enumerate(said) if (each.what, each.step) == known[-1][0])
            (odd, at), (usual, there) = known[-1][0], known[0][0]
            raise self.engine.monitor.fail(
                f"rank {rank} has come to {IN_WORDS[odd]} in step {at}, and others to {IN_WORDS[usual]} in step "
                f"{there}; inside att.join() ranks that have batches make the same passes and steps"
            )
        return said

    def _ran_out(self, said: list[Said]) -> RanOut:
        out = next(rank for rank, each in enumerate(said) if each.what == NOTHING)
        return RanOut(f"rank {out} has run out of batches, and others have not; throw_on_early_termination=True")

    def _take_from(self, source: int) -> None:
        engine = self.engine
        scaler = engine.plan.scaler

        def take(comm: Comm) -> None:
            take_from(source, engine.plan, comm)
            if scaler is not None:
                scaler.load_state_dict(comm.gather_objects(scaler.state_dict())[source])

        engine.together(f"the weights of rank {source}", take)


def shadow(backward: Backward) -> None:
    """Launch zeros for a backward that other ranks make, and let nothing land."""
    backward.prepare()
    for route, i in backward.order:
        route.launch_zeros(i, backward.clock.step, backward.joint)
    backward.settled()
    backward.decide()
    failed = [route.arrive_all() for route in backward.acting]
    for route in backward.acting:
        route.flown = route.flown or not any(failed)
