"""The page bench/exchange/README.md."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from baguakit.comm.symmetric import MOST
from bench.predicted.model import H100
from bench.predicted.table import NAME

from . import __doc__ as about
from .buses import BASE, BUSES, CTAS, GPUS, LAUNCH, STAGED, Bus, exchange, one_kernel, ring, three_kernels
from .counting import CODECS, HOST_READ
from .node import wire_of

PAGE = Path(__file__).parent / "README.md"
RESULTS = Path(__file__).parents[1] / "results"
COUNTS = RESULTS / "exchange-counts.jsonl"
ORDERS, FAULTS = RESULTS / "exchange-orders.jsonl", RESULTS / "exchange-faults.jsonl"
SIZES = (1, 16, 64)  # MiB of fp32
SOME = (8, 16, 32, 64)  # CTAs
HEAD = """# Exchanges in one kernel

This page is written by `python -m bench.exchange` from the lines of JSON in `bench/results/`; do not edit it.

"""
WHICH = """## What goes in one kernel

With `bk.Comm(kernels=True)`, on NVIDIA's GPUs of one node, or between those of each node with a mesh:

| | exact: fp32, bf16, fp16 | packed by `MinMaxUInt8`, `UInt4`, `UInt2`, `Sign`, `Float8`, or cast |
|---|---|---|
| `mean_`, `compressed_mean_`, and stages of them | added in fp32, in the order of ranks | in one or two hops |
| `compressed_all_gather` | fp64, too: byte for byte | yes |
| `compressed_reduce_scatter` | added in fp32, in the order of ranks | yes, with `residual` |
| `compressed_all_to_all`, also with splits | fp64, too: byte for byte | yes |
| `neighbor_mean_`, and stages of it | in memory of its own: ranks wait for their neighbours only | |
| `Hierarchical`, to scatter and to gather in each node | as above | |

Results are those over NCCL, but for exact sums, which NCCL adds in another order and in the dtype of the values.
`report()` says "in one kernel". All else goes over NCCL: formats that round at random, sparse and low-rank ones, your
own; sums of fp64; messages of `push_sum`, `exact_diffusion` and compressed gossip; and what needs more memory.

* With splits, no rank knows how long the others' parts are. So the first such all-to-all asks all ranks, and makes room
  for twice the longest part. A longer part is left to NCCL by the two ranks that send and receive it.
* A CUDA graph repeats an exchange, with the same neighbours and weights. It would repeat splits, and weights that a
  call names itself, too, though they may vary: capturing such a call is refused.
* `bk.tune.probe` runs means, shards and a round of neighbours in one kernel, and `plan` costs them by their own lines.
"""
COUNTED = """## Counted by the executor

