"""How fast are the codec's operations, beside a copy of the same values? `pytest bench/bench_codec.py --benchmark-only`

Every result is checked before it is timed. A GPU takes 64 Mi values, a CPU 10 Mi on one thread. `extra_info` holds the
bytes that an operation must read and write, its GB/s, and the share it reaches of the speed of the copy, timed in the
same run: in bytes (of the copy's GB/s), and in values (the time to copy the fp32 values over the time taken).
"""

import functools
import statistics
import time
from collections.abc import Callable

import pytest
import torch

from baguakit.compressors import MinMaxUInt8
from baguakit.kernels import _compiled
from baguakit.kernels import minmax_uint8 as definition

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
N = (64 if GPU else 10) << 20
ROWS = 8  # virtual ranks
CODEC = MinMaxUInt8()
PACKED = CODEC.row_bytes(N)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    CODEC.warm_up(DEVICE)
    yield
    torch.set_num_threads(before)


@functools.cache
def values() -> torch.Tensor:
    return torch.randn(1, N, generator=torch.Generator().manual_seed(0)).to(DEVICE)


@functools.cache
def packed_rows() -> torch.Tensor:
    return torch.cat([CODEC.compress(values() * (row + 1)) for row in range(ROWS)])


def seconds(work: Callable[[], object], repeats: int = 15) -> float:
    """The median time of one call: by CUDA events on a GPU, by the clock elsewhere."""
    work()
    taken = []
    for _ in range(repeats):
        if GPU:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            work()
            end.record()
            end.synchronize()
            taken.append(begin.elapsed_time(end) / 1e3)
        else:
            begin_at = time.perf_counter()
            work()
            taken.append(time.perf_counter() - begin_at)
    return statistics.median(taken)


def measure(benchmark, work: Callable[[], object], count: int, repeats: int = 15) -> None:
    """Time `work`, which must move `count` bytes, against a copy timed before and after it."""
    target = torch.empty_like(values())
    copy = functools.partial(target.copy_, values())
    copies = [seconds(copy)]
    taken = seconds(work, repeats)
    copies.append(seconds(copy))
    copied = statistics.mean(copies)
    benchmark.pedantic(work, rounds=3, iterations=1, warmup_rounds=0)
    benchmark.extra_info |= {
        "device": torch.cuda.get_device_name() if GPU else "CPU, one thread",
        "values": N,
        "bytes": count,
        "milliseconds": round(taken * 1e3, 3),
        "gb_per_s": round(count / taken / 1e9, 2),
        "copy_gb_per_s": round(8 * N / copied / 1e9, 2),
        "share_of_copy_in_bytes": round(count / taken / (8 * N / copied), 3),
        "share_of_copy_in_values": round(copied / taken, 3),
    }
    info = benchmark.extra_info
    print(
        f"\n{benchmark.name}: {info['milliseconds']} ms, {info['gb_per_s']} GB/s; copy {copied * 1e3:.3f} ms; share",
        end=" ",
    )
    print(f"{info['share_of_copy_in_bytes']:.2f} in bytes, {info['share_of_copy_in_values']:.2f} in values")


def expected(work: Callable[[], torch.Tensor]) -> torch.Tensor:
    """What the definition gives, as it is written, on the CPU."""
    with _compiled.eager():
        return work()


eager_or_not = pytest.mark.parametrize("how", ["codec"] + ([] if GPU else ["eager definition"]))


def repeats_for(how: str) -> int:
    return 15 if how == "codec" else 3


def as_asked(how: str, work: Callable[[], object]) -> Callable[[], object]:
    def eagerly():
        with _compiled.eager():
            return work()

    return work if how == "codec" else eagerly


def bench_copy(benchmark):
    target = torch.empty_like(values())
    assert torch.equal(target.copy_(values()), values())
    measure(benchmark, lambda: target.copy_(values()), 8 * N)


@eager_or_not
@pytest.mark.parametrize("residual", [False, True], ids=["", "residual"])
def bench_compress(benchmark, how, residual):
    lost = torch.empty_like(values()) if residual else None
    packed = CODEC.compress(values(), lost)
    assert torch.equal(packed.cpu(), expected(lambda: definition.compress(values().cpu(), CODEC.block)))
    assert lost is None or torch.equal(lost, values() - CODEC.decompress(packed, N))
    work = as_asked(how, lambda: CODEC.compress(values(), lost))
    measure(benchmark, work, 4 * N + PACKED + 4 * N * residual, repeats_for(how))


@eager_or_not
def bench_decompress(benchmark, how):
    packed, out, right = packed_rows()[:1], torch.empty_like(values()), torch.empty(1, N)
    with _compiled.eager():
        definition.decompress_(right, packed.cpu(), CODEC.block)
    assert torch.equal(CODEC.decompress(packed, N, out=out).cpu(), right)
    measure(benchmark, as_asked(how, lambda: CODEC.decompress(packed, N, out=out)), PACKED + 4 * N, repeats_for(how))


@eager_or_not
def bench_add(benchmark, how):
    packed, out, right = packed_rows()[:2], torch.zeros(N, device=DEVICE), torch.zeros(N)
    weights = torch.tensor([0.25, 0.5], device=DEVICE)
    with _compiled.eager():
        definition.add_(right, packed.cpu(), weights.cpu(), CODEC.block)
    assert torch.equal(CODEC.add_(out, packed, weights).cpu(), right)
    measure(benchmark, as_asked(how, lambda: CODEC.add_(out, packed, weights)), 2 * PACKED + 8 * N, repeats_for(how))


@eager_or_not
def bench_reduce(benchmark, how):
    packed = packed_rows()
    assert torch.equal(CODEC.reduce(packed, N).cpu(), expected(lambda: definition.reduce(packed.cpu(), N, CODEC.block)))
    measure(benchmark, as_asked(how, lambda: CODEC.reduce(packed, N)), (ROWS + 1) * PACKED, repeats_for(how))
