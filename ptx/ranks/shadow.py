"""Races: for each byte the last write, and the reads since, that may come at the same time as the next access.

PTX ISA, section 8.8 "Release and acquire patterns" and 8.9.2: two accesses to a byte, one of which writes, race unless
one comes before the other, or both are morally strong: each orders accesses, with a scope that includes the other's
thread. Threads that store the same in one instruction do not race with one another.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..instructions.strength import SCOPES, Strength
from .clocks import Clocks

NONE, SEVERAL = -2, -1  # in place of a thread: nobody, or more than one in one event
CTA, GPU, SYS = SCOPES["cta"], SCOPES["gpu"], SCOPES["sys"]


def reaches(scope: int, one: tuple[int, int], other: tuple[int, int]) -> bool:
    """Whether a scope around one (rank, CTA) includes another."""
    return scope >= SYS or (one[0] == other[0] and (scope >= GPU or (one[1] == other[1] and scope >= CTA)))


@dataclass(frozen=True)
class Event:
    """An instruction as some threads executed it: `first` numbers the first byte that each has accessed."""

    access: Any
    threads: np.ndarray
    epochs: np.ndarray
    first: np.ndarray
    width: int
    who: tuple[int, int]  # rank and CTA
    strength: Strength

    def over(self, byte: int) -> np.ndarray:
        """Which of the threads have accessed a byte."""
        return np.flatnonzero((self.first <= byte) & (byte < self.first + self.width))


class _Slot:
    """One access for each byte."""

    def __init__(self, size):
        self.thread = np.full(size, NONE, np.int32)
        self.epoch, self.event = np.zeros(size, np.int32), np.zeros(size, np.int32)
        self.scope = np.zeros(size, np.int8)

    def grow(self, size):
        more = _Slot(size - len(self.thread))
        for name, column in vars(self).items():
            setattr(self, name, np.concatenate([column, getattr(more, name)]))

    def put(self, bytes_, thread, epoch, event, scope):
        self.thread[bytes_], self.epoch[bytes_], self.event[bytes_], self.scope[bytes_] = thread, epoch, event, scope


class Shadow:
    """What was accessed, byte by byte."""

    def __init__(self, clocks: Clocks):
        self.clocks, self.size, self.events = clocks, 0, []
        self.written, self.read = _Slot(0), []

    def grow(self, size: int) -> None:
        if size > self.size:
            for slot in (self.written, *self.read):
                slot.grow(size)
            self.size = size

    def add(self, event: Event, writes: bool, same: np.ndarray | None) -> tuple[Event, int, int, int] | None:
        """Note an event. If it races, return the other event, the byte, the other's thread and the event's.

        Args:
            same: for events that write: the bytes that are written, a row for each thread; None if they may differ.
        """
        self.events.append(event)
        bytes_ = (event.first[:, None] + np.arange(event.width)).ravel()
        place = np.repeat(np.arange(len(event.threads)), event.width)
        single, which = np.unique(bytes_, return_index=True)
        several = len(single) < len(bytes_)
        if several and same is not None and (found := self._differs(event, bytes_, place, same.ravel())):
            return found
        for slot in (self.written, *(self.read if writes else ())):
            if found := self._conflict(slot, event, bytes_, place):
                return found
        threads, epochs = event.threads[place[which]], event.epochs[place[which]]
        if several:
            count = np.bincount(np.searchsorted(single, bytes_))
            threads = np.where(count > 1, SEVERAL, threads)
        if writes:
            self.written.put(single, threads, epochs, len(self.events) - 1, event.strength.scope)
            for slot in self.read:
                slot.thread[single] = NONE
        else:
            self._keep_read(event, single, threads, epochs)
        return None

    def _differs(self, event, bytes_, place, values):
        """Two threads of one instruction write a byte unlike."""
        order = np.argsort(bytes_, kind="stable")
        unlike = (np.diff(bytes_[order]) == 0) & (np.diff(values[order].astype(np.int16)) != 0)
        if not unlike.any():
            return None
        one = int(np.argmax(unlike))
        two = event.threads[place[order[[one, one + 1]]]]
        return event, int(bytes_[order[one]]), int(two[0]), int(two[1])

    def _conflict(self, slot, event, bytes_, place):
        before = slot.thread[bytes_]
        there = np.flatnonzero(before != NONE)
        if not len(there):
            return None
        bytes_, place, before = bytes_[there], place[there], before[there]
        threads = event.threads[place]
        known = self.clocks.know(threads, np.maximum(before, 0), slot.epoch[bytes_])
        suspect = np.flatnonzero(~known | (before == SEVERAL))
        if not len(suspect):
            return None
        if event.strength.scope:
            suspect = suspect[~self._strong(slot, event, bytes_[suspect])]
        for at in suspect[before[suspect] != SEVERAL]:
            other = self.events[slot.event[bytes_[at]]]
            return other, int(bytes_[at]), int(before[at]), int(threads[at])
        judged = {}
        for at in suspect:
            key = slot.event[bytes_[at]], place[at]
            other = self.events[key[0]]
            over = other.over(bytes_[at])
            if judged.get(key) == len(over):
                continue
            judged[key] = len(over)
            ordered = self.clocks.know(threads[at : at + 1], other.threads[over], other.epochs[over])
            if not ordered.all():
                return other, int(bytes_[at]), int(other.threads[over[np.argmin(ordered)]]), int(threads[at])
        return None

    def _strong(self, slot, event, bytes_):
        """Which bytes an event and that in a slot may access at the same time: both are morally strong."""
        found = np.zeros(len(bytes_), bool)
        events = slot.event[bytes_]
        for each in np.unique(events):
            other = self.events[each]
            found[events == each] = reaches(other.strength.scope, other.who, event.who) and reaches(
                event.strength.scope, event.who, other.who
            )
        return found

    def _keep_read(self, event, bytes_, threads, epochs):
        """Put reads where there is none, or one that comes before: what follows this one follows that one."""
        left = np.ones(len(bytes_), bool)
        number, scope = len(self.events) - 1, event.strength.scope
        for slot in self.read:
            free = left & (slot.thread[bytes_] == NONE)
            occupied = np.flatnonzero(left & ~free & (slot.scope[bytes_] >= scope))
            if len(occupied):
                free[occupied] = self._subsumed(slot, event, bytes_[occupied], threads[occupied])
            slot.put(bytes_[free], threads[free], epochs[free], number, scope)
            left &= ~free
            if not left.any():
                return
        self.read.append(_Slot(self.size))
        self.read[-1].put(bytes_[left], threads[left], epochs[left], number, scope)

    def _subsumed(self, slot, event, bytes_, threads):
        """Which bytes' reads in a slot all come before some thread's read in an event."""
        before = slot.thread[bytes_]
        simple = (before != SEVERAL) & (threads != SEVERAL)
        found = np.zeros(len(bytes_), bool)
        if simple.any():
            found[simple] = self.clocks.know(threads[simple], before[simple], slot.epoch[bytes_[simple]])
        judged = {}
        for at in np.flatnonzero(~simple):
            other = self.events[slot.event[bytes_[at]]]
            old, new = other.over(bytes_[at]), event.over(bytes_[at])
            key = slot.event[bytes_[at]], old.tobytes(), new.tobytes()
            if key not in judged:
                pairs = event.threads[new][:, None], other.threads[old][None], other.epochs[old][None]
                judged[key] = self.clocks.know(*pairs).any(axis=0).all()
            found[at] = judged[key]
        return found
