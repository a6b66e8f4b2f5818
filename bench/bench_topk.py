"""Speed of finding the k largest values of chunks: `pytest --benchmark bench/bench_topk.py`

The result is checked against the definition. A GPU takes 64 Mi values, a CPU 16 Mi on one
thread, and 1 % of each chunk is kept. The peers find the same places and values with `torch.topk` (but of equals any),
as it is and under `torch.compile`, and with `torch.sort`; they do not pack them. `bytes` is what must be moved: a
reading of the values, and the result.
"""

import pytest
import torch
from torch import Tensor

from baguakit.compressors import TopK
from bench.measuring import DEVICE, GPU, Work, measure
from bench.speed import CHECKED, RATIO, drawn, operations

N = (64 if GPU else 16) << 20
KEEP = {each.name: each for each in operations() if each.family == "top-k"}
pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, while it compiles


def peers(residual: bool) -> dict[str, Work]:
    compressor = TopK(RATIO)
    x = drawn(N, DEVICE).view(-1, compressor.chunk)
    k, lost = compressor.kept(compressor.chunk), torch.empty_like(x)

    def found(places: Tensor) -> tuple[Tensor, Tensor]:
        places = places.sort().values
        if residual:
            lost.copy_(x).scatter_(1, places, 0.0)
        return places.int(), x.gather(1, places)

    def by_topk() -> tuple[Tensor, Tensor]:
        return found(x.abs().topk(k, sorted=False).indices)

    def by_sort() -> tuple[Tensor, Tensor]:
        return found(x.abs().sort(descending=True, stable=True).indices[:, :k])

    return {"torch.topk": by_topk, "torch.sort": by_sort, "torch.compile of torch.topk": torch.compile(by_topk)}


@pytest.mark.parametrize("name", KEEP)
@pytest.mark.parametrize("how", ["ours", "torch.topk", "torch.sort", "torch.compile of torch.topk"])
def bench_topk(benchmark, how, name):
    assert KEEP[name].is_right(CHECKED, DEVICE)
    work = KEEP[name].ready(N, DEVICE) if how == "ours" else peers("residual" in name)[how]
    measure(benchmark, work, N, KEEP[name].bytes(N), 15 if how == "ours" else 3)
