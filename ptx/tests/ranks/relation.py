"""The memory model as the manual defines it, on a list of what was executed: relations, and their transitive closure.

It shares nothing with the clocks of `ptx.ranks`, and is for runs of some dozen operations.
"""

from dataclasses import dataclass, field
from itertools import product

import numpy as np

SCOPES = {"cta": 1, "gpu": 3, "sys": 4}


@dataclass(eq=False)
class Operation:
    """A thread's access, fence or barrier. `source` is the write that it has read from."""

    thread: tuple  # rank, program, thread
    kind: str  # "read", "write", "fence" or "barrier"
    order: str = "weak"
    scope: int = 0
    place: int = 0
    source: object = None
    atomic: bool = False
    group: int = 0  # of a barrier: which

    @property
    def reads(self):
        return self.kind == "read" or self.atomic

    @property
    def writes(self):
        return self.kind == "write" or self.atomic


@dataclass
class Recorder:
    """An observer that records operations. Words are of four bytes, and one thread writes a word at a time."""

    operations: list = field(default_factory=list)
    last: dict = field(default_factory=dict)  # by place, the last write
    groups: int = 0

    of_all = True

    def threads(self, frame, on):
        return [(frame.launch.rank, frame.first, int(frame.thread_of[lane])) for lane in frame.lanes(on)]

    def seen(self, access):
        self.access = access
        if not access.strength.scope:
            self.record(access, access.kind, None)

    def happened(self, values, left=None, wrote=None):
        if self.access.strength.scope:
            self.record(self.access, self.access.kind, wrote)

    def record(self, access, kind, wrote):
        order, scope = access.strength
        addresses = np.broadcast_to(access.addresses, access.frame.lanes(access.on).shape)
        for thread, place in zip(self.threads(access.frame, access.on), addresses.tolist(), strict=True):
            source = self.last.get(place) if kind != "write" else None
            made = Operation(thread, kind, order, scope, place, source, kind == "atomic")
            self.operations.append(made)
            if made.writes:
                self.last[place] = made

    def met(self, frame, on, warp):
        self.groups += 1
        for thread in self.threads(frame, on):
            self.operations.append(Operation(thread, "barrier", group=self.groups))

    def fenced(self, frame, on, strength, instruction):
        for thread in self.threads(frame, on):
            self.operations.append(Operation(thread, "fence", "acq_rel", strength.scope))

    def ended(self):
        pass


def includes(one, other):
    """The scope of an operation includes the thread of another."""
    if one.thread[:2] == other.thread[:2]:
        return one.scope >= SCOPES["cta"]
    return one.scope >= (SCOPES["gpu"] if one.thread[0] == other.thread[0] else SCOPES["sys"])


def morally_strong(one, other):
    return includes(one, other) and includes(other, one)


def ordered(operations):
    """Return the matrix of causality order: of the i-th and the j-th operation."""
    count, at = len(operations), {id(each): k for k, each in enumerate(operations)}
    before = np.zeros((count, count), bool)
    for i, j in product(range(count), repeat=2):
        one, other = operations[i], operations[j]
        before[i, j] = one.thread == other.thread and i < j
        if one.kind == other.kind == "barrier" and one.group == other.group and i != j:
            before[i, j] = True
    for write, read in product(operations, repeat=2):
        if write.writes and read.reads and write.scope and read.scope and observed(write, read):
            for head, tail in product(heads(write, operations, at), tails(read, operations, at)):
                if head.thread != tail.thread and morally_strong(head, tail):
                    before[at[id(head)], at[id(tail)]] = True
    for k in range(count):
        before |= before[:, k : k + 1] & before[k]
    return before


def observed(write, read):
    """A read has its value from a write, or from an atomic operation that had it from there."""
    source = read.source
    while source is not None and source is not write:
        source = source.source if source.atomic else None
    return source is write


def heads(write, operations, at):
    """The first operations of the release patterns that end in a write."""
    found = [write] if write.order in ("release", "acq_rel") else []
    for each in operations[: at[id(write)]]:
        releases = each.writes and each.order in ("release", "acq_rel") and each.place == write.place
        if each.thread == write.thread and (each.kind == "fence" or releases):
            found.append(each)
    return found


def tails(read, operations, at):
    """The last operations of the acquire patterns that begin with a read."""
    found = [read] if read.order in ("acquire", "acq_rel") else []
    for each in operations[at[id(read)] + 1 :]:
        acquires = each.reads and each.order in ("acquire", "acq_rel") and each.place == read.place
        if each.thread == read.thread and (each.kind == "fence" or acquires):
            found.append(each)
    return found


def races(operations):
    """Return whether two operations race."""
    before = ordered(operations)
    for i, j in product(range(len(operations)), repeat=2):
        one, other = operations[i], operations[j]
        accesses = one.place == other.place != 0 and (one.writes or other.writes)
        apart = i < j and accesses and one.thread != other.thread and not (before[i, j] or before[j, i])
        if apart and not morally_strong(one, other):
            return True
    return False
