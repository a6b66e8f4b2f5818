"""Count, by the executor, what a mean in one kernel does: bytes, sectors and packets by place, and clocks by phase.

Every rank averages `TILES` whole tiles of each shard, the result is compared with the definition, and accesses are
counted where they go: to tensors of the rank's own, to its own part of the node's memory, to that of others, and to
signals. A *packet* is what a warp's instruction accesses of a line of 128 bytes: a bus moves no more at once.

The machine code of a warp (`bench.predicted`) is cut at the signals into the phases that a program has between its
waits. Each is simulated alone on a multiprocessor, twice: with the node's memory on devices, where what is written to
other ranks is posted and nothing waits for it; and on the host, where reads take `HOST_READ` longer.
"""

import functools
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from baguakit.compressors import BFloat16, Compressor, Float8, MinMaxUInt8, Sign, UInt2, UInt4
from baguakit.kernels import cpu, rotation
from baguakit.kernels.exchange.mean_gpu import mean_
from bench.predicted.model import H100, Assembled, assembled_of
from bench.predicted.simulation import LATENCY, MEMORY, SECTOR, Multiprocessor, Step, path
from ptx.ranks import together
from ptx.watching.counters import KINDS, Counters

from .node import Node, needed, separately, wire_of

ARCH, TILES = 90, 2  # tiles of a shard, which a program takes one after another
CODECS: dict[str, Compressor | None] = {
    repr(each): each for each in (MinMaxUInt8(), Float8(), UInt4(), UInt2(), Sign(), BFloat16())
} | {"exact": None}
RANKS = (2, 4, 8)
FLIGHTS = [f"bytegrad{lost}{how}" for lost in ("", ", error feedback") for how in ("", ", in one kernel")]
FLIGHTS += [f"five exchanges of rows{form}, in one kernel each" for form in ("", " in four bits")]
LINE = 128
ADDRESS_BITS = 48
ADDRESS = (1 << ADDRESS_BITS) - 1
HOST_READ = 1.2e-6  # seconds from a load of the host's memory to its value: an assumption
# Sectors a clock that the second cache gives a multiprocessor, at most: 64 bytes.
SECTORS = min(2.0, H100.copy / H100.clock / 32 / SECTOR)
PHASES = ("send", "mean", "land")