Whole tiles, fp32 in and out, no residual. *Device* is what memory of a rank's device moves if each sector of 32 bytes
moves once, arriving rows included; *asked* are all sectors that instructions ask for. *Bus* is what a rank sends to all
others together: bytes, sectors, and packets (what a warp's instruction stores in a line of 128 bytes), which say how
full they are; rows begin with lines. A signal is a packet of four bytes; one warp of a program writes those to all
ranks. Without peer access all memory is on the host: *to* and *from the host* are the bytes that a rank stores there
and loads from there.

A mean is one launch, and so is any other exchange. A flight, without the flags of an attached model, launches the
following. Operators are those of torch. The five exchanges are an all-gather, a reduce-scatter, an all-to-all of equal
parts, one with splits, and a mean of neighbours; their operators make tensors and, for splits, a table.

    {flights}
"""
COUNTS_HEAD = (
    "format", "ranks", "hops", "device, B a value", "asked", "bus, B a value", "sectors", "packets", "B a packet",
    "to the host", "from the host", "signals of a CTA", "registers", "launches",
)  # fmt: skip
PREDICTED = """## *Predicted*: {gpus} GPUs

Microseconds of a mean over {gpus} GPUs of 1, 16 and 64 MiB in fp32: in one kernel of {ctas} CTAs, and in two hops
if nothing else is said; and by three kernels with NCCL between them, or by NCCL's ring if it is exact. *Bound by* is
what takes longest at 64 MiB in each phase, which are to send, to average and to store: the bus, or the CTAs.

`Comm(kernels=True)` leaves to NCCL what needs a half of more than {most} MiB, and nothing else because of its size: a
Comm does not know its bus. Where a list below names less than all formats, NCCL is *predicted* to be faster with the
others. There compare with `kernels=False`: `bk.tune.probe` measures a Comm of either kind on the machine at hand.
"""
ASSUMED = """Assumptions, none of them measured here:

* Multiprocessors are those of an H100 at {clock:.2f} GHz. A CTA has one for itself; the phases of its machine code are
  simulated clock by clock, a tile after another, with loops that are not unrolled (`bench.predicted`).
* PCIe has 16 lanes for each GPU, both ways at once, no switch or socket in between is narrower, and a packet takes 24
  bytes besides: framing, header and checksum. NVLink has 450 GB/s each way, and 32 bytes besides.
* NCCL fills packets of 128 bytes; its latencies are those of its own tuning: {base:.1f} µs a call and
  {pcie:.1f} µs (NVLink: {nvlink:.1f} µs) a step of a ring with the protocol Simple.
* Without peer access, NCCL moves {staged:.1f} GB/s: others measured it with two GPUs on PCIe 4.0 x16 (sglang#39605),
  where copies reached 26 GB/s. It stands for PCIe 5.0, too. A load from the host takes {read:.1f} µs, and nothing is
  cached. Why NCCL's loads are so slow is not known: the fourth table is for a machine on which ours are no faster.
* Memory of the host moves {ddr4:.0f} GB/s (PCIe 5.0: {ddr5:.0f}), reads and writes of all ranks together: 80 % of
  eight channels of DDR4-3200 (twelve of DDR5-4800) of one socket.
* A program signals all ranks at once, when its stores have arrived, which takes {release} µs
  (NVLink: {nvlink_release}). The last signal is seen after {signal} µs (host: {host_signal}, NVLink: {nvlink_signal}).
  Polls cost nothing, though each warp reads a word of every rank, on the host over the bus.
* A launch takes {launch:g} µs, and all ranks begin at once. Kernels apart have the whole GPU; a mean in one kernel
  leaves all but its CTAs to the backward beside it.
"""


ORDERED = """## Orders that were tried

In each order of programs every result had the bytes of the definition, and no race, wrong signal or wait without end
was found. A line sums the cases of a test that passed; seconds are those of a CPU, on a busy machine. Written by

    EXECUTED_ORDERS=bench/results/exchange-orders.jsonl scripts/test --ptx 90 -m "" \\
        tests/kernels/test_executed_{exchange,rows,orders,rows_orders}.py
"""
PLANTED = """## Faults that were planted

Each is planted in a copy of the kernels, which then run in drawn orders on sm_90. It is found if an access that nothing
orders, a wrong signal or a wait without end is reported. Where the right bytes come in most orders, a comparison of
results would not find it. The faults are those of `tests/kernels/misordered.py` (means) and `misordered_rows.py`
(other exchanges). Written by

    EXECUTED_FAULTS=bench/results/exchange-faults.jsonl scripts/test --ptx 90 -m "" \\
        tests/kernels/test_executed_misordered{,_rows}.py
"""


def write(counts: Path = COUNTS, page: Path = PAGE) -> Path:
    """Write the page from the counts in a file, and return its path."""
    found = read(counts)
    rows = [each for each in found if "ranks" in each]
    kernels = json.loads((RESULTS / f"{NAME}.json").read_text())["rows"]
    [launched] = [each["flights"] for each in found if "flights" in each]
    said = "\n    ".join(
        f"{case}: {', '.join(f'{n} {name if n != 1 else name[:-1]}' for name, n in each.items())}"
        for case, each in launched.items()
    )
    parts = [HEAD + str(about).partition("\n\n")[2], WHICH, COUNTED.format(flights=said), counted(rows)]
    parts += [ORDERED, ordered(read(ORDERS)), PLANTED, planted(read(FAULTS))]
    parts.append(PREDICTED.format(gpus=GPUS, ctas=CTAS, most=MOST >> 20))
    for bus in BUSES:
        parts += [f"### {bus.name}\n", predicted(rows, kernels, bus), faster(rows, kernels, bus) + "\n"]
    parts += [f"With fewer and more CTAs, 64 MiB:\n\n{by_ctas(rows)}\n", assumed()]
    page.write_text("\n".join(parts))
    return page


def read(counts: Path = COUNTS) -> list[dict[str, Any]]:
    """Return the lines of a file of counts."""
    return [json.loads(line) for line in counts.read_text().splitlines()]


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|", *(f"| {' | '.join(row)} |" for row in rows)]
    return "\n".join([*lines, ""])


def counted(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the table of counts."""
    lines = []
    for row in sorted(rows, key=lambda row: [*CODECS].index(row["format"])):
        bus, host = row["bus"], row["host"]
        lines.append(
            [
                row["format"], f"{row['ranks']}", "1" if row["one_hop"] else "2", f"{row['device']:.2f}",
                f"{row['requested']:.2f}", f"{bus['bytes']:.3f}", f"{bus['sectors']:.4f}", f"{bus['packets']:.4f}",
                f"{bus['bytes'] / bus['packets']:.0f}", f"{host['written']:.2f}", f"{host['read']:.2f}",
                f"{row['signals']}", f"{row['registers']}", f"{row['launches']}",
            ]
        )  # fmt: skip
    return table(COUNTS_HEAD, lines)


def ordered(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the table of orders, by test and architecture; of a case that ran twice, the latest run counts."""
    latest = {(row["test"], row["arch"]): row for row in rows}
    sums: dict[tuple[str, int], Counter[str]] = {}
    names = ("cases", "orders", "exchanges", "turns", "seconds")
    for (test, arch), row in latest.items():
        sums.setdefault((test.partition("[")[0], arch), Counter()).update({"cases": 1} | {n: row[n] for n in names[1:]})
    lines = [
        [f"`{test}`", f"{arch}", *(f"{each[n]:,.0f}" for n in names)] for (test, arch), each in sorted(sums.items())
    ]
    return table(("test", "sm", *names), lines)


def planted(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the table of faults that were planted; those that a comparison would find least come first."""
    lines = [
        [row["fault"], ", ".join(f"`{kind}`" for kind in row["kinds"]), f"{row['found']}", f"{row['right']}"]
        for row in sorted(rows, key=lambda row: -row["right"])
    ]
    return table(("fault", "found as", f"found in, of {rows[0]['of']} orders", "right bytes in"), lines)


def of(rows: Sequence[Mapping[str, Any]], name: str, one_hop: bool) -> Mapping[str, Any]:
    [found] = [row for row in rows if (row["format"], row["ranks"], row["one_hop"]) == (name, GPUS, one_hop)]
    return found


def apart(kernels: Sequence[Mapping[str, Any]], name: str, bus: Bus, values: int) -> float:
    """Return the seconds of the same mean by kernels apart, over NCCL."""
    if CODECS[name] is None:
        return ring(bus, 4 * values)
    return three_kernels(kernels, name, wire_of(CODECS[name]).row_bytes(-(-values // GPUS)), bus, values)


def predicted(rows: Sequence[Mapping[str, Any]], kernels: Sequence[Mapping[str, Any]], bus: Bus) -> str:
    """Return the table of a bus."""
    head = ["*predicted* µs", "1 MiB, one hop"]
    for size in SIZES:
        head += [f"{size} MiB, one kernel", "over NCCL"]
    lines = []
    for name in CODECS:
        line = [name, _us(exchange(of(rows, name, True), bus, SIZES[0] << 18))]
        for size in SIZES:
            line += [_us(exchange(of(rows, name, False), bus, size << 18)), _us(apart(kernels, name, bus, size << 18))]
        lines.append([*line, bound(of(rows, name, False), bus, SIZES[-1] << 18)])
    return table([*head, "bound by"], lines)


def faster(rows: Sequence[Mapping[str, Any]], kernels: Sequence[Mapping[str, Any]], bus: Bus) -> str:
    """Name, for each size, the formats that take less time in one kernel, in as many hops as are best."""
    said = []
    for size in SIZES:
        values = size << 18
        names = [
            name
            for name in CODECS
            if min(exchange(of(rows, name, one_hop), bus, values) for one_hop in (False, True))
            < apart(kernels, name, bus, values)
        ]
        whole = "all" if len(names) == len(CODECS) else ", ".join(names) or "none"
        said.append(f"{size} MiB: {whole}")
    return f"Faster in one kernel: {'; '.join(said)}."


def bound(row: Mapping[str, Any], bus: Bus, values: int) -> str:
    """Say for each phase whether its computing or the bus takes longer: "CTAs, bus, CTAs"."""
    free = replace(bus, rate=float("inf"), host_memory=float("inf") if bus.on_host else 0.0, reads=0.0)
    parts, alone = one_kernel(row, bus, values), one_kernel(row, free, values)
    return ", ".join("bus" if parts[name] > alone[name] else "CTAs" for name in parts)


def by_ctas(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the table of other numbers of CTAs."""
    chosen = [bus for bus in BUSES if not bus.reads]
    head = ["*predicted* µs of 64 MiB, by CTAs", *(f"{bus.name}: {', '.join(map(str, SOME))}" for bus in chosen)]
    return table(
        head,
        [
            [
                name,
                *(
                    ", ".join(_us(exchange(of(rows, name, False), bus, 64 << 18, ctas)) for ctas in SOME)
                    for bus in chosen
                ),
            ]
            for name in CODECS
        ],
    )


def assumed() -> str:
    peer, host, nvlink = BUSES[0], BUSES[2], BUSES[-1]
    fast = next(bus for bus in BUSES[::-1] if bus.on_host)
    return ASSUMED.format(
        clock=H100.clock / 1e9, base=BASE * 1e6, pcie=peer.step * 1e6, nvlink=nvlink.step * 1e6, staged=STAGED / 1e9,
        read=HOST_READ * 1e6, ddr4=host.host_memory / 1e9, ddr5=fast.host_memory / 1e9, signal=f"{peer.signal * 1e6:g}",
        release=f"{peer.release * 1e6:g}", nvlink_release=f"{nvlink.release * 1e6:g}",
        host_signal=f"{host.signal * 1e6:g}", nvlink_signal=f"{nvlink.signal * 1e6:g}", launch=LAUNCH * 1e6,
    )  # fmt: skip


def _us(seconds: float) -> str:
    return f"*{seconds * 1e6:,.0f}*"
