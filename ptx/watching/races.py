"""Races: two threads access one byte, at least one of them writes it, and no barrier lies between.

PTX ISA, chapter 8 "Memory Consistency Model". `bar.sync` orders all threads of a program, `bar.warp.sync` those of a
warp, and nothing orders threads of two programs of a launch. Atomic operations do not race with one another. Threads
that store the same values at one place in one instruction do not race either: Triton lets threads that hold the same
values all store them.
"""

from dataclasses import dataclass

import numpy as np

from ..faults import RaceFault

READ, WRITE, ATOMIC = 0, 1, 2
KINDS = {"read": READ, "write": WRITE, "atomic": ATOMIC}


@dataclass
class _Log:
    """Accesses to single bytes, a column for each fact."""

    byte: np.ndarray
    program: np.ndarray
    warp: np.ndarray
    thread: np.ndarray
    turn: np.ndarray
    turn_of_warp: np.ndarray
    kind: np.ndarray
    value: np.ndarray  # that is written; −1 if it is read
    event: np.ndarray  # which instruction, as it was executed

    def take(self, places):
        return _Log(**{name: column[places] for name, column in vars(self).items()})


class Races:
    """Keep every access of a launch, and raise a RaceFault at its end if two of them race.

    Args:
        strict: in global memory, too, only barriers order the threads of a warp; the manual promises no more. GPUs
            execute an instruction for all threads of a warp that have not diverged before any of them goes on.
        spaces: the memory that is watched.
    """

    def __init__(self, strict: bool = True, spaces: tuple[str, ...] = ("global", "shared")):
        self.strict = strict
        self.logs = {space: [] for space in spaces}
        self.instructions = []

    def seen(self, access):
        if access.space not in self.logs:
            return
        frame, width = access.frame, access.width
        lanes = frame.lanes(access.on)
        addresses = np.broadcast_to(access.addresses, lanes.shape)
        each = np.repeat(lanes, width)
        program = frame.program[each] + frame.first
        log = _Log(
            byte=(addresses[:, None] + np.arange(width)).ravel(),
            program=program,
            warp=frame.warp[each] + frame.first * frame.warps_of_program,
            thread=frame.thread_of[each].astype(np.int64),
            turn=frame.turn[frame.program[each]],
            turn_of_warp=frame.turn_of_warp[frame.warp[each]],
            kind=np.full(len(each), KINDS[access.kind], np.int8),
            value=bytes_stored(access, lanes),
            event=np.full(len(each), len(self.instructions), np.int32),
        )
        self.instructions.append(access.instruction)
        self.logs[access.space].append(log)

    def ended(self):
        for space, logs in self.logs.items():
            if logs:
                log = _Log(**{name: np.concatenate([getattr(x, name) for x in logs]) for name in vars(logs[0])})
                self._check(log, space)

    def _check(self, log, space):
        """Look among the accesses to a byte that nothing orders: of programs, of warps, and of threads of a warp."""
        if space == "global":
            self._look((log.byte,), log.program, log, space)
        self._look((log.byte, log.program, log.turn), log.warp, log, space)
        together = (log.event,) if space == "global" and not self.strict else ()
        self._look((log.byte, log.warp, log.turn, log.turn_of_warp, *together), log.thread, log, space)

    def _look(self, keys, who, log, space):
        """Of all accesses with the same keys, two by different ones of `who` race, unless none writes."""
        order = np.lexsort(keys[::-1])
        changes = np.zeros(len(order), bool)
        for key in keys:
            sorted_ = key[order]
            changes[1:] |= sorted_[1:] != sorted_[:-1]
        changes[:1] = True
        starts = np.flatnonzero(changes)

        def differs(column):
            values = column[order]
            return np.minimum.reduceat(values, starts) != np.maximum.reduceat(values, starts)

        kinds = log.kind[order]
        writes = np.maximum.reduceat(kinds, starts) >= WRITE
        atomic = np.minimum.reduceat(kinds, starts) == ATOMIC
        alike = ~differs(log.event) & ~differs(log.value)
        racing = differs(who) & writes & ~atomic & ~alike
        if racing.any():
            group = int(np.argmax(racing))
            end = starts[group + 1] if group + 1 < len(starts) else len(order)
            self._refuse(log.take(order[starts[group] : end]), who[order[starts[group] : end]], space)

    def _refuse(self, log, who, space):
        """Name an access that writes, and one by another."""
        one = int(np.argmax(log.kind >= WRITE))
        other = int(np.argmax(who != who[one]))
        said = [
            f"{self.instructions[log.event[place]]} by thread {log.thread[place]} of program {log.program[place]}"
            for place in (one, other)
        ]
        raise RaceFault(
            f"{said[0]} and {said[1]} access byte {int(log.byte[0]):#x} of {space} memory, and nothing orders them"
        )


def bytes_stored(access, lanes):
    """The bytes that are stored, in the order of their addresses."""
    if not access.values:
        return np.full(len(lanes) * access.width, -1, np.int16)
    size = access.width // len(access.values)
    parts = [np.broadcast_to(value, lanes.shape).copy().view(np.uint8).reshape(-1, size) for value in access.values]
    return np.concatenate(parts, axis=1).ravel().astype(np.int16)
