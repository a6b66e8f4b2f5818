"""Speed of mixing and landing, next to a copy of the same values: `pytest --benchmark bench/bench_mixing.py`

Every result is checked before it is timed. A GPU takes 64 Mi values, a CPU 16 Mi on one thread. The peers are the
definition as it is written, and what `torch.compile` makes of it.
"""

import pytest
import torch
from torch import Tensor

from baguakit.kernels import mixing
from bench.measuring import DEVICE, GPU, as_defined, measure
from bench.speed import CHECKED, Operation, Work, drawn, operations

N = (64 if GPU else 16) << 20
pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, while it compiles


def land_(x: Tensor, result: Tensor, before: Tensor) -> None:
    x.copy_(torch.where(x == before, result, x + (result - before)))


def by_torch_compile(name: str) -> Work:
    x, *others = (drawn(N, DEVICE, seed).clone() for seed in range(3 if name == "land" else int(name.split()[1])))
    weights = [1 / (1 + len(others))] * (1 + len(others))
    compiled = torch.compile(land_ if name == "land" else lambda a, *b: mixing.mix_(a, b, weights), dynamic=False)
    return lambda: compiled(x, *others)


@pytest.mark.parametrize("how", ["ours", "eager definition", "torch.compile"])
@pytest.mark.parametrize("operation", [each for each in operations() if each.family == "mixing"], ids=lambda x: x.name)
def bench_mixing(benchmark, operation: Operation, how: str):
    assert operation.is_right(CHECKED, DEVICE)
    ours = operation.ready(N, DEVICE)
    ways = {"ours": lambda: ours, "eager definition": lambda: as_defined(ours)}
    work = ways.get(how, lambda: by_torch_compile(operation.name))()
    measure(benchmark, work, N, operation.bytes(N), 15 if how == "ours" else 5)
