"""Time of an optimizer step in one launch or call, next to torch's own: `pytest --benchmark bench/bench_steps.py`

AdamW over one large tensor, over 1,000 tensors of 10,000 values, and with gradients packed in 8 bits; and the host's
time for 1,000 tensors. Every result is checked against torch in fp64 before it is timed. A GPU takes 512 Mi values; a
CPU takes 4 Mi on one thread. `extra_info` holds the bytes that a step must move, its GB/s, and the share it reaches of
the GB/s of a copy timed in the same run.
"""

import functools
import statistics
import time
from collections.abc import Callable
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor, nn

from baguakit.compressors import MinMaxUInt8
from baguakit.kernels.steps import operators as steps_ops
from baguakit.primitives import adamw_step_, gradient_norm
from bench.measuring import DEVICE, GPU, seconds

N = 512 << 20 if GPU else 4 << 20
MANY = [10_000] * 1000 if GPU else [1000] * 1000
RATE = 1e-3


def host_seconds(work: Callable[[], object], repeats: int = 50) -> float:
    """The median time until a call returns, whatever the device still does."""
    work()
    taken = []
    for _ in range(repeats):
        begin = time.perf_counter()
        work()
        taken.append(time.perf_counter() - begin)
        if GPU:
            torch.cuda.synchronize()
    return statistics.median(taken)


@functools.cache
def copy_speed() -> float:
    """Bytes read and written a second, of a large copy."""
    a = torch.zeros(N, device=DEVICE)
    b = torch.empty_like(a)
    return 8 * N / seconds(lambda: b.copy_(a))


def tensors(sizes: list[int]) -> tuple[list[Tensor], ...]:
    """Weights, gradients that are views of one bucket, and two states of zeros."""
    p = [torch.randn(n, device=DEVICE) for n in sizes]
    bucket = torch.randn(sum(sizes), device=DEVICE)
    m, v = ([torch.zeros(n, device=DEVICE) for n in sizes] for _ in range(2))
    return p, list(bucket.split(sizes)), m, v


def torchs(p: list[Tensor], g: list[Tensor], **code: bool) -> torch.optim.Optimizer:
    params = [nn.Parameter(x) for x in p]
    for q, grad in zip(params, g, strict=True):
        q.grad = grad
    return torch.optim.AdamW(params, lr=RATE, **code)


def check() -> None:
    """A step of small tensors is torch's in fp64."""
    p, g, m, v = tensors([3000, 1, 70])
    exact = torchs([x.double() for x in p], [x.double() for x in g])
    exact.step()
    adamw_step_(p, g, m, v, 0, lr=RATE)
    for x, q in zip(p, exact.param_groups[0]["params"], strict=True):
        assert (x.double() - q.detach()).abs().max() <= 4 * 2.0**-24 * float(q.detach().abs().max().clamp(min=1))


def rivals(p: list[Tensor], g: list[Tensor]) -> dict[str, Callable[[], object]]:
    """The same step by others, where they are installed."""
    found: dict[str, Callable[[], object]] = {
        "torch fused": torchs(p, g, fused=True).step,
        "torch foreach": torchs(p, g, foreach=True).step,
    }
    if GPU and find_spec("apex"):
        from apex.optimizers import FusedAdam

        found["apex"] = FusedAdam(torchs(p, g).param_groups[0]["params"], lr=RATE).step
    if GPU and find_spec("bitsandbytes"):
        import bitsandbytes

        found["bitsandbytes"] = bitsandbytes.optim.AdamW32bit(torchs(p, g).param_groups[0]["params"], lr=RATE).step
    return found


def report(benchmark, work: Callable[[], object], values: int, bytes_a_value: float, others: dict) -> None:
    taken, count = seconds(work), values * bytes_a_value
    benchmark.extra_info |= {
        "device": torch.cuda.get_device_name() if GPU else "CPU, one thread",
        "values": values,
        "bytes": int(count),
        "milliseconds": round(taken * 1e3, 4),
        "gb_per_s": round(count / taken / 1e9, 2),
        "share_of_copy": round(count / taken / copy_speed(), 3),
    }
    ratios = {name: round(seconds(other) / taken, 3) for name, other in others.items()}
    benchmark.extra_info |= {f"times_as_fast_as_{name}": ratio for name, ratio in ratios.items()}
    peers = "".join(f"; {ratio:.2f} times as fast as {name}" for name, ratio in ratios.items())
    benchmark.extra_info["beside"] = f"{benchmark.extra_info['share_of_copy']:.2g} of a copy{peers}"
    benchmark.pedantic(work, rounds=3)
    print(f"\n{benchmark.name}: {benchmark.extra_info}")


@pytest.fixture(autouse=True)
def checked():
    check()
    yield
    steps_ops.TABLES.tables.clear()


@pytest.mark.parametrize("sizes", [[N], MANY], ids=["one large", "1,000 small"])
def bench_adamw(benchmark, sizes):
    p, g, m, v = tensors(sizes)
    report(benchmark, lambda: adamw_step_(p, g, m, v, 0, lr=RATE), sum(sizes), 28, rivals(p, g))


def bench_adamw_of_packed_gradients(benchmark):
    """25 bytes a value, beside decompressing into fp32 and then stepping: 33."""
    (p,), (g,), (m,), (v,) = tensors([N])
    codec = MinMaxUInt8()
    packed = codec.compress(g.view(1, -1))
    q, qm, qv = p.clone(), m.clone(), v.clone()
    adamw_step_(p, None, m, v, 0, lr=RATE, packed=packed, compressor=codec)
    adamw_step_(q, codec.decompress(packed, N)[0], qm, qv, 0, lr=RATE)
    assert torch.equal(p, q) and torch.equal(m, qm) and torch.equal(v, qv)
    out = g.view(1, -1)

    def two_passes() -> None:
        codec.decompress(packed, N, out=out)
        adamw_step_(p, g, m, v, 0, lr=RATE)

    work = functools.partial(adamw_step_, p, None, m, v, 0, lr=RATE, packed=packed, compressor=codec)
    report(benchmark, work, N, 24 + packed.numel() / N, {"decompress, then step": two_passes})


def bench_norm(benchmark):
    _, g, _, _ = tensors(MANY)
    exact = torch.cat(g).double().norm().float()
    assert torch.equal(gradient_norm(g), exact)
    norms = {"torch": lambda: torch.nn.utils.get_total_norm(g, foreach=True)}
    report(benchmark, lambda: gradient_norm(g), sum(MANY), 4, norms)


def bench_host(benchmark):
    """Time the host's work for 1,000 tensors. On a CPU, time only the search for their table."""
    p, g, m, v = tensors([100] * 1000)
    columns = {"p": p, "g": g, "u": m, "v": v}
    find = functools.partial(steps_ops.tables_for, columns, None, lambda: columns)
    work = (lambda: adamw_step_(p, g, m, v, 0, lr=RATE)) if GPU else find
    benchmark.extra_info |= {"device": torch.cuda.get_device_name() if GPU else "CPU, one thread: the table alone"}
    taken = round(host_seconds(work) * 1e3, 4)
    benchmark.extra_info |= {
        "milliseconds_of_the_host": taken,
        "milliseconds": taken,
        "beside": "of the host, 1,000 tensors",
    }
    benchmark.pedantic(work, rounds=3)
    print(f"\n{benchmark.name}: {benchmark.extra_info}")
