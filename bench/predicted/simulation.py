"""A multiprocessor of a Hopper GPU, clock by clock: how many clocks a program of a kernel takes it.

Each clock, each of the four schedulers issues one instruction: of the warp that issued last if that can go on, or else
of the oldest that can. A warp can go on if as many clocks have passed as its last instruction asks for, the scoreboards
for which it waits are free, and so is the pipe: an instruction keeps a pipe of 16 lanes for two clocks, in which the
scheduler can only feed other pipes. Memory moves one sector after another, at the speed of a large copy.

Not in the model: the time to launch, misses of the instruction cache, and conflicts between banks of registers.
"""

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

from .assembly import SCOREBOARDS, Code, Instruction

SCHEDULERS, WARP, SECTOR, LINE = 4, 32, 32, 128
# Of a multiprocessor; a program takes RESERVED bytes of shared memory beside its own.
WARPS, PROGRAMS, REGISTERS, SHARED, RESERVED = 64, 32, 65536, 228 << 10, 1 << 10
GRANULE = 8  # registers of a thread come in such parts

# The opcodes of each pipe. "exchange" and memory belong to the multiprocessor, all other pipes to a scheduler.
PIPES = {
    "float": "FADD FMUL FFMA HADD2 HMUL2 HFMA2 FSWZADD",
    "multiply": "IMAD IDP",
    "integer": (
        "BMSK CS2R F2FP FCHK FMNMX FSEL FSET FSETP HMNMX2 HSET2 HSETP2 I2FP I2IP IABS IADD3 IMNMX ISETP LEA LOP3 MOV "
        "P2R PLOP3 PRMT R2P SEL SGXT SHF VABSDIFF VHMNMX VIADD VIADDMNMX VIMNMX VIMNMX3 VOTE VOTEU"
    ),
    "conversion": "BREV F2F F2I FLO FRND I2F MUFU POPC",
    "fp64": "DADD DFMA DMUL DSETP",
    "matrix": "HMMA IMMA",
    "exchange": (
        "ATOM ATOMG ATOMS LD LDC LDG LDGSTS LDL LDS LDSM MATCH R2UR RED REDUX S2R S2UR SHFL ST STG STL STS STSM"
    ),
    "uniform": (
        "UBMSK UBREV UFLO UIADD3 UIMAD UISETP ULDC ULEA ULOP3 UMOV UP2UR UPLOP3 UPOPC UPRMT USEL USGXT USHF"
    ),
    "control": (
        "BAR BRA BREAK BSSY BSYNC CALL CCTL CGAERRBAR DEPBAR ERRBAR EXIT LDGDEPBAR MEMBAR NANOSLEEP NOP RET WARPSYNC "
        "YIELD"
    ),
}  # fmt: skip
PIPE = {name: pipe for pipe, names in PIPES.items() for name in names.split()}
# For how many clocks an instruction keeps its pipe. They stand for results a clock and multiprocessor in the CUDA C++
# Programming Guide, "Throughput of Native Arithmetic Instructions", compute capability 9.0: 64 are two clocks of a
# scheduler's 16 lanes, and 16 are eight of four. Where it has 128 there are two pipes: "float" may use "multiply" too.
CLOCKS = {
    "float": 2,
    "multiply": 2,
    "integer": 2,
    "conversion": 8,
    "fp64": 2,
    "matrix": 16,
    "exchange": 1,
    "uniform": 2,
}
CLOCKS["control"] = 0
# Clocks until a scoreboard is free: those of memory as microbenchmarks of an H100 found them (arXiv:2402.13499).
LATENCY = {"LDG": 479, "ATOM": 479, "ATOMG": 479, "LDL": 41, "LDC": 38, "LDS": 29, "LDSM": 29, "ATOMS": 64, "SHFL": 23}
OTHER, OPERANDS, BARRIER = 20, 12, 22  # clocks: to another result, until operands have been read, and past a barrier
MEMORY = {"LDG": "read", "LDGSTS": "read", "STG": "write", "ATOM": "write", "ATOMG": "write", "RED": "write"}
ROUNDS = 6  # how many programs run in each place, one after another; the first and the last are not measured


class Step(NamedTuple):
    """An instruction that a warp executes, and what it keeps busy.

    Attributes:
        clocks: for which it keeps its pipe.
        waits, frees: scoreboards, and the clocks until it frees them.
        sectors: that memory moves, and whether the warp gets them.
    """

    pipe: str
    clocks: float
    stall: int
    waits: tuple[int, ...]
    frees: tuple[tuple[int, int], ...]
    sectors: float
    reads: bool
    meets: bool