@dataclass(eq=False)
class Places:
    """Count bytes, sectors and packets of a launch by place: "own", "here", "there" or "signals"; and kind.

    Attributes:
        distinct: sectors that the launch touches, each once.
        lines: the place that each line of the PTX accesses by a kind most.
    """

    node: Node
    into: list[Any]
    bytes: Counter[tuple[str, str]] = field(default_factory=Counter)
    sectors: Counter[tuple[str, str]] = field(default_factory=Counter)
    packets: Counter[tuple[str, str]] = field(default_factory=Counter)
    touched: dict[tuple[str, str], set[int]] = field(default_factory=dict)
    lines: dict[int, Counter[str]] = field(default_factory=dict)

    def began(self, program: Any, launch: Any) -> None:
        begins = [each.data_ptr() for each in self.node.whole]
        self.begins, self.order = np.sort(begins), np.argsort(begins)

    def seen(self, access: Any) -> None:
        if access.space != "global":
            return
        lanes = access.frame.lanes(access.on)
        addresses = np.broadcast_to(access.addresses, lanes.shape)
        at = np.searchsorted(self.begins, addresses, side="right") - 1
        apart = addresses - self.begins[at]
        length = len(self.node.whole[0])
        inside = (at >= 0) & (apart < length)
        mine = self.order[at] == access.frame.launch.rank
        names = np.where(mine, "here", "there")
        names = np.where(inside & (apart >= 2 * self.node.half_bytes), "signals", names)
        names = np.where(inside, names, "own")
        for name in np.unique(names).tolist():
            there = names == name
            moved = _units(access.frame.warp[lanes][there], addresses[there], access.width)
            for kind in KINDS[access.kind]:
                key = (name, kind)
                self.bytes[key] += len(moved)
                self.sectors[key] += _distinct(moved, SECTOR)
                self.packets[key] += _distinct(moved, LINE)
                self.touched.setdefault(key, set()).update(((moved & ADDRESS) // SECTOR).tolist())
                self.lines.setdefault(access.instruction.line, Counter())[name] += len(moved)

    def ended(self) -> None:
        self.distinct = Counter({key: len(each) for key, each in self.touched.items()})
        self.into.append(self)


@dataclass(frozen=True)
class Mean:
    """The means of `Places` over ranks, whose rows begin at other places in a line; and the sums of lines."""

    bytes: Mapping[tuple[str, str], float]
    sectors: Mapping[tuple[str, str], float]
    packets: Mapping[tuple[str, str], float]
    distinct: Mapping[tuple[str, str], float]
    lines: Mapping[int, Counter[str]]


def mean_of(places: Sequence[Places]) -> Mean:
    def mean(name: str) -> dict[tuple[str, str], float]:
        total: Counter[tuple[str, str]] = sum((getattr(each, name) for each in places), Counter())
        return {key: each / len(places) for key, each in total.items()}

    lines: dict[int, Counter[str]] = {}
    for each in places:
        for line, names in each.lines.items():
            lines.setdefault(line, Counter()).update(names)
    return Mean(mean("bytes"), mean("sectors"), mean("packets"), mean("distinct"), lines)


def _units(warps: Any, addresses: Any, width: int) -> Any:
    """Return a number for each byte that an instruction accesses and the warp that does."""
    whole = (addresses[:, None] + np.arange(width)).ravel()
    return np.unique(np.repeat(warps.astype(np.int64) << ADDRESS_BITS, width) | whole)


def _distinct(moved: Any, unit: int) -> int:
    return len(np.unique(moved // unit))  # a unit divides the addresses of a warp


def flights() -> dict[str, Any]:
    """Return what a flight of `bytegrad` launches, by kernels apart and in one, by case."""
    program = Path(__file__).parents[2] / "tests" / "kernels" / "recording.py"
    path = os.pathsep.join((str(program.parents[2]), str(program.parent)))
    ran = subprocess.run(
        [sys.executable, str(program), *FLIGHTS], env=os.environ | {"PYTHONPATH": path},
        stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    found = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]
    plain = ("c10d::", "aten::is_nonzero")  # collectives, which are counted, and a question to the host
    return {
        each["case"]: {
            "kernels": len(each["launches"]),
            "collectives": len(each["collectives"]),
            "operators": sum(n for name, n in each["ops"].items() if not name.startswith(plain)),
        }
        for each in found
    }


def count(name: str, ranks: int, one_hop: bool) -> dict[str, Any]:
    """Return what a mean of a format over so many ranks takes; raise an AssertionError if it has other bytes.

    Returns:
        values, tiles: of a rank, and of a shard; and the values of a `tile`.
        device: bytes a value in memory of the rank's device, each sector once, and `requested` by its instructions.
        bus: bytes, sectors and packets a value that go to other ranks, without signals.
        host: bytes and packets a value that are written to and read from the host, where all memory is there.
        signals: packets of four bytes with which a program signals other ranks.
        clocks: by "device" and "host", and phase, of a program for each tile of every shard.
        launches, registers: of a rank, and of a thread.
    """
    from ptx.driver import executed

    codec = CODECS[name]
    wire = wire_of(codec)
    constants = wire.constants(1 << 20, 4, True)
    tile = constants["BLOCK"] * constants["BLOCKS"]
    length = TILES * tile * (1 if one_hop else ranks)
    node = Node(ranks, needed(ranks, wire, length, one_hop), 1)
    counted: list[Any] = []
    places: list[Places] = []
    values = [torch.randn(length, generator=torch.Generator().manual_seed(rank)) for rank in range(ranks)]
    with patch.object(cpu, "functions", return_value=None):
        wanted = separately(codec, values, None, one_hop)

    def launch(rank: int) -> None:
        rotation.signs_of.cache_clear()  # each rank has a table of its own
        mean_(node.memory(rank), wire, values[rank], None, one_hop)

    with executed(
        ARCH, watchers=(functools.partial(Counters, counted), functools.partial(Places, node, places))
    ) as gpu:
        done = together(gpu, ranks, launch, symmetric={"halves": node.data}, signals={"signals": node.signals})
    for value, want in zip(values, wanted, strict=True):
        assert torch.equal(value.view(torch.int32), want.view(torch.int32)), "the result is not that of the definition"
    assert len(set(done.launches)) == 1
    sent = sum(n for (rank, _, kind), n in done.traffic.bytes.items() if (rank, kind) == (0, "write"))
    place = mean_of(places)
    signals = round(place.bytes["signals", "write"] / 4 * (ranks - 1) / ranks)
    assert sent == place.bytes["there", "write"] + 4 * signals, "the executor counts otherwise"
    return {
        "format": name, "ranks": ranks, "one_hop": one_hop, "values": length, "tiles": TILES, "tile": tile,
        **_moved(place, counted[0], length), **_timed(place, counted[0], ranks),
        "signals": signals, "launches": done.launches[0],
    }  # fmt: skip


def _moved(place: Mean, counted: Any, length: int) -> dict[str, Any]:
    there, here = ("there", "write"), ("here", "write")
    own = sum(place.distinct[key] for key in place.distinct if key[0] in ("own", "here"))
    asked = sum(place.sectors[key] for key in place.sectors if key[0] in ("own", "here"))
    arrives = place.distinct[there]  # as much as leaves
    reads = ("here", "read")
    # Memory of the host is written by whole packets, and read through no cache: by what instructions ask for.
    return {
        "device": (own + arrives) * SECTOR / length,
        "requested": (asked + place.sectors[there]) * SECTOR / length,
        "bus": {
            "bytes": place.bytes[there] / length,
            "sectors": place.sectors[there] / length,
            "packets": place.packets[there] / length,
        },
        "host": {
            "written": (place.bytes[there] + place.bytes[here]) / length,
            "written packets": (place.packets[there] + place.packets[here]) / length,
            "read": place.sectors[reads] * SECTOR / length,
            "read packets": place.packets[reads] / length,
        },
        "instructions": sum(lanes for lanes, _ in counted.instructions.values()) / length,
    }


def _timed(place: Mean, counted: Any, ranks: int) -> dict[str, Any]:
    # Where the assembler unrolls a loop, several instructions stand for one of the PTX, and counts are not theirs.
    rolled = replace(counted, ptx=re.sub(r"^(\$L__BB\w+:)", r'\1 .pragma "nounroll";', counted.ptx, flags=re.MULTILINE))
    launch = assembled_of(rolled)
    clocks = {}
    for kind in ("device", "host"):
        steps = [
            _placed(step, each, place, kind, ranks) for step, each in zip(launch.steps, _path(launch), strict=True)
        ]
        parts = phases(steps, [_opcode(each, counted.ptx) for each in _path(launch)])
        clocks[kind] = {
            name: Multiprocessor(part, launch.warps, 1, SECTORS).clocks() / TILES
            for name, part in zip(PHASES if len(parts) == 3 else ("send", "land"), parts, strict=True)
        }
    return {"clocks": clocks, "registers": launch.code.registers, "warps": launch.warps}


def _path(launch: Assembled) -> Sequence[Any]:
    return path(launch.code, launch.counted)


def _opcode(each: Any, ptx: str) -> str:
    """Return the opcode of an instruction; of the branch past a release, which most warps take, that of the release."""
    return "ST.STRONG.SYS" if each.name == "BRA" and each.line in _told(ptx) else str(each.opcode)


@functools.lru_cache(maxsize=2)
def _told(ptx: str) -> set[int]:
    """Return the lines behind which a release begins."""
    return {place for place, line in enumerate(ptx.split("\n")) if "st.release.sys" in line}


def _placed(step: Step, each: Any, place: Mean, kind: str, ranks: int) -> Step:
    """Return a step as it is with the node's memory on devices, or on the host."""
    seen = place.lines.get(each.line)
    where = seen.most_common(1)[0][0] if seen and each.name in MEMORY else "own"
    if where == "own":
        return step
    if MEMORY[each.name] == "write":
        return step._replace(sectors=step.sectors / ranks if kind == "device" else 0.0)
    if kind == "device":
        return step
    late = round(HOST_READ * H100.clock) - LATENCY["LDG"]
    frees = tuple((board, after + (late if after >= LATENCY["LDG"] else 0)) for board, after in step.frees)
    return step._replace(sectors=0.0, frees=frees)


def phases(steps: Sequence[Step], opcodes: Sequence[str]) -> list[list[Step]]:
    """Return the steps before, between and after the waits, each of which goes from a first signal to a last poll."""
    strong = [(place, name[:2]) for place, name in enumerate(opcodes) if "STRONG.SYS" in name]
    parts, begin, polled = [], 0, False
    signalled: int | None = None
    for place, kind in strong:
        if kind == "ST" and polled:
            begin, polled, signalled = last + 1, False, None  # noqa: F821 a poll has set it
        if kind == "ST" and signalled is None:
            parts.append([*steps[begin:place]])
            signalled = place
        elif kind == "LD" and signalled is not None:
            polled, last = True, place
    return [*parts, [*steps[last + 1 :]]] if polled else [[*steps]]
