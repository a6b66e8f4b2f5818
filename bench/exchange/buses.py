"""The seconds of a mean over 8 GPUs of a node, from what the executor counted and from assumptions about the bus.

All is predicted. Between two waits a program computes, and its stores leave over the bus, which takes the longer of the
two; phases follow each other. With c the clocks of a phase for each tile, b the bytes that a hop sends, p its packets:

    one kernel      launch + Σ over phases max(c t/clock, (b + header p)/rate) + a release and a signal for each wait
    ring            NCCL's all-reduce of S bytes: base + 2 (n − 1) step + 2 (n − 1)/n S/rate
    three kernels   compress, average and decompress, as predicted for an H100, and NCCL between them

A program takes t tiles of a shard, one after another.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from baguakit.comm.symmetric import CTAS
from bench.predicted.model import H100

GPUS = 8
LAUNCH = 2e-6  # seconds from the end of one kernel to the begin of the next of its stream
BASE = 8.4e-6  # seconds: NCCL's own estimate of a ring with the protocol "Simple" (src/graph/tuning.cc)
STAGED = 1.9e9  # bytes a second of NCCL through memory of the host, on PCIe 4.0 x16, measured by others: sglang#39605
WORD = 4  # bytes of a signal
FULL = 128  # bytes of values in a packet of NCCL
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Bus:
    """Describe what joins the GPUs of a node.

    Attributes:
        rate: bytes a second and GPU, each way, headers included.
        header: bytes of a packet beside its values.
        release: seconds that a program waits, before it signals all ranks, until its stores have arrived.
        signal: seconds from the last release of a phase until all programs of other ranks have seen it.
        step: seconds of a step of NCCL's ring, by NCCL's own estimate for such a bus.
        host_memory: bytes a second of the memory of the host, reads and writes together, where all goes through it.
        reads: bytes a second that a GPU's loads get from the host; 0 for what the bus allows.
    """

    name: str
    rate: float
    header: int
    release: float
    signal: float
    step: float
    host_memory: float = 0.0
    reads: float = 0.0

    @property
    def on_host(self) -> bool:
        return self.host_memory > 0

    @property
    def nccl(self) -> float:
        """Return the bytes a second of NCCL."""
        return STAGED if self.on_host else self.rate * FULL / (FULL + self.header)


GEN4, GEN5 = (lanes * 16 * 128 / 130 / 8 for lanes in (16e9, 32e9))
DDR4, DDR5 = 0.8 * 8 * 25.6e9, 0.8 * 12 * 38.4e9
BUSES = (
    Bus("PCIe 4.0 x16, peer access", GEN4, 24, 1e-6, 1.5e-6, 5.7e-6),
    Bus("PCIe 5.0 x16, peer access", GEN5, 24, 1e-6, 1.5e-6, 5.7e-6),
    Bus("PCIe 4.0 x16, through the host", GEN4, 24, 1e-6, 2e-6, 5.7e-6, DDR4),
    Bus("PCIe 4.0 x16, through the host, loads no faster than NCCL's", GEN4, 24, 1e-6, 2e-6, 5.7e-6, DDR4, STAGED),
    Bus("PCIe 5.0 x16, through the host", GEN5, 24, 1e-6, 2e-6, 5.7e-6, DDR5),
    Bus("NVLink of an H100", 450e9, 32, 0.7e-6, 1e-6, 3.4e-6),
)


def one_kernel(row: Row, bus: Bus, values: int, ctas: int = CTAS) -> dict[str, float]:
    """Return the seconds of each phase, without those of the launch and of signals.

    `row` is what `counting.count` returns.
    """
    hops, n = (1 if row["one_hop"] else 2), row["ranks"]
    shard = values if row["one_hop"] else -(-values // n)
    tiles = math.ceil(math.ceil(shard / row["tile"]) / ctas)
    clocks = row["clocks"]["host" if bus.on_host else "device"]
    found = {name: each * tiles / H100.clock for name, each in clocks.items()}
    a_hop = values / hops
    signals = row["signals"] / hops * ctas * (WORD + bus.header)
    if not bus.on_host:
        out = ((row["bus"]["bytes"] + bus.header * row["bus"]["packets"]) * a_hop + signals) / bus.rate
        return {name: seconds if name == "land" else max(seconds, out) for name, seconds in found.items()}
    host = row["host"]
    asked = bus.header * host["read packets"] * a_hop  # requests of reads travel as writes do
    out = (host["written"] + bus.header * host["written packets"]) * a_hop + signals
    into = max(
        (host["read"] + bus.header * host["read packets"]) * a_hop / bus.rate,
        host["read"] * a_hop / bus.reads if bus.reads else 0.0,
    )
    stored, loaded = (n * host[kind] * a_hop / bus.host_memory for kind in ("written", "read"))
    least = {
        "send": max(out / bus.rate, stored),
        "mean": max((out + asked) / bus.rate, into, stored + loaded),
        "land": max(asked / bus.rate, into, loaded),
    }
    return {name: max(seconds, least[name]) for name, seconds in found.items()}


def exchange(row: Row, bus: Bus, values: int, ctas: int = CTAS) -> float:
    """Return the seconds of a mean in one kernel."""
    parts = one_kernel(row, bus, values, ctas)
    waits = len(parts) - 1
    return LAUNCH + sum(parts.values()) + waits * (bus.release + bus.signal)


def ring(bus: Bus, size: int, n: int = GPUS) -> float:
    """Return the seconds of NCCL's all-reduce of `size` bytes."""
    return BASE + 2 * (n - 1) * bus.step + 2 * (n - 1) / n * size / bus.nccl


def three_kernels(rows: Sequence[Row], name: str, row_bytes: int, bus: Bus, values: int, n: int = GPUS) -> float:
    """Return the seconds of the compressed mean by kernels apart, over NCCL.

    Args:
        rows: predictions of kernels, from bench/results/roofline-predicted.json.
        row_bytes: of a packed shard.
    """
    moved = {"compress": 6.0, "average 8 rows": 18.0, "decompress": 6.0}  # of bf16, at the speed of a copy
    seconds = {part: each / H100.copy for part, each in moved.items()}
    for each in rows:
        if each["family"] == name and each["name"] in seconds and each["dtype"] == "fp32":
            seconds[each["name"]] = each["bytes"] / each[H100.name]["share"] / H100.copy
    kernels = (seconds["compress"] + seconds["decompress"]) * values + seconds["average 8 rows"] * values / n
    sent = 2 * (n - 1) * row_bytes / bus.nccl
    return 3 * LAUNCH + kernels + sent + 2 * BASE + bus.step + (n - 1) * bus.step
