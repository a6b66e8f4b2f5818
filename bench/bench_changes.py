"""Speed of `bk.sync.changes` and `apply_`, next to a copy: `pytest --benchmark bench/bench_changes.py`

A share of bf16 values moves to a neighbour, as in a step of fine-tuning; what was packed must give them back, bit for
bit. A GPU takes 64 Mi values, a CPU 32 Mi on one thread. `beside` is the time of a copy in times of the operation; a
copy reads one tensor and writes one, and `changes` reads two, and writes the lines of memory with changes.
"""

import itertools

import pytest
import torch

import baguakit as bk
from bench.measuring import DEVICE, GPU, measure

N = (64 if GPU else 32) << 20


@pytest.mark.parametrize("share", [0.005, 0.01, 0.03, 0.05])
@pytest.mark.parametrize("name", ["changes", "apply_"])
def bench_changes(benchmark, name: str, share: float):
    source = torch.Generator().manual_seed(0)
    one = torch.randn(N, generator=source).bfloat16()
    other = one.clone()
    other.view(torch.int16).add_(torch.rand(N, generator=source) < share)
    ends, x = [one.to(DEVICE), other.to(DEVICE)], one.to(DEVICE, copy=True)
    packed = []
    for end in (ends[1], ends[0]):
        before = x.clone()
        packed.append(bk.sync.changes(end, x))
        assert torch.equal(x, end) and torch.equal(bk.sync.apply_(before, packed[-1]), end)
    turns = itertools.cycle(zip((ends[1], ends[0]), packed, strict=True))  # there and back: as many values change

    def work() -> None:
        end, changed = next(turns)
        if name == "changes":
            bk.sync.changes(end, x)
        else:
            bk.sync.apply_(x, changed)

    count = round(2 * N * (2 + share)) if name == "changes" else round(4 * N * share)
    measure(benchmark, work, N // 2, count + len(packed[0]))
    benchmark.extra_info["beside"] = f"{benchmark.extra_info['share_of_copy_in_values']:.2f} of the speed of a copy"
