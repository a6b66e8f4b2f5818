"""A program of one rank that runs in turns: until it comes to an instruction that orders accesses."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from ..machine import Frame, Program
from ..text import Instruction
from .orders import Order
from .places import Places
from .watch import OfRank
from .words import Word


class Turn:
    """A program of a launch, and what it has done since it last changed anything.

    Attributes:
        key: rank, number of the launch, number of the program.
        pending: the instruction before which it has paused.
        asleep: it has read the same words in vain twice, and runs again when one of them changes.
        repeats: it is in the state in which it was when it last came here, so that it would wait forever.
        polls: the addresses of words that it has read, and the instruction that did last.
        history: what it has read and written, as a number, but for reads that found nothing new.
        asked: it has read the clock.
    """

    def __init__(self, program: Program, launch: OfRank, number: int, place: int):
        self.key = launch.rank, number, place
        self.launch, self.number = launch, number
        self.frame = Frame(program, launch, place, 1)
        self.frame.pauses = True
        self.steps: Iterator[tuple[Instruction, Any]] = program.turns(self.frame)
        self.pending: Instruction | None = None
        self.asleep = self.repeats = self.asked = False
        self.polls: dict[int, Instruction] = {}
        self.history = 0
        self._visits: dict[Any, Any] = {}  # by instruction and lanes: (history, state or None)

    def step(self) -> bool:
        """Run until the next pause; return whether there is one."""
        for instruction, lanes in self.steps:
            self.pending = instruction
            self._pause(instruction, lanes)
            return True
        return False

    def _pause(self, instruction, lanes):
        """Fall asleep where nothing new was found since the last visit but one."""
        here = instruction.line, None if lanes is None else lanes.tobytes()
        before = self._visits.get(here)
        if before is None:
            self._visits[here] = self.history, None
        elif before[1] is None:
            self._visits[here] = before[0], self._state()
        else:
            state = self._state()
            self.asleep, self.repeats = True, _alike(state, before[1])
            self.history = before[0]
            self._visits[here] = before[0], state

    def _state(self):
        return {name: values.copy() for name, values in self.frame.registers.items()} | {"": self.frame.at.copy()}

    def wake(self) -> None:
        """Something has changed: the program looks again."""
        self.asleep = self.repeats = False
        self._visits.clear()
        self.polls.clear()

    def note(self, word: str, changes: int, instruction: Instruction) -> None:
        """Something was read or written."""
        self.history = hash((self.history, instruction.line, word, changes))


def _alike(one, other):
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


class Turns:
    """All programs that have begun and not ended, and which of them runs: what a `Watch` tells goes to it.

    What lasts from one order to the next knows words by their names: their addresses are others in each run.

    Attributes:
        current: the program that runs.
        ended: of each that has ended, its history: what it has found is part of the outcome.
    """

    def __init__(self, order: Order, places: Places) -> None:
        self.order, self.places = order, places
        self.live: dict[tuple[int, int, int], Turn] = {}
        self.ended: dict[tuple[int, int, int], int] = {}
        self.current: Any = None

    def polled(self, address: int, word: Word | None, instruction: Instruction) -> None:
        self.current.polls[address] = instruction
        self._tell(address, word.changes if word else 0, instruction, False)

    def wrote(self, address: int, word: Word, instruction: Instruction) -> None:
        """A word was written: who polls it looks again, and the writer has got on."""
        self._changed([address])
        self._tell(address, word.changes, instruction, True)

    def _tell(self, address, changes, instruction, writes):
        name = self.places.name(address)
        self.order.touched(self.current.key, name, writes)
        self.current.note(name, changes, instruction)

    def changed(self, addresses: np.ndarray, width: int) -> None:
        """Memory was written by a plain access."""
        polled = [address for turn in self.live.values() for address in turn.polls]
        if polled:
            whose = np.array(polled)[:, None]
            hit = ((whose < addresses[None] + width) & (addresses[None] < whose + 8)).any(axis=1)
            self._changed(np.array(polled)[hit].tolist())
        else:
            self.current.wake()

    def _changed(self, addresses):
        for turn in self.live.values():
            if any(address in turn.polls for address in addresses):
                turn.wake()
        self.current.wake()
