"""The speed of every operation that has a kernel, next to that of a copy, in about a minute.

    python -m bench.speed

The exit status is 1 if a result is not that of its definition.
"""

import functools
import sys
import time
import timeit
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from unittest.mock import patch

import torch
from torch import Tensor

from baguakit import compressors, primitives
from baguakit.command.screen import Table, say
from baguakit.compressors import Compressor, TopK
from baguakit.compressors.formats import Blockwise
from baguakit.kernels import cpu, operators

ROWS = 8  # packed rows that are averaged
RATIO = 0.01  # what top-k keeps
CHECKED = (1 << 18) + 5  # values on which results are compared with the definition's
TIMED = {"cpu": 1 << 24, "cuda": 1 << 25}  # values: no cache holds them, and so none makes the copy faster
SECONDS = 0.5  # of readings, for each operation
STEPS = {"sgd_step_": (1, {"lr": 1e-3, "momentum": 0.9}), "adamw_step_": (2, {"lr": 1e-3})}  # states, options
Work = Callable[[], Sequence[Tensor]]


@dataclass(frozen=True)
class Operation:
    """An operation on n values in fp32. Its parts are functions of n.

    Attributes:
        family: what has the operation, such as the compressor.
        name: the operation.
        bytes: bytes(n) is how many it must read and write at least.
        ready: ready(n, device) returns a function that does the operation once, and returns the tensors it wrote. A
            result may depend on the results before it.
    """

    family: str
    name: str
    bytes: Callable[[int], int]
    ready: Callable[[int, str], Work]

    def is_right(self, n: int, device: str) -> bool:
        """Return whether the result on a device equals that of the definitions on the CPU, byte for byte."""
        with patch.object(cpu, "functions", return_value=None):
            expected = self.ready(n, "cpu")()
        return all(map(torch.equal, [each.cpu() for each in self.ready(n, device)()], expected))


@functools.lru_cache(maxsize=16)
def drawn(n: int, device: str, seed: int = 0) -> Tensor:
    """Return normally distributed values; as many as are compared are equal on all devices."""
    home = "cpu" if n <= 1 << 20 else device
    random = torch.Generator(home).manual_seed(seed)
    return torch.randn(n, generator=random, dtype=torch.float32, device=home).to(device)


def moves(values: int, rows: int = 0, row_bytes: Callable[[int], int] = int) -> Callable[[int], int]:
    """Return the bytes of so many tensors of n fp32 values and so many packed rows, as a function of n."""
    return lambda n: 4 * values * n + rows * row_bytes(n)


def compress(n: int, device: str, codec: Compressor, residual: bool) -> Work:
    x = drawn(n, device).view(1, n)
    lost = torch.empty_like(x) if residual else None
    return lambda: [each for each in (codec.compress(x, lost), lost) if each is not None]


def changing(call: Callable[[], object], *changed: Tensor) -> Work:
    """Return a function that does `call`, and returns the tensors that `call` changes."""

    def work() -> Sequence[Tensor]:
        call()
        return changed

    return work


def of_format(codec: Blockwise) -> Iterator[Operation]:
    """Yield the operations of a wire format."""

    def decompress(n: int, device: str) -> Work:
        packed = codec.compress(drawn(n, device).view(1, n))
        out = torch.empty(1, n, dtype=torch.float32, device=device)
        return lambda: [codec.decompress(packed, n, out=out)]

    def rows(n: int, device: str, count: int) -> Tensor:
        return torch.cat([codec.compress(drawn(n, device, seed).view(1, n)) for seed in range(count)])

    def add(n: int, device: str) -> Work:
        packed, weights = rows(n, device, 2), torch.tensor([0.25, 0.5], dtype=torch.float32).to(device)
        out = torch.zeros(n, dtype=torch.float32, device=device)
        return lambda: [codec.add_(out, packed, weights)]

    def average(n: int, device: str) -> Work:
        packed = rows(n, device, ROWS)
        return lambda: [codec.reduce(packed, n)]

    family, moved = repr(codec), functools.partial(moves, row_bytes=codec.row_bytes)
    for residual in (False, True):
        packs = functools.partial(compress, codec=codec, residual=residual)
        yield Operation(family, "compress" + ", residual" * residual, moved(1 + residual, 1), packs)
    yield Operation(family, "decompress", moved(1, 1), decompress)
    yield Operation(family, "add 2 rows", moved(2, 2), add)
    yield Operation(family, f"average {ROWS} rows", moved(0, ROWS + 1), average)


