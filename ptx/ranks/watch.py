"""The observer of all launches of some ranks: whose memory, which order, and what a program waits for."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..faults import RaceFault, SignalFault
from ..instructions.strength import SCOPES
from ..machine import Access, Frame, Launch
from ..watching.races import bytes_stored
from .clocks import Clocks
from .places import Places
from .shadow import Event, Shadow
from .traffic import Traffic
from .words import Words


@dataclass(frozen=True)
class OfRank(Launch):
    """A launch on a rank.

    Attributes:
        rank: its number.
        kernel: its name.
        first: the number of its first thread among the threads of all ranks.
    """

    rank: int = 0
    kernel: str = ""
    first: int = 0


class Watch:
    """Raise a Fault at an access that is not the rank's, or that nothing orders.

    Args:
        threads: of all ranks.
        several: there is more than one rank.
        found: takes races, and accesses to signals that order nothing; None to raise the first.

    Attributes:
        turn: of the program that runs, what it reads and writes until it pauses: a `Turn`.
    """

    def __init__(self, threads: int, places: Places, several: bool, found: list | None = None):
        self.found = found
        self.clocks, self.places, self.several = Clocks(threads), places, several
        self.shadow, self.words = Shadow(self.clocks), Words(self.clocks)
        self.traffic = Traffic()
        self.turn: Any = None
        self.last: tuple[Event, np.ndarray, np.ndarray] | None = None

    def threads(self, frame: Frame, on) -> np.ndarray:
        """Return the numbers of lanes among the threads of all ranks."""
        return frame.launch.first + frame.first * frame.threads + frame.lanes(on)

    # Accesses.

    def seen(self, access: Access) -> None:
        self.last = None
        if access.space != "global":
            return
        frame, lanes = access.frame, access.frame.lanes(access.on)
        addresses = np.broadcast_to(access.addresses, lanes.shape)
        part = self.places.find(access, addresses, frame.launch.rank)
        threads, signals = self.threads(frame, access.on), self.places.signals[part]
        if signals.any():
            self._check_signals(access, addresses, signals)
        self.shadow.grow(self.places.count)
        strength, kind = access.strength, access.kind
        if (self.places.homes[part] != frame.launch.rank).any():
            self.traffic.add(access, addresses, self.places.homes[part])
        event = self._event(access, addresses, threads, part)
        if not strength.scope:
            same = bytes_stored(access, lanes).reshape(-1, event.width) if kind == "write" else None
            self._judge(event, same)
            if kind == "write":
                self.turn.changed(addresses, access.width)
        self.last = event, addresses, threads

    def _judge(self, event, same=None):
        if race := self.shadow.add(event, same):
            said = [self._said(*each) for each in ((race.other, race.thread_of_other), (event, race.thread))]
            byte = self.places.name(self._address(race.byte))
            self._report(RaceFault(f"{said[0]} and {said[1]} access {byte}, and nothing orders them"))

    def _event(self, access, addresses, threads, part):
        """Return the event of an access, by the numbers of its bytes: byte by byte if it goes on into another part."""
        width = access.width
        if (addresses + width > self.places.ends[part]).any():
            addresses = (addresses[:, None] + np.arange(width)).ravel()
            part = np.searchsorted(self.places.begins, addresses, side="right") - 1
            threads, width = np.repeat(threads, width), 1
        first = addresses - self.places.begins[part] + self.places.firsts[part]
        who = access.frame.launch.rank, access.frame.first
        return Event(
            access, threads, self.clocks.epoch[threads], first, width, who, access.strength, access.kind != "read"
        )

    def _check_signals(self, access, addresses, signals):
        strength = access.strength
        if strength.scope == 0:
            what = "is plain: it orders nothing"
        elif self.several and strength.scope < SCOPES["sys"]:
            what = f"has the scope .{next(name for name, at in SCOPES.items() if at == strength.scope)}, not .sys"
        else:
            return
        word = self.places.name(int(addresses[np.argmax(signals)]))
        thread = access.frame.thread(access.on, signals)
        self._report(
            SignalFault(f"{access.instruction.place}: the access to {word}, a word of signals, by {thread} {what}")
        )

    def _report(self, fault):
        if self.found is None:
            raise fault
        if all(str(fault) != str(each) for each in self.found[-8:]):
            self.found.append(fault)

    def _address(self, byte):
        [part] = [each for each in self.places.parts if each.first <= byte < each.first + each.end - each.begin]
        return part.begin + byte - part.first

    def _said(self, event, thread):
        frame = event.access.frame
        which = self.threads(frame, event.access.on) == thread
        return f"{frame.launch.kernel}, {event.access.instruction.place} by {frame.thread(event.access.on, which)}"

    # What has happened to words.

    def happened(self, values, left=None, wrote=None) -> None:
        if self.last is None or not self.last[0].strength.scope:
            return
        event, addresses, threads = self.last
        access = event.access
        size = access.width // len(values)
        for k, value in enumerate(values):
            value = np.broadcast_to(value, threads.shape)
            if wrote is not None:
                self._atomic(access, addresses, threads, value, left, wrote)
            elif access.kind == "write":
                self._store(access, addresses + k * size, threads, value)
            else:
                self._load(access, addresses + k * size, threads)
        self._judge(event)  # an acquire comes behind what was released

    def _load(self, access, addresses, threads):
        who = access.frame.launch.rank, access.frame.first
        for address, which in _by_address(addresses):
            self.words.load(address, threads[which], access.strength, who)
            self.turn.polled(address, self.words.words.get(address), access.instruction)

    def _store(self, access, addresses, threads, values):
        who = access.frame.launch.rank, access.frame.first
        for address, which in _by_address(addresses):
            value = int(values[which][-1].view(f"u{values.itemsize}"))
            self.words.store(address, value, threads[which], access.strength, who, False)
            self._must_release(access, address)
            self.turn.wrote(address, self.words.words[address], access.instruction)

    def _atomic(self, access, addresses, threads, found, left, wrote):
        """One thread after another."""
        who = access.frame.launch.rank, access.frame.first
        raw = left.view(f"u{left.itemsize}")
        for place, address in enumerate(addresses.tolist()):
            one = threads[place : place + 1]
            waits = "cas" in access.instruction.modifiers and access.strength.order == "relaxed"
            if access.instruction.opcode == "atom":
                self.words.load(address, one, access.strength, who, waits)
            if wrote[place]:
                self.words.store(address, int(raw[place]), one, access.strength, who, True)
                if "cas" not in access.instruction.modifiers and not access.strength.acquires:
                    self._must_release(access, address)
            if wrote[place] and found[place] != left[place]:
                self.turn.wrote(address, self.words.words[address], access.instruction)
            else:
                self.turn.polled(address, self.words.words.get(address), access.instruction)

    def _must_release(self, access, address):
        part = self.places.parts[int(np.searchsorted(self.places.begins, address, side="right")) - 1]
        if part.signals and not self.words.words[address].released:
            message = (
                f"{access.instruction.place}: the write to {self.places.name(address)}, a word of signals, by program "
                f"{access.frame.first}{access.frame.launch.of} releases nothing: it is relaxed, and behind no fence"
            )
            self._report(SignalFault(message))

    # Where threads meet.

    def met(self, frame: Frame, on, warp: bool) -> None:
        threads = self.threads(frame, on)
        self.must_have_acquired(frame, threads)
        if not warp:
            self.clocks.meet(threads)
            return
        warps = frame.warp[frame.lanes(on)]
        for each in np.unique(warps):
            self.clocks.meet(threads[warps == each])

    def fenced(self, frame: Frame, on, strength, instruction) -> None:
        self.words.fenced(self.threads(frame, on), strength, (frame.launch.rank, frame.first))

    def must_have_acquired(self, frame: Frame, threads: np.ndarray) -> None:
        """Raise a SignalFault if threads meet others or end before they have acquired the signals that they read."""
        for thread, address in self.words.unread(threads).items():
            part = self.places.parts[int(np.searchsorted(self.places.begins, address, side="right")) - 1]
            if part.signals:
                message = (
                    f"thread {thread - frame.launch.first - frame.first * frame.threads} of program {frame.first}"
                    f"{frame.launch.of} has read {self.places.name(address)}, a word of signals, without .acquire, "
                    "and no fence follows"
                )
                self._report(SignalFault(message))

    def ended(self) -> None:
        pass


def _by_address(addresses):
    """Yield each address, and which lanes have it: in the order of lanes, since addresses are others in each run."""
    if (addresses == addresses[0]).all():
        yield int(addresses[0]), slice(None)
        return
    for first in np.sort(np.unique(addresses, return_index=True)[1]):
        yield int(addresses[first]), np.flatnonzero(addresses == addresses[first])
