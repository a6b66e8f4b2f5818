"""Speed of finding the k largest values of chunks: `pytest --benchmark bench/bench_topk.py`

The result is checked against a stable sort of each chunk by magnitude. A GPU takes 64 Mi values, a CPU 16 Mi on one
thread, and 1 % of each chunk is kept. The peers find the same places and values with `torch.topk` (but of equals any),
as it is and under `torch.compile`, and with `torch.sort`; they do not pack them. `bytes` is what must be moved: a
reading of the values, and the result.
"""

import pytest

from bench.measuring import GPU, measure
from bench.operations import top_k

N = (64 if GPU else 16) << 20
pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, while it compiles


@pytest.mark.parametrize("residual", [False, True], ids=["", "residual"])
@pytest.mark.parametrize("how", ["ours", "torch.topk", "torch.sort", "torch.compile of torch.topk"])
def bench_topk(benchmark, how, residual):
    ready = top_k(N, residual)
    ready.check()
    work = ready.work if how == "ours" else ready.peers[how]
    measure(benchmark, work, N, ready.bytes, 15 if how == "ours" else 3)
