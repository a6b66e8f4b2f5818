"""The mean in one kernel, with faults of ordering planted in its source."""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from exchanges import Mean

import baguakit.kernels.exchange as whole
from ptx.faults import DeadlockFault, Fault, RaceFault, SignalFault

SHORT, AGAIN = (Mean(2, 257),), (Mean(2, 257), Mean(2, 257, seed=1))
ONE_HOP = (Mean(2, 257, one_hop=True), Mean(2, 257, one_hop=True, seed=1), Mean(2, 257, one_hop=True, seed=2))
TILES = (Mean(2, 2 * 2 * 4096),)


@dataclass(frozen=True)
class Planted:
    """A fault: text of a file of the kernel, and what takes its place.

    Attributes:
        faults: by which it may be found.
        means: that show it.
        begun: how many exchanges come before.
    """

    file: str
    changes: tuple[tuple[str, str], ...]
    faults: tuple[type[Fault], ...] = (RaceFault,)
    means: tuple[Mean, ...] = SHORT
    begun: int = 0


WRITE, READ = "st.release.sys.global.u32", "ld.acquire.sys.global.u32"
BARRIER = "    tl.debug_barrier()\n"
REACHED = "(read - number).to(tl.int32, bitcast=True) >= 0"
FIRST_WAIT = "    good = all_heard(own_ptr, words_at, 0, ranks, number, control_ptr, limit, THREADS)\n"
SECOND_WAIT = "            good = all_heard(own_ptr, words_at, 1, ranks, number, control_ptr, limit, THREADS)\n"
FIRST_SIGNALS = "    tell_all(peers_ptr, words_at, 0, ranks, rank, number, THREADS)\n"
SECOND_SIGNALS = "            tell_all(peers_ptr, words_at, 1, ranks, rank, number, THREADS)\n"
FIRST_DATA, SECOND_DATA = "    for step in range(shards):\n", "            average(\n"
ADVANCED = "    tl.store(counters_ptr + cta, number)\n"
HALF = "(number & 1).to(tl.int64) * half_bytes"
LANDED = """range(begin, end, tl.num_programs(0)):
            WIDTH: tl.constexpr = 1 if MASKED else WIDE
            block, at, inside, present = place_of(tile, shard,"""
# All of `heard` that waits; and a wait of each thread for its own word.
SIGNALS = (Path(whole.__path__[0]) / "signals_gpu.py").read_text()
HEARD = SIGNALS[SIGNALS.index("    zeros = tl.zeros(") : SIGNALS.index("    if not good:")]
SPIN = '''    SPIN: tl.constexpr = """{
        .reg .pred %again;
        SPIN:
        ld.acquire.sys.global.u32 $0, [$1];
        sub.s32 $0, $0, $2;
        setp.lt.s32 %again, $0, 0;
        @%again bra SPIN;
    }"""
    numbers = number + tl.zeros((THREADS,), tl.int32)
    tl.inline_asm_elementwise(SPIN, "=r,l,r", [words.to(tl.int64), numbers], tl.int32, False, 1)
'''
GOOD = "    good = number == number\n"

