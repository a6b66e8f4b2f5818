"""Threads, their registers, and a launch: PTX ISA, chapters 2 "Programming Model" and 10 "Special Registers".

The threads of a launch are the lanes of arrays: those of program 0 first, a program's in order. An instruction is an
action on a frame: `action(frame, on)`, where `on` is None if all lanes execute it, or else their indices in ascending
order. Programs run some thousands of lanes at a time, so that their registers stay in the cache.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from . import flow
from .faults import DivergenceFault, EndlessLoop, Fault, Unknown
from .instructions import action_of
from .instructions.operands import CLOCKS
from .instructions.strength import WEAK, Strength, strength_of
from .instructions.warps import complete
from .memory import POISON, Global, Shared
from .numbers.types import UNSIGNED, constant, width_of
from .text import Instruction, Kernel, Negated, parse

WARP = 32
LANES = 16384  # at a time
LIMIT = 1_000_000  # blocks that a launch may run, before it is taken for endless
PARKED = 1 << 30  # added to the rank of a block where a thread waits


@dataclass(frozen=True)
class Launch:
    """A grid of programs.

    Attributes:
        grid: programs in three dimensions.
        arguments: the raw bits of the kernel's parameters, in order.
        shared: bytes of shared memory that the launch asks for.
        observers: `began` is called first, if there is one, with program and launch; `seen` with every Access to
            memory, before it happens; and `ended` after the last. If an observer has them, `happened` is called with
            what a load or an atomic operation has read, or a store written, and for the last what it has left and
            where; `met` where threads meet at a barrier; and `fenced` at a fence.
        of: what messages say of a program's number.
        clock: the time in nanoseconds, whenever a thread asks for it.
        executed: for the rank of each block that has run, [lanes, warps] that have executed it in this launch.
    """

    grid: tuple[int, int, int]
    arguments: tuple[int, ...]
    memory: Global
    shared: int = 0
    observers: tuple = ()
    of: str = ""
    clock: Callable[[], int] = field(default_factory=lambda: count(0, 1000).__next__)
    executed: dict[int, np.ndarray] = field(default_factory=dict, compare=False)


@dataclass(frozen=True)
class Access:
    """An access to memory by lanes: `width` bytes at each address; `values` are raw elements to be stored, if any."""

    frame: "Frame"
    on: np.ndarray | None
    space: str
    addresses: np.ndarray
    width: int
    instruction: Instruction
    values: Sequence[np.ndarray]

    @property
    def kind(self) -> str:
        if self.instruction.opcode in ("atom", "red"):
            return "atomic"
        return "write" if len(self.values) else "read"

    @property
    def strength(self) -> Strength:
        return strength_of(self.instruction.opcode, self.instruction.modifiers) or WEAK


class Program:
    """A kernel whose instructions have been decoded: every one of them is known.

    Attributes:
        executed: for each block, in the order of ranks, [lanes, warps] that have executed it in all launches.
    """

    def __init__(self, ptx: str, threads: int | None = None):
        self.ptx = ptx
        self.kernel: Kernel = parse(ptx)
        self.threads = self.kernel.threads or threads
        if self.threads is None:
            raise Unknown("the kernel states no .reqntid, and the launch no number of threads")
        self.blocks, self.entry = flow.blocks_of(self.kernel)
        self.steps = [_Step(block, self.kernel) for block in self.blocks]
        self.executed = np.zeros((len(self.blocks), 2), np.int64)

    def run(self, launch: Launch) -> None:
        """Execute all programs of a grid; raise a Fault where a GPU would do something undefined."""
        if len(launch.arguments) != len(self.kernel.parameters):
            raise Unknown(
                f"the kernel {self.kernel.name} has {len(self.kernel.parameters)} parameters, "
                f"and was launched with {len(launch.arguments)} arguments"
            )
        for observer in launch.observers:
            if hasattr(observer, "began"):
                observer.began(self, launch)
        programs, at_a_time = int(np.prod(launch.grid)), max(1, LANES // self.threads)
        try:
            with np.errstate(all="ignore"):
                for first in range(0, programs, at_a_time):
                    self.run_frame(Frame(self, launch, first, min(at_a_time, programs - first)))
            for observer in launch.observers:
                observer.ended()
        except Fault as fault:
            fault.args = (f"{self.kernel.name}, {fault}",)
            raise

    def run_frame(self, frame: "Frame") -> None:
        """Run a frame without a pause."""
        for _ in self.turns(frame):
            pass

    def turns(self, frame: "Frame") -> Iterator[tuple[Instruction, np.ndarray | None]]:
        """Run blocks until all threads of a frame have ended: each time the one of the lowest rank.

        Yields each instruction before which other frames may run, with the lanes that execute it.
        """
        end, together, left = len(self.blocks), self.entry, LIMIT
        at = frame.at
        while True:
            rank = int(at.min()) if together is None else together
            if rank >= end:
                break
            on = None if together is not None else np.flatnonzero(at == rank)
            step = self.steps[rank]
            if step.waits:
                on = frame.waited_for(rank, on, step.waiting)
                if on is not None and len(on) == 0:
                    continue
                if on is None:
                    together = rank
            left -= 1
            if left < 0:
                raise EndlessLoop(f"{step.first}: the kernel has run {LIMIT} blocks and not ended")
            executed = np.array(frame.lanes_and_warps(on))
            self.executed[rank] += executed
            frame.launch.executed[rank] = frame.launch.executed.get(rank, 0) + executed
            for pause, actions in step.parts:
                if pause and frame.pauses:
                    executing = on if pause.guard is None else frame.where(pause.guard, on)
                    if executing is None or len(executing):
                        yield pause, executing
                for action in actions:
                    action(frame, on)
            together = frame.go(on, step)
        if together is None:
            frame.must_have_ended(self.steps)


class _Step:
    """A block, decoded."""

    def __init__(self, block, kernel):
        self.waits = block.waits
        self.waiting = block.instructions[0] if block.waits else None
        self.first = (block.instructions or [block.jump])[0]
        self.parts: list = [(None, [])]  # an instruction before which others may run, and actions that follow
        for each in block.instructions:
            if flow.pauses(each):
                self.parts.append((each, []))
            self.parts[-1][1].append(_guarded(each, action_of(each, kernel)))
        self.next, self.target = block.next, block.target
        self.guard = block.jump.guard if block.jump else None
        self.jumps = block.jump is not None


def _guarded(instruction, action):
    guard = instruction.guard
    if guard is None:
        return action
    if instruction.opcode in flow.WAITING:
        raise instruction.unknown("guard of an instruction that waits for other threads")

    def guarded(frame, on):
        on = frame.where(guard, on)
        if on is None or len(on):
            action(frame, on)

    return guarded


class Frame:
    """The threads of some programs of a launch, while they run.

    Attributes:
        count, programs, first: lanes, programs, and the number of the first program.
        program: of each lane, counted within the frame.
        at: the rank of the block where each lane is; PARKED is added where it waits.
        pauses: others may run before an instruction that orders accesses.
    """

    pauses = False

    def __init__(self, program: Program, launch: Launch, first: int, programs: int):
        threads = program.threads
        self.threads, self.programs, self.first, self.launch = threads, programs, first, launch
        self.count = programs * threads
        self.thread_of = np.tile(np.arange(threads, dtype=np.uint32), programs)
        self.program = np.repeat(np.arange(programs, dtype=np.int64), threads)
        self.warps_of_program = -(-threads // WARP)
        self.warp = self.program * self.warps_of_program + self.thread_of // WARP
        self.memory = launch.memory
        self.shared = Shared(programs, launch.shared + program.kernel.static)
        self.parameters = {
            each.name: constant(bits, width_of(each.type))
            for each, bits in zip(program.kernel.parameters, launch.arguments, strict=True)
        }
        self.turn = np.zeros(programs, np.int32)  # how many barriers a program, or a warp, has passed
        self.turn_of_warp = np.zeros(programs * self.warps_of_program, np.int32)
        self.registers: dict[str, np.ndarray] = {}
        self.at = np.full(self.count, program.entry, np.int32)
        self._special: dict[str, np.ndarray] = {}

    # Registers.

    def register(self, name, width):
        """The raw values of a register in all lanes; poison where nothing was written."""
        try:
            return self.registers[name]
        except KeyError:
            if width == 1:
                made = np.zeros(self.count, bool)
            else:
                made = np.full(self.count * (width // 8), POISON, np.uint8).view(UNSIGNED[width])
            return self.registers.setdefault(name, made)

    def special(self, name):
        """The values of a special register in all lanes."""
        if name in CLOCKS:
            return np.full(self.count, self.launch.clock(), np.uint64)
        if name not in self._special:
            self._special[name] = self._make_special(name)
        return self._special[name]

    def _make_special(self, name):
        register, _, axis = name.removeprefix("%").partition(".")
        x, y, z = self.launch.grid
        number = self.program + self.first
        made = {
            "tid": (self.thread_of, 0, 0),
            "ntid": (self.threads, 1, 1),
            "ctaid": (number % x, number // x % y, number // (x * y)),
            "nctaid": (x, y, z),
            "laneid": (self.thread_of % WARP,),
            "warpid": (self.thread_of // WARP,),
        }[register]
        values = np.asarray(made["xyz".index(axis) if axis else 0])
        return np.broadcast_to(values.astype(np.uint32), (self.count,))

    def forget(self):
        """Free the registers and the shared memory of a frame that has ended."""
        self.registers, self._special, self.shared = {}, {}, None

    # Which lanes execute.

    def lanes(self, on):
        return np.arange(self.count) if on is None else on

    def where(self, guard, on):
        """Those of `on` for which a guard holds; None for all lanes."""
        negated = isinstance(guard, Negated)
        holds = self.register((guard.register if negated else guard).name, 1)
        if on is not None:
            holds = holds[on]
        holds = ~holds if negated else holds
        if on is None:
            return None if holds.all() else np.flatnonzero(holds)
        return on[holds]

    def lanes_and_warps(self, on):
        if on is None:
            return self.count, self.programs * self.warps_of_program
        return len(on), np.count_nonzero(np.diff(self.warp[on])) + 1

    def go(self, on, step):
        """Send lanes from the end of a block to the next; return its rank if all lanes go there."""
        if not step.jumps or step.guard is not None:
            taken = self.where(step.guard, on) if step.jumps else self.lanes(on)[:0]
            if on is None and taken is None:
                return step.target
            if on is None and len(taken) == 0:
                return step.next
            self.at[... if on is None else on] = step.next
            self.at[taken] = step.target
            return None
        if on is None:
            return step.target
        self.at[on] = step.target
        return None

    # Threads that wait.

    def waited_for(self, rank, on, instruction):
        """Return those who are at a block and all for whom they wait are there; park the others."""
        if on is None:
            self.at[:] = rank
        else:
            self.at[on] = rank + PARKED
        here = (self.at == rank) | (self.at == rank + PARKED)
        ready = complete(instruction, self, here)
        if ready.all():
            return None
        self.at[here] = rank + PARKED
        on = np.flatnonzero(ready)
        self.at[on] = rank
        return on

    def must_have_ended(self, steps):
        waiting = self.at >= PARKED
        if waiting.any():
            instruction = steps[int(self.at[np.argmax(waiting)]) - PARKED].waiting
            raise DivergenceFault(
                f"{instruction}: {self.thread(None, waiting)} waits for other threads, which never come; "
                f"{np.count_nonzero(waiting)} of {self.count} threads wait, and the others have ended"
            )

    # What errors and observers say.

    def thread(self, on, wrong):
        """Name the first lane of those that are marked."""
        wrong = np.broadcast_to(wrong, (self.count,) if on is None else (len(on),))
        lane = int(self.lanes(on)[np.argmax(wrong)])
        return f"thread {lane % self.threads} of program {lane // self.threads + self.first}{self.launch.of}"

    def ordered(self, on, warp):
        """Threads have met at a barrier of their program, or of their warp: what they did before comes before."""
        self.tell("met", self, on, warp)
        if warp:
            self.turn_of_warp[np.unique(self.warp[self.lanes(on)])] += 1
        else:
            self.turn[np.unique(self.program[self.lanes(on)])] += 1

    def seen(self, space, on, addresses, width, instruction, values):
        for observer in self.launch.observers:
            observer.seen(Access(self, on, space, addresses, width, instruction, values))

    def tell(self, name, *said):
        """Call a method of those observers that have it."""
        for observer in self.launch.observers:
            if method := getattr(observer, name, None):
                method(*said)
