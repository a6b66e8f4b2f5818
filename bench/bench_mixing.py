"""Speed of mixing and landing, next to a copy of the same values: `pytest --benchmark bench/bench_mixing.py`

Every result is checked before it is timed. A GPU takes 64 Mi values, a CPU 16 Mi on one thread. The peers are the
definition as it is written, and what `torch.compile` makes of it.
"""

import pytest

from bench.measuring import GPU, measure
from bench.operations import Ready, land, mix

N = (64 if GPU else 16) << 20
pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, while it compiles


def bench(benchmark, ready: Ready, how: str) -> None:
    ready.check()
    measure(benchmark, ready.work if how == "ours" else ready.peers[how], N, ready.bytes, 15 if how == "ours" else 5)


ways = pytest.mark.parametrize("how", ["ours", "eager definition", "torch.compile"])


@ways
@pytest.mark.parametrize("others", [1, 2, 8])
def bench_mix(benchmark, others, how):
    bench(benchmark, mix(N, others), how)


@ways
def bench_land(benchmark, how):
    bench(benchmark, land(N), how)