PLANTED = {
    "no barrier before the signal": Planted("signals_gpu.py", ((BARRIER + "    WRITE", "    WRITE"),)),
    "no barrier after a wait of each thread": Planted("signals_gpu.py", ((HEARD, SPIN + GOOD),)),
    "a plain signal": Planted("signals_gpu.py", ((WRITE, "st.global.u32"),), (SignalFault,)),
    "a volatile signal": Planted("signals_gpu.py", ((WRITE, "st.volatile.global.u32"),), (SignalFault,)),
    "a relaxed signal": Planted("signals_gpu.py", ((WRITE, "st.relaxed.sys.global.u32"),), (SignalFault,)),
    "a signal for this GPU": Planted("signals_gpu.py", ((WRITE, "st.release.gpu.global.u32"),), (SignalFault,)),
    "a plain wait": Planted("signals_gpu.py", ((READ, "ld.global.u32"),), (SignalFault,)),
    "a volatile wait": Planted("signals_gpu.py", ((READ, "ld.volatile.global.u32"),), (SignalFault,)),
    "a relaxed wait": Planted("signals_gpu.py", ((READ, "ld.relaxed.sys.global.u32"),), (SignalFault,)),
    "a wait for this GPU": Planted("signals_gpu.py", ((READ, "ld.acquire.gpu.global.u32"),), (SignalFault,)),
    "a number waited for by equality": Planted(
        "signals_gpu.py", ((REACHED, "read - number == 0"),), (DeadlockFault,), ONE_HOP
    ),
    "numbers compared that wrap": Planted(
        "signals_gpu.py",
        ((REACHED, "read.to(tl.int32, bitcast=True) >= number"),),
        (RaceFault, DeadlockFault),
        AGAIN,
        (1 << 31) - 2,
    ),
    "the first signal before its data": Planted(
        "mean_gpu.py", ((FIRST_SIGNALS, ""), (FIRST_DATA, FIRST_SIGNALS + FIRST_DATA))
    ),
    "the second signal before its data": Planted(
        "mean_gpu.py", ((SECOND_SIGNALS, ""), (SECOND_DATA, SECOND_SIGNALS + SECOND_DATA))
    ),
    "no first wait": Planted("mean_gpu.py", ((FIRST_WAIT, GOOD),)),
    "no second wait": Planted("mean_gpu.py", ((SECOND_WAIT, ""),)),
    "the second wait for the first signal": Planted(
        "mean_gpu.py", ((SECOND_WAIT, SECOND_WAIT.replace("words_at, 1", "words_at, 0")),)
    ),
    "the second signal in the word of the first": Planted(
        "mean_gpu.py", ((SECOND_SIGNALS, SECOND_SIGNALS.replace("words_at, 1", "words_at, 0")),), (DeadlockFault,)
    ),
    "the words of the first hop used again": Planted(
        "signals_gpu.py", (("((hop * ranks + sender) * tl.num_programs", "(sender * tl.num_programs"),)
    ),
    "a wait for all but the last rank": Planted(
        "tiles_gpu.py", (("tl.arange(0, THREADS) % ranks\n", "tl.arange(0, THREADS) % (ranks - 1)\n"),)
    ),
    "a wait for another program": Planted(
        "tiles_gpu.py", (("ranks, senders), number", "ranks, senders) + 1 - 2 * tl.program_id(0), number"),)
    ),
    "one half used again": Planted("mean_gpu.py", ((HALF, "0"),), means=ONE_HOP),
    "a count that does not advance": Planted("mean_gpu.py", ((ADVANCED, ""),), means=AGAIN),
    "one count of all programs": Planted(
        "mean_gpu.py",
        ((ADVANCED, ADVANCED.replace(" + cta", "")), ("tl.load(counters_ptr + cta)", "tl.load(counters_ptr)")),
    ),
    "tiles that another program has sent": Planted(
        "tiles_gpu.py", ((LANDED, LANDED.replace("begin,", "begin + 1 - 2 * tl.program_id(0),")),), means=TILES
    ),
}
RIGHT = Planted("signals_gpu.py", ((HEARD, SPIN + BARRIER + GOOD),), ())  # a barrier behind that wait


@contextmanager
def planted(fault: Planted, folder: Path, module: str = "mean_gpu") -> Iterator[Any]:
    """Within it, a module of a copy of the kernels in which a fault is planted."""
    package = ModuleType(f"baguakit.kernels.{folder.name}")
    package.__path__ = [str(folder)]
    for file in Path(whole.__path__[0]).glob("*.py"):
        text = file.read_text()
        for old, new in fault.changes if file.name == fault.file else ():
            assert old in text, f"{file.name} has no longer {old!r}"
            text = text.replace(old, new)
        (folder / file.name).write_text(text)
    sys.modules[package.__name__] = package
    try:
        yield importlib.import_module(f"{package.__name__}.{module}")
    finally:
        for name in [name for name in sys.modules if name.startswith(package.__name__)]:
            del sys.modules[name]
