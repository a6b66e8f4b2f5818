"""Launches of several ranks at once: programs run in turns, in an order that somebody chooses."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ..driver import Prepared
from ..faults import DeadlockFault, Fault
from ..memory import Global
from ..watching import Races
from .orders import Order
from .places import Places
from .traffic import Traffic
from .turns import Turn, Turns
from .watch import OfRank, Watch

IDLE = 4_000  # turns without a change of memory, after which programs are taken for endless
SECOND, JUMPS = 1_000_000_000, 33  # nanoseconds; how often the clock jumps before a wait is taken for endless
NAMED = 8  # programs that wait, in a message


@dataclass(frozen=True)
class Together:
    """Describe a run of launches of several ranks.

    Attributes:
        turns: how often a program went on.
        choices: how often more than one could; the place of each choice, with which the order can be repeated.
        launches: of each rank.
        traffic: bytes and sectors that went between ranks.
    """

    turns: int
    choices: tuple[int, ...]
    launches: tuple[int, ...]
    traffic: Traffic


@dataclass
class _Stream:
    """The launches of a rank, one after another."""

    rank: int
    launches: Sequence[Prepared]
    first: int  # the number of its first thread
    threads: int
    number: int = -1  # of the launch that runs
    waiting: list[int] = field(default_factory=list)  # programs that have not begun
    left: int = 0  # programs that have not ended
    observers: tuple = ()
    launch: OfRank | None = None


class Running:
    """The launches of some ranks.

    Args:
        streams: of each rank, what it launches, in order.
        places: symmetric memory.
        symmetric: its regions.
        order: chooses who goes on.
        resident: how many programs of a rank run at a time; None for all.
        watchers: make further observers.
        found: takes faults of order; None to raise the first.
    """

    def __init__(
        self, streams, places: Places, symmetric, order: Order, resident=None, watchers: Sequence = (), found=None
    ):
        self.order, self.resident, self.symmetric, self.watchers = order, resident, symmetric, watchers
        self.streams, first = [], 0
        for rank, launches in enumerate(streams):
            threads = max((each.programs * each.program.threads for each in launches), default=0)
            self.streams.append(_Stream(rank, launches, first, threads))
            first += threads
            for each in launches:
                for region in each.regions:
                    name = f"{region.name} of {each.program.kernel.name} of rank {rank}"
                    places.add(replace(region, name=name), rank)
        self.watch, self.turns = Watch(first, places, len(self.streams) > 1, found), Turns(order, places)
        self.watch.turn = self.turns
        made = [make() for make in watchers]
        self.shared = [each for each in made if getattr(each, "of_all", False)]
        self.apart = [make for make, each in zip(watchers, made, strict=True) if not getattr(each, "of_all", False)]
        self.chosen: tuple[int, int, int] | None = None  # who went on last
        self.now, self.jump, self.jumps, self.idle, self.count = 0, SECOND, 0, 0, 0

    def run(self) -> Together:
        """Run all; raise a Fault that names the order."""
        try:
            with np.errstate(all="ignore"):
                self._begin()
                while self.turns.live:
                    self._turn()
                    self._begin()
        except Fault as fault:
            fault.args = (f"{fault}, in {self.order.name}",)
            raise
        for each in self.shared:
            each.ended()
        launches = tuple(len(stream.launches) for stream in self.streams)
        return Together(self.count, tuple(self.order.choices), launches, self.watch.traffic)

    # Launches of a rank.

    def _begin(self):
        """Begin programs that have a place, and the next launches of ranks whose last has ended."""
        for stream in self.streams:
            while stream.waiting or (stream.left == 0 and stream.number < len(stream.launches)):
                if not stream.waiting:
                    self._next(stream)
                elif self.resident is not None and stream.left - len(stream.waiting) >= self.resident:
                    break
                else:  # up to its first pause it orders nothing
                    program = stream.launches[stream.number].program
                    turn = Turn(program, stream.launch, stream.number, stream.waiting.pop(0))
                    self.turns.live[turn.key] = turn
                    self._step(turn)

    def _next(self, stream):
        """Begin the next launch of a rank, if there is one."""
        for observer in stream.observers:
            observer.ended()
        stream.observers, stream.number = (), stream.number + 1
        if stream.threads:
            self.watch.clocks.meet(np.arange(stream.first, stream.first + stream.threads))
        if stream.number == len(stream.launches):
            return
        prepared = stream.launches[stream.number]
        stream.waiting, stream.left = [*range(prepared.programs)], prepared.programs
        if not prepared.programs:
            return
        made = (make() for make in self.apart)
        stream.observers = tuple(Races(each.strict, ("shared",)) if isinstance(each, Races) else each for each in made)
        stream.launch = OfRank(
            prepared.grid, prepared.arguments, Global([*prepared.regions, *self.symmetric], prepared.others),
            prepared.shared, (self.watch, *self.shared, *stream.observers), self._of(stream.rank), self._clock,
            rank=stream.rank, kernel=prepared.program.kernel.name, first=stream.first,
        )  # fmt: skip
        for observer in stream.observers:
            if hasattr(observer, "began"):
                observer.began(prepared.program, stream.launch)

    def _of(self, rank):
        return f" of rank {rank}" if len(self.streams) > 1 else ""

    def _step(self, turn):
        self.turns.current, self.count = turn, self.count + 1
        if turn.step():
            return
        stream = self.streams[turn.launch.rank]
        self.watch.must_have_acquired(turn.frame, self.watch.threads(turn.frame, None))
        self.turns.ended[turn.key] = self.turns.live.pop(turn.key).history
        turn.frame.forget()
        self._progress()
        stream.left -= 1
        if len(stream.launches) > 1 or self.resident is not None:  # others wait for the end of this one
            self.order.touched(turn.key, (stream.rank,), True)

    # Who goes on.

    def _turn(self):
        able = [key for key, turn in sorted(self.turns.live.items()) if not turn.asleep]
        if not able:
            self._stuck()
            return
        place = 0
        if len(able) > 1:
            place = self.order.choose(able, self.chosen, self._state)
        self.chosen = able[place]
        turn = self.turns.live[self.chosen]
        self._step(turn)
        if not turn.asleep:
            self._progress()

    def _state(self):
        live = ((key, turn.history, turn.pending.line) for key, turn in sorted(self.turns.live.items()))
        return *live, *sorted(self.turns.ended.items())

    def _progress(self):
        self.jump, self.jumps, self.idle = SECOND, 0, 0

    def _clock(self):
        self.turns.current.asked = True
        return self.now

    def _stuck(self):
        """All programs wait: those that count go on counting, those that look at the clock see it jump."""
        live = [*self.turns.live.values()]
        counting = [turn for turn in live if not turn.repeats]
        looking = [turn for turn in live if turn.asked]
        self.idle += len(counting)
        if counting and self.idle < IDLE:
            for turn in counting:
                if turn.key in self.turns.live:
                    self._step(turn)
        elif looking and self.jumps < JUMPS:
            self.now, self.jump, self.jumps = self.now + self.jump, 2 * self.jump, self.jumps + 1
            for turn in looking:
                turn.asleep = turn.repeats = False
        else:
            raise DeadlockFault(self._waits(live))

    def _waits(self, live):
        said = [self._wait(turn) for turn in live[:NAMED]]
        more = f", and {len(live) - NAMED} more programs wait" if len(live) > NAMED else ""
        return f"{'; '.join(said)}{more}: no program is left that could write there"

    def _wait(self, turn):
        words = [
            f"{self.watch.places.name(address)}, which is {self._value(address)}, at {instruction.place}"
            for address, instruction in turn.polls.items()
        ]
        who = f"program {turn.frame.first}{turn.launch.of}"
        return (
            f"{turn.launch.kernel}: {who} waits for {', and for '.join(words) or f'nothing, at {turn.pending.place}'}"
        )

    def _value(self, address):
        word = self.watch.words.words.get(address)
        return "unwritten" if word is None else word.value