def mix(n: int, device: str, others: int) -> Work:
    x, ys = drawn(n, device).clone(), [drawn(n, device, seed + 1) for seed in range(others)]
    return changing(lambda: operators.mix_(x, ys, [1 / (others + 1)] * (others + 1)), x)


def land(n: int, device: str) -> Work:
    result, before = drawn(n, device, 1), drawn(n, device, 2)
    x = torch.where(drawn(n, device, 3) > 0, before, drawn(n, device))
    return changing(lambda: operators.land_(x, result, before, None), x)


def step(n: int, device: str, name: str) -> Work:
    states, options = STEPS[name]
    p, zeros = drawn(n, device).clone(), [torch.zeros_like(drawn(n, device)) for _ in range(states)]
    return changing(lambda: getattr(primitives, name)(p, drawn(n, device, 1), *zeros, 0, **options), p, *zeros)


def operations() -> Iterator[Operation]:
    """Yield all operations, of every blockwise compressor and of the other kernels."""
    for name in compressors.__all__:
        kind = getattr(compressors, name)
        if issubclass(kind, Blockwise):
            yield from of_format(kind())
    for count in (2, 3, 9):
        yield Operation("mixing", f"mix {count} tensors", moves(count + 1), functools.partial(mix, others=count - 1))
    yield Operation("mixing", "land", moves(4), land)
    for residual in (False, True):
        kept = functools.partial(compress, codec=TopK(RATIO), residual=residual)
        name, moved = f"keep {RATIO:.0%}{', residual' * residual}", moves(1 + residual, 1, TopK(RATIO).row_bytes)
        yield Operation("top-k", name, moved, kept)
    for name, (states, _) in STEPS.items():
        yield Operation("optimizer", name, moves(3 + 2 * states), functools.partial(step, name=name))


def reading(work: Callable[[], object], device: str, calls: int = 1) -> float:
    """Return the seconds of a call: by CUDA events on a GPU, by the clock elsewhere."""
    if device == "cpu":
        return timeit.timeit(work, number=calls) / calls
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(calls):
        work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / calls


def fastest(works: Sequence[Callable[[], object]], device: str) -> list[float]:
    """Return the shortest time of each of some works, which take turns."""
    readings, until = [[reading(work, device) for work in works]], time.monotonic() + SECONDS  # the first may compile
    while len(readings) < 4 or time.monotonic() < until:
        readings.append([reading(work, device, 1 if device == "cpu" else 10) for work in works])
    return [min(each) for each in zip(*readings[1:], strict=True)]


def bench() -> bool:
    """Print the time of each operation in copies of as many values; return whether all results were right."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        devices = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
        right = all({device: bench_on(device) for device in devices}.values())
    finally:
        torch.set_num_threads(before)
    say("\ncopies   the time, in copies of as many values")
    say("bytes/s  read and written a second, relative to the copy")
    if not right:
        say("\nA result that is wrong differs from its definition: please report it.")
    return right


def bench_on(device: str) -> bool:
    """Print the table of a device; return whether all results were right."""
    n, right = TIMED[device], True
    source, target = drawn(n, device), torch.empty(n, dtype=torch.float32, device=device)
    where = "the CPU, one thread" if device == "cpu" else torch.cuda.get_device_name()
    say(f"\nEach operation on {n:,} values in fp32, on {where}:\n")
    table = Table({"operation": "<34", "ms": ">9", "copies": ">7", "bytes/s": ">8"})
    for each in operations():
        correct = each.is_right(CHECKED, device)
        took, copy = fastest([each.ready(n, device), lambda: target.copy_(source)], device)
        right &= correct
        share = f"{each.bytes(n) / took / (8 * n / copy):.2f}" if correct else "wrong"
        table.row(f"{each.family}, {each.name}", f"{took * 1e3:.2f}", f"{took / copy:.2f}", share)
    drawn.cache_clear()
    return right


if __name__ == "__main__":
    sys.exit(0 if bench() else 1)
