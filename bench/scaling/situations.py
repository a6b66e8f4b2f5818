"""Steps that `bk.tune.predict` predicts for the situations in docs: `python -m bench.scaling.situations`.

Nothing here is measured. The networks are described, and every assumption is one of the constants below; the tables are
those of docs/situations/no_nvlink.md and docs/situations/ethernet.md, which a test keeps equal to what this prints.

    no NVLink    8 GPUs, a model of 1.2 × 10⁹ values in fp32 that computes for 1.4 s on one GPU. At `FITTED` bytes a
                 second a step takes about what was published for it: 6.4 s with fp32 and 3.6 s with bf16 gradients.
    Ethernet     8 machines of one GPU each, and 4 machines of 8 GPUs that share the machine's interface.

In all of them forward takes a third of the computation, kernels move `MEMORY` bytes a second, and an exchange of shards
gets as much of the link as an all-reduce does.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

import baguakit as bk
from baguakit.compressors import BFloat16, Float8, MinMaxUInt8, UInt4
from baguakit.tune import Compute, Line, Network, predict

from .model import cluster, codec

ALPHA, MEMORY, LAUNCH = 20e-6, 350e9, 20e-6  # half of the 696 GB/s that the memory of an A40 has on paper
FITTED = 1.5e9  # from 6.4 s and 3.6 s: 2.8 s for 4.2 GB fewer
PCIE = (1.5e9, 3e9, 6e9, 12e9, 24e9)  # bytes a second of each rank
WITHIN = 20e9  # bytes a second between the GPUs of a machine
ETHERNET = (1, 10, 25, 100)  # Gb/s
EFFICIENCY = 0.9  # of the rate, what payload gets

a = bk.algorithms
FORMATS = {
    "fp32": a.gradient_allreduce(),
    "bf16": a.bytegrad(BFloat16()),
    "`Float8()`": a.bytegrad(Float8()),
    "`UInt4()`": a.bytegrad(UInt4(), error_feedback=True),
}
FLAT = {
    "DDP": a.gradient_allreduce(),
    "DDP, bf16": a.bytegrad(BFloat16()),
    "`bytegrad()`": a.bytegrad(),
    "`bytegrad(UInt4(), error_feedback=True)`": a.bytegrad(UInt4(), error_feedback=True),
    "`choco(OnePeerExact(), gamma=1.0)`": a.choco(bk.topology.OnePeerExact(), gamma=1.0),
    "`local_sgd(8)`": a.local_sgd(8),
}
NODES = {
    "DDP": a.gradient_allreduce(),
    "`bk.hierarchical(gradient_allreduce())`": bk.hierarchical(a.gradient_allreduce()),
    "`bk.hierarchical(bytegrad())`": bk.hierarchical(a.bytegrad()),
}
MACHINES = {
    "`gradient_allreduce()`, a ring": a.gradient_allreduce(),
    "`bytegrad()`": a.bytegrad(),
    "`bk.hierarchical(bytegrad())`": bk.hierarchical(a.bytegrad()),
}
MODELS = {"1.2 B values, 1.4 s": (72, 4096, 1.4), "ResNet-50, 0.18 s": (25, 1011, 64 / 350)}


def model(layers: int, width: int) -> nn.Module:
    """Return matrices of so many values, without memory: only their shapes count."""
    with torch.device("meta"):
        return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))


def network(ranks: int, rate: float, per_node: int = 1) -> Network:
    """Describe a network of GPUs; `rate` is in bytes a second of a rank, or of a node's interface."""
    compressors = (BFloat16(), Float8(), MinMaxUInt8(), UInt4())
    codecs = [replace(codec(MEMORY), name=repr(c)) for c in compressors]
    copy = 2 / MEMORY  # a byte is read and written
    between, within = Line(ALPHA, 1 / rate), Line(ALPHA, 1 / WITHIN)
    return cluster(ranks // per_node, per_node, between, within, codecs, copy=copy, launch=LAUNCH)


def steps(
    algorithms: Mapping[str, bk.rules.Algorithm], shape: tuple[int, int, float], networks: Sequence[Network]
) -> dict[str, list[float]]:
    """Return the seconds of a step of every algorithm on every network."""
    layers, width, seconds = shape
    compute, what = Compute(seconds / 3, 2 * seconds / 3), model(layers, width)
    return {
        name: [predict(algorithm, what, each, compute).seconds for each in networks]
        for name, algorithm in algorithms.items()
    }


def table(head: Sequence[str], rows: Mapping[str, Sequence[float]], digits: int = 2) -> str:
    """Return a table in Markdown, of seconds."""
    lines = [" | ".join(head), "|".join("---" for _ in head)]
    lines += [" | ".join([name, *(f"{s:.{digits}f}" for s in seconds)]) for name, seconds in rows.items()]
    return "\n".join(f"| {line} |" if " | " in line else f"|{line}|" for line in lines)


def no_nvlink() -> str:
    """Return the steps of 8 GPUs, by the rate of their links and the format of gradients."""
    found = steps(FORMATS, MODELS["1.2 B values, 1.4 s"], [network(8, rate) for rate in PCIE])
    rows = {f"{rate / 1e9:g}": [found[name][i] for name in FORMATS] for i, rate in enumerate(PCIE)}
    return table(["GB/s of each GPU", *FORMATS], rows)


def ethernet(name: str) -> str:
    """Return the steps of 8 machines of one GPU, by the rate of their network."""
    there = [network(8, rate * 1e9 / 8 * EFFICIENCY) for rate in ETHERNET]
    return table([name, *(f"{rate} Gb/s" for rate in ETHERNET)], steps(FLAT, MODELS[name], there))


def nodes() -> str:
    """Return the steps of 4 machines of 8 GPUs, by the rate of their network."""
    name = "1.2 B values, 1.4 s"
    there = [network(32, rate * 1e9 / 8 * EFFICIENCY, per_node=8) for rate in ETHERNET]
    return table([name, *(f"{rate} Gb/s" for rate in ETHERNET)], steps(NODES, MODELS[name], there))


def two_machines() -> str:
    """Return the milliseconds of exchange of 22 layers of 4 M values, on 2 machines of 4 GPUs at 10 Gb/s."""
    there = bk.tune.describe(2, 4, EFFICIENCY * 10e9 / 8, within=12e9, within_to_all=6e9, memory=800e9)
    rows: dict[str, list[float]] = {name: [] for name in MACHINES}
    for dtype in (torch.float32, torch.bfloat16):
        planned = bk.tune.plan(model(22, 2000).to(dtype), network=there, algorithms=[*MACHINES.values()][:2])
        for name, algorithm in MACHINES.items():
            rows[name].append(next(1e3 * row.seconds for row in planned.rows if row.algorithm == algorithm))
    return table(["", "fp32", "bf16"], rows, digits=0)


def tables() -> dict[str, list[str]]:
    """Return the tables of each page."""
    return {"no_nvlink": [no_nvlink(), two_machines()], "ethernet": [*map(ethernet, MODELS), nodes()]}


def main() -> int:
    """Print all tables."""
    for page, found in tables().items():
        print(f"docs/situations/{page}.md, seconds of a step, predicted:", *found, sep="\n\n", end="\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