@dataclass(eq=False)
class Program:
    """A program that runs: how many of its warps have not ended, and those that wait at a barrier."""

    number: int
    began: float
    left: int
    waiting: list["Warp"] = field(default_factory=list)


@dataclass(eq=False)
class Warp:
    """A warp that runs: the place of its next step, and when that is ready but for its pipe."""

    program: Program
    ready: float
    at: int = 0
    scoreboards: list[float] = field(default_factory=lambda: [0.0] * SCOREBOARDS)


def resident(code: Code, warps: int, shared: int) -> int:
    """Return how many programs, of so many warps and bytes of shared memory each, a multiprocessor holds."""
    registers = -(-code.registers // GRANULE) * GRANULE * WARP * warps
    return max(1, min(PROGRAMS, WARPS // warps, REGISTERS // registers, SHARED // (shared + RESERVED)))


def path(code: Code, counted: Any) -> list[Instruction]:
    """Return what a warp executes: at each branch it goes to where instructions are still to be executed on average.

    Copies of an instruction that stand in several blocks, as of a loop that is unrolled and of its rest, share how
    often it is executed.
    """
    warps = counted.programs * -(-counted.threads // WARP)
    all_ = code.instructions
    names = [(each.line, each.opcode) if each.line in counted.lines else place for place, each in enumerate(all_)]
    left = {name: counted.lines[name[0]].warps / warps if isinstance(name, tuple) else 1.0 for name in names}
    copies, parts = unrolled(all_)

    def due(at: int, end: int = len(all_)) -> bool:
        return _due(all_[:end], [left[name] / many for name, many in zip(names, copies, strict=True)], at)

    found, at = [], 0
    while at < len(all_):
        each = all_[at]
        found.append(each)
        left[names[at]] -= parts[at]
        at += 1
        if each.name == "EXIT" and not (each.guarded and due(at)):
            break
        if each.name == "BRA" and each.target is not None and not each.opcode.startswith("BRA.DIV"):
            onward = at if each.conditional else len(all_)
            both = sorted((each.target, onward))  # a loop goes on, and what comes next is not left out, if it is due
            at = both[0] if both[1] == len(all_) or due(both[0], both[1]) else both[1]
    return found


def unrolled(code: Sequence[Instruction]) -> tuple[list[int], list[float]]:
    """Return of each instruction in how many copies its block has what it was made of, by its accesses to memory.

    And what part of an execution of its line it is, of all that have its opcode in such a copy.
    """
    accesses = Counter((each.line, each.opcode) for each in code if each.name in ("LDG", "STG", "LDS", "STS"))
    copies: list[int] = []
    parts: list[float] = []
    block: list[Instruction] = []
    targets = {each.target for each in code}
    for at, each in enumerate(code, 1):
        block.append(each)
        if at == len(code) or at in targets or each.name in ("BRA", "EXIT", "RET"):
            alike = Counter((each.line, each.opcode) for each in block)
            many = min((alike[key] for key in alike if key in accesses), default=1)
            copies += [many] * len(block)
            parts += [many / alike[each.line, each.opcode] for each in block]
            block = []
    return copies, parts


def _due(code: Sequence[Instruction], left: Sequence[float], at: int) -> bool:
    """Tell whether the block at a place is executed once more; never one that calls a function for corners."""
    counts = []
    for place in range(at, len(code)):
        if code[place].name == "CALL":
            return False
        counts.append(left[place])
        if code[place].name in ("BRA", "EXIT", "RET"):
            break
    return bool(counts) and median(counts) > 0.5  # the assembler moves a few instructions between blocks


def steps(code: Code, counted: Any) -> list[Step]:
    """Return the path of a warp with what was counted of memory."""
    on_path, made = path(code, counted), dict[int, Step]()
    times = Counter(each.line for each in on_path if each.name in MEMORY)
    return [made.get(id(each)) or made.setdefault(id(each), _step(each, counted, times)) for each in on_path]


def _step(each: Instruction, counted: Any, times: Counter[int]) -> Step:
    if each.name not in PIPE:
        raise LookupError(f"{each.text}: the model knows no such instruction; give it a pipe in {__file__}")
    pipe, kind, line = PIPE[each.name], MEMORY.get(each.name, ""), counted.lines.get(each.line)
    clocks, sectors = float(CLOCKS[pipe]), 0.0
    if line and line.warps and pipe == "exchange":
        warps = counted.programs * -(-counted.threads // WARP) * times[each.line] if kind else line.warps
        touched = (line.read if kind == "read" else line.written if kind else 0) / warps
        clocks = max(clocks, touched * SECTOR / LINE if kind else line.wavefronts / warps)
        sectors = touched * counted.distinct[kind] / max(1, counted.requested[kind])
    written, read = each.holds
    after = (written, LATENCY.get(each.name, OTHER)), (read, OPERANDS)
    frees = tuple((scoreboard, clocks) for scoreboard, clocks in after if scoreboard is not None)
    return Step(pipe, clocks, max(1, each.stall), each.waits, frees, sectors, kind == "read", each.name == "BAR")


class Multiprocessor:
    """Runs programs that all take the same steps.

    Args:
        warps: of a program.
        held: how many programs run at a time.
        sectors: that memory moves for it in a clock.
    """

    def __init__(self, steps: Sequence[Step], warps: int, held: int, sectors: float):
        self.steps, self.warps, self.held, self.sectors = steps, warps, held, sectors
        self.queues: list[list[Warp]] = [[] for _ in range(SCHEDULERS)]
        self.free = [dict.fromkeys(CLOCKS, 0.0) for _ in range(SCHEDULERS)]
        self.next, self.last = [0.0] * SCHEDULERS, [None] * SCHEDULERS
        self.served = [0.0] * SCHEDULERS  # when each has used "exchange" last: the one that waits longest is first
        self.memory = self.exchange = 0.0
        self.events: list[tuple[float, float, int]] = []
        self.started, self.lives = 0, []
        life = sum(each.stall for each in steps) + LATENCY["LDG"]
        for place in range(held):  # they begin one after another, as they would in the middle of a launch
            self.start(place * life / held)

    def clocks(self) -> float:
        """Return the clocks that a program takes: how long one runs, by how many run at a time."""
        while self.events:
            now, _, number = heapq.heappop(self.events)
            if now >= self.next[number]:
                self.issue(now, number)
        lives = [life for number, life in self.lives if self.held <= number < (ROUNDS - 1) * self.held]
        return sum(lives) / len(lives) / self.held

    def start(self, now: float) -> None:
        if self.started == ROUNDS * self.held:
            return
        program = Program(self.started, now, self.warps)
        self.started += 1
        for _ in range(self.warps):
            number = min(range(SCHEDULERS), key=lambda number: len(self.queues[number]))
            self.queues[number].append(Warp(program, now))
            self.look(now, number)

    def look(self, when: float, number: int) -> None:
        """Let a scheduler look at a clock for an instruction to issue."""
        heapq.heappush(self.events, (when, self.served[number], number))

    def issue(self, now: float, number: int) -> None:
        """Let a scheduler issue an instruction, or look again when one can issue."""
        free, last, queue = self.free[number], self.last[number], self.queues[number]
        free["exchange"] = self.exchange
        soonest = float("inf")
        for warp in queue if last is None else (last, *queue):
            pipe = self.steps[warp.at].pipe
            when = max(warp.ready, min(free["float"], free["multiply"]) if pipe == "float" else free[pipe])
            if when <= now:
                self.execute(warp, now, number)
                soonest = self.next[number] = now + 1
                break
            soonest = min(soonest, when)
        if soonest < float("inf"):
            self.look(soonest, number)

    def execute(self, warp: Warp, now: float, number: int) -> None:
        step, free = self.steps[warp.at], self.free[number]
        if step.pipe == "exchange":
            self.exchange, self.served[number] = now + step.clocks, now
        else:
            free["multiply" if step.pipe == "float" and free["float"] > now else step.pipe] = now + step.clocks
        arrives = now
        if step.sectors:
            self.memory = max(self.memory, now) + step.sectors / self.sectors
            arrives = self.memory if step.reads else now
        for scoreboard, after in step.frees:
            warp.scoreboards[scoreboard] = max(warp.scoreboards[scoreboard], arrives + after)
        warp.at += 1
        self.last[number] = warp
        if warp.at == len(self.steps):
            self.end(warp, now, number)
            return
        waits = self.steps[warp.at].waits
        warp.ready = max([now + step.stall, *(warp.scoreboards[each] for each in waits)])
        if step.meets and self.warps > 1:
            self.meet(warp, now)

    def meet(self, warp: Warp, now: float) -> None:
        """Let a warp wait for the others of its program; the last lets all go on."""
        waiting = warp.program.waiting
        waiting.append(warp)
        if len(waiting) < self.warps:
            warp.ready = float("inf")
            return
        for each in waiting:
            waits = self.steps[each.at].waits
            each.ready = max([now + BARRIER, *(each.scoreboards[scoreboard] for scoreboard in waits)])
        for number in range(SCHEDULERS):
            self.look(now + BARRIER, number)
        waiting.clear()

    def end(self, warp: Warp, now: float, number: int) -> None:
        program = warp.program
        self.queues[number].remove(warp)
        self.last[number] = None
        program.left -= 1
        if not program.left:
            self.lives.append((program.number, now - program.began))
            self.start(now)
