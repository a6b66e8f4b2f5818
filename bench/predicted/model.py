"""The time that a GPU takes for a launch: what its machine code needs, simulated, and the parts that it keeps busy.

    memory         distinct sectors, at the speed of a large copy
    issue          instructions, at one a clock and scheduler
    exchange       loads, stores and shuffles: sectors and turns of shared memory, at 128 bytes a clock
    integer …      instructions of a pipe, at its width

No launch is faster than its busiest part. `simulation` says how much slower it is, because instructions of the same
pipe come together and too few warps hide each other's waiting. Not in the model: the time to launch.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .assembly import Code, assembled
from .simulation import SCHEDULERS, SECTOR, WARP, Multiprocessor, Step, path, resident, steps


@dataclass(frozen=True)
class GPU:
    """A GPU of compute capability 9.0.

    Attributes:
        copy: bytes a second that a large copy reads and writes.
        clock: a second, boosted.
    """

    name: str
    copy: float
    clock: float = 1.98e9
    multiprocessors: int = 132

    @property
    def sectors(self) -> float:
        """Sectors that memory moves in a clock for a multiprocessor."""
        return self.copy / self.clock / self.multiprocessors / SECTOR


H100, H200 = GPU("H100", 2.884e12), GPU("H200", 4.3e12)  # the H100 as measured in the run on the page
GPUS = (H200, H100)
IDLE = 0.8  # a launch none of whose parts is busy for this share of its time is bound by waiting


@dataclass(frozen=True)
class Assembled:
    """A launch that was counted, and the path of its warps through the machine code."""

    counted: Any
    code: Code
    steps: Sequence[Step]

    @property
    def warps(self) -> int:
        """Those of a program."""
        return -(-int(self.counted.threads) // WARP)

    @property
    def held(self) -> int:
        return resident(self.code, self.warps, self.counted.shared)

    def pipes(self) -> Counter[str]:
        """Return how many instructions of each pipe all warps execute."""
        of_warp = Counter(step.pipe for step in self.steps)
        return Counter({pipe: count * self.warps * self.counted.programs for pipe, count in of_warp.items()})

    def opcodes(self) -> Counter[str]:
        """Return how many instructions of each opcode a warp executes."""
        return Counter(each.opcode for each in path(self.code, self.counted))

    def busy(self, gpu: GPU) -> dict[str, float]:
        """Return the seconds that the launch keeps each part of a GPU busy."""
        clocks: Counter[str] = Counter()
        for step in self.steps:
            clocks["issue"] += 1
            clocks[step.pipe] += step.clocks * (SCHEDULERS if step.pipe == "exchange" else 1)
        # Additions and products of floats may use the pipe of integer products, but not the other way round.
        clocks["float"] = max((clocks["float"] + clocks["multiply"]) / 2, clocks["multiply"])
        del clocks["multiply"]
        total = self.warps * self.counted.programs / SCHEDULERS / gpu.multiprocessors / gpu.clock
        found = {name: count * total for name, count in clocks.items() if count}
        return found | {"memory": sum(self.counted.distinct.values()) * SECTOR / gpu.copy}

    def seconds(self, gpu: GPU) -> float:
        """Return how long the launch takes, as simulated, but no less than its busiest part."""
        clocks = Multiprocessor(self.steps, self.warps, self.held, gpu.sectors).clocks()
        simulated = clocks * self.counted.programs / gpu.multiprocessors / gpu.clock
        return max(simulated, *self.busy(gpu).values())


def assembled_of(counted: Any) -> Assembled:
    code = assembled(counted.ptx)
    return Assembled(counted, code, steps(code, counted))


def instructions_a_byte(gpu: GPU) -> float:
    """Return how many instructions of single lanes a GPU issues while its memory moves a byte."""
    return gpu.multiprocessors * SCHEDULERS * WARP * gpu.clock / gpu.copy


def predict(counted: Sequence[Any], n: int, floor: float, moves: float) -> dict[str, Any]:
    """Return what launches take together.

    Args:
        floor, moves: bytes that must be moved, and those that the algorithm moves.

    Returns:
        bytes, floor: of a value.
        distinct, requested: sectors relative to those that `moves` bytes fill.
        pipes: instructions of lanes of each pipe for each value, and `instructions` of all for a byte of `moves`.
        For each GPU, under its name: its `share` of the bytes a second of a copy, how long each part is `busy`,
        relative to a copy of `moves`, and the `bound`: the busiest part, or "waiting" if all are idle too long.
    """
    launches = [assembled_of(each) for each in counted]
    pipes: Counter[str] = Counter()
    for launch in launches:
        pipes.update({pipe: WARP * count for pipe, count in launch.pipes().items()})
    return {
        "bytes": moves / n,
        "floor": floor / n,
        "distinct": sum(sum(each.distinct.values()) for each in counted) * SECTOR / moves,
        "requested": sum(sum(each.requested.values()) for each in counted) * SECTOR / moves,
        "instructions": sum(pipes.values()) / moves,
        "pipes": {pipe: round(count / n, 2) for pipe, count in pipes.most_common()},
        **{gpu.name: _of_gpu(launches, gpu, moves) for gpu in GPUS},
    }


def _of_gpu(launches: Sequence[Assembled], gpu: GPU, moves: float) -> dict[str, Any]:
    ideal, busy = moves / gpu.copy, Counter[str]()
    for launch in launches:
        busy.update(launch.busy(gpu))
    seconds = sum(launch.seconds(gpu) for launch in launches)
    bound, longest = busy.most_common(1)[0]
    return {
        "share": min(1.0, ideal / seconds),
        "bound": bound if longest >= IDLE * seconds else "waiting",
        "busy": {name: round(part / ideal, 3) for name, part in busy.most_common()},
    }
