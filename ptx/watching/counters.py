"""Counts of a launch: its instructions, and how it uses memory.

A *sector* is 32 bytes of global memory, the least that a cache fetches. Of the sectors of a launch there are three
counts, for reads and for writes:

    requested   summed over instructions, as warps execute them: the sectors that an instruction touches.
                The first cache looks for each of them.
    fetched     summed over programs: the sectors that a program touches, each once. If the first cache keeps what a
                program reads until the program ends, so many come from the second cache.
    distinct    the sectors that the launch touches, each once. If the second cache keeps what neighbouring programs
                share, so many are moved by memory.

An atomic operation reads and writes. In shared memory a *wavefront* is what one turn of the 32 banks of four bytes can
serve. An access of a warp takes as many as the busiest bank has different words; those beyond the fewest that its
bytes need are conflicts. Threads of a warp that access 8 or 16 bytes each are served a half or a quarter of a warp at
a time.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from .classes import class_of

SECTOR, BANKS, WORD, WARP = 32, 32, 4, 32
UNIT_BITS = 43  # of the number of a unit: a sector of an address of 48 bits
UNITS = (1 << UNIT_BITS) - 1
KINDS = {"read": ("read",), "write": ("write",), "atomic": ("read", "write")}
FIELDS = {"read": "read", "write": "written"}  # of Line


class Line(NamedTuple):
    """Counts of an instruction at a line of the PTX: the warps that came to it, and the parts of memory it touched."""

    warps: int
    read: int = 0  # sectors that are requested
    written: int = 0
    wavefronts: int = 0


@dataclass(frozen=True)
class Counted:
    """Counts of one launch.

    Attributes:
        programs, threads: of the launch, and of a program.
        instructions: for each opcode with its modifiers, [lanes, warps] that have executed it. A warp counts if any of
            its lanes comes to the instruction, also where a guard keeps all of them from executing it.
        classes: the class of each.
        requested, fetched, distinct: sectors, by "read" and "write".
        bytes: that lanes have read and written in global memory.
        wavefronts, conflicts: of shared memory.
        lines: what each line of the PTX took.
        ptx, shared: the text, and the bytes of shared memory of a program.
    """

    kernel: str
    programs: int
    threads: int
    instructions: dict[str, tuple[int, int]]
    classes: dict[str, str]
    requested: Counter
    fetched: Counter
    distinct: Counter
    bytes: Counter
    wavefronts: int
    conflicts: int
    lines: dict[int, Line]
    ptx: str
    shared: int

    def by_class(self) -> dict[str, tuple[int, int]]:
        """Return [lanes, warps] of each class."""
        found: dict[str, list[int]] = {}
        for name, (lanes, warps) in self.instructions.items():
            total = found.setdefault(self.classes[name], [0, 0])
            total[0] += lanes
            total[1] += warps
        return {name: tuple(total) for name, total in found.items()}


@dataclass(eq=False)
class Counters:
    """Append a `Counted` of each launch to a list: `watchers=(functools.partial(Counters, counted),)`."""

    into: list
    requested: Counter = field(default_factory=Counter)
    bytes: Counter = field(default_factory=Counter)
    wavefronts: int = 0
    conflicts: int = 0

    def began(self, program, launch):
        self.program, self.launch = program, launch
        for block in program.blocks:  # an instruction without a class is refused before anything runs
            for each in _all(block):
                class_of(each)
        self.touched = {}  # by kind, sectors of programs
        self.of_line = {}  # by line, Counter of the fields of Line

    def seen(self, access):
        if access.space == "shared":
            self._shared(access)
        else:
            self._global(access)

    def ended(self):
        distinct, fetched = Counter(), Counter()
        for kind, parts in self.touched.items():
            both = np.unique(np.concatenate(parts))
            fetched[kind], distinct[kind] = len(both), len(np.unique(both & UNITS))
        instructions, classes = self._instructions()
        grid = self.launch.grid
        self.into.append(
            Counted(
                self.program.kernel.name, grid[0] * grid[1] * grid[2], self.program.threads, instructions, classes,
                self.requested, fetched, distinct, self.bytes, self.wavefronts, self.conflicts,
                self._lines(), self.program.ptx, self.launch.shared + self.program.kernel.static,
            )
        )  # fmt: skip

    def _instructions(self):
        counts, classes = {}, {}
        for block, executed in self._executed():
            for each in _all(block):
                name = ".".join((each.opcode, *each.modifiers)).replace(".::", "::")
                lanes, warps = counts.get(name, (0, 0))
                counts[name] = (lanes + int(executed[0]), warps + int(executed[1]))
                classes[name] = class_of(each)
        return counts, classes

    def _executed(self):
        return [(block, self.launch.executed.get(rank, (0, 0))) for rank, block in enumerate(self.program.blocks)]

    def _lines(self):
        return {
            each.line: Line(int(executed[1]), **self.of_line.get(each.line, {}))
            for block, executed in self._executed()
            for each in _all(block)
        }

    def _count(self, access, name, count):
        self.of_line.setdefault(access.instruction.line, Counter())[name] += count

    def _global(self, access):
        frame, lanes = access.frame, access.frame.lanes(access.on)
        addresses = np.broadcast_to(access.addresses, lanes.shape)
        sectors = _units(addresses, access.width, SECTOR)
        by_warp = _pairs(frame.warp[lanes], sectors)
        by_program = np.unique(_pairs((frame.program + frame.first)[lanes], sectors))
        requested = len(np.unique(by_warp))
        for kind in KINDS[access.kind]:
            self._count(access, FIELDS[kind], requested)
            self.requested[kind] += requested
            self.bytes[kind] += len(lanes) * access.width
            self.touched.setdefault(kind, []).append(by_program)

    def _shared(self, access):
        frame, lanes = access.frame, access.frame.lanes(access.on)
        addresses = np.broadcast_to(access.addresses, lanes.shape)
        together = min(WARP, BANKS * WORD // access.width)  # threads that are served at a time
        part = frame.warp[lanes] * WARP + frame.thread_of[lanes] % WARP // together
        words = np.unique(_pairs(part, _units(addresses, access.width, WORD)))
        parts, at = np.unique(words & ~UNITS, return_inverse=True)
        load = np.zeros((len(parts), BANKS), np.int64)
        np.add.at(load, (at, words % BANKS), 1)
        taken, fewest = load.max(1), -(-load.sum(1) // BANKS)
        self.wavefronts += int(taken.sum())
        self._count(access, "wavefronts", int(taken.sum()))
        self.conflicts += int((taken - fewest).sum())


def _all(block):
    return [*block.instructions, *([block.jump] if block.jump else [])]


def _units(addresses, width, unit):
    """The first and last unit of each access, and those between: (lanes, units)."""
    first, last = addresses // unit, (addresses + width - 1) // unit
    count = int((last - first).max(initial=0)) + 1
    return np.minimum(first[:, None] + np.arange(count), last[:, None])


def _pairs(who, units):
    """Return one number for each unit and who touches it."""
    return (who.astype(np.int64)[:, None] << UNIT_BITS | units.astype(np.int64)).ravel()
