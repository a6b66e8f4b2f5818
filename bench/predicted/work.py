"""Every operation that has a kernel, on tensors on the CPU: by its kernels, by its definition, and its bytes.

`bench.speed` holds the same operations for a device that is there.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

import baguakit as bk
from baguakit.compressors.formats import Blockwise
from baguakit.kernels import cpu, mixing, topk
from baguakit.kernels.blockwise import definition as blocks
from baguakit.kernels.changes import definition as changes
from baguakit.kernels.steps import definition as steps
from baguakit.kernels.steps import operators as table

ROWS, RATIO, KEY = 8, 0.01, 0x123456789ABCDEF
CHANGED, SECTOR = 0.03, 32  # the share of values, and the least that memory moves, in bytes
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
Tensors = Sequence[Tensor | None]


@dataclass(frozen=True)
class Task:
    """An operation of one dtype on `n` values.

    Attributes:
        by_kernels, by_definition: do it on fresh copies of the same tensors, and return the results.
        floor: the bytes that must be read and written.
        moves: those that the algorithm of the kernels reads and writes, if it needs more.
    """

    by_kernels: Callable[[], Tensors]
    by_definition: Callable[[], Tensors]
    floor: float
    moves: float | None = None

    def check(self) -> None:
        """Raise an AssertionError unless the kernels' results are those of the definition."""
        with patch.object(cpu, "functions", return_value=None):
            expected = self.by_definition()
        for ours, theirs in zip(self.by_kernels(), expected, strict=True):
            assert same(ours, theirs), "the result is not that of the definition"


@dataclass(frozen=True)
class Operation:
    """`ready(n)` returns the task for n values."""

    family: str
    name: str
    dtype: str
    ready: Callable[[int], Task]


def same(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return torch.equal(*(x.reshape(-1).contiguous().view(torch.uint8) for x in (a, b)))


def drawn(n: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed)).to(dtype)


def both(
    work: Callable[[Any], Tensors], kernels: Any, definition: Any, floor: float, moves: float | None = None
) -> Task:
    """A task of two modules with the same functions."""
    return Task(lambda: work(kernels), lambda: work(definition), floor, moves)


# Wire formats.


def packed_of(codec: Blockwise, n: int, rows: int) -> Tensor:
    x = torch.stack([drawn(n, seed=seed) for seed in range(rows)])
    with patch.object(cpu, "functions", return_value=None):
        return blocks.compress(codec.form, x, codec.block, None, None)


def used(codec: Blockwise, n: int) -> int:
    """The bytes of a packed row without what rounds its parts up."""
    layout = codec.form.layout(n, codec.block)
    return layout.row - sum(part.stop - part.start for part in layout.zeros)


def compress(n: int, codec: Blockwise, dtype: torch.dtype, residual: bool, stochastic: bool) -> Task:
    from baguakit.kernels.blockwise import gpu as launch

    x, key = drawn(n, dtype).view(1, -1), KEY if stochastic else None

    def work(module: Any) -> Tensors:
        lost = torch.empty(1, n) if residual else None
        return module.compress(codec.form, x, codec.block, lost, key), lost

    return both(work, launch, blocks, (x.itemsize + 4 * residual) * n + used(codec, n))


def decompress(n: int, codec: Blockwise, dtype: torch.dtype) -> Task:
    from baguakit.kernels.blockwise import gpu as launch

    packed = packed_of(codec, n, 1)

    def work(module: Any) -> Tensors:
        out = torch.empty(1, n, dtype=dtype)
        module.decompress_(codec.form, out, packed, codec.block)
        return (out,)

    return both(work, launch, blocks, dtype.itemsize * n + used(codec, n))


def add(n: int, codec: Blockwise, dtype: torch.dtype) -> Task:
    from baguakit.kernels.blockwise import gpu as launch

    packed, weights = packed_of(codec, n, 2), torch.tensor([0.25, 0.5])

    def work(module: Any) -> Tensors:
        out = drawn(n, dtype, 3)
        module.add_(codec.form, out, packed, weights, codec.block)
        return (out,)

    return both(work, launch, blocks, 2 * dtype.itemsize * n + 2 * used(codec, n))


def reduce(n: int, codec: Blockwise, residual: bool) -> Task:
    from baguakit.kernels.blockwise import gpu as launch

    packed = packed_of(codec, n, ROWS)

    def work(module: Any) -> Tensors:
        lost = drawn(n, seed=9) if residual else None
        return module.reduce(codec.form, packed, n, codec.block, lost, None), lost

    return both(work, launch, blocks, (ROWS + 1) * used(codec, n) + 8 * n * residual)


# Mixing, landing, and the k largest.


def mix(n: int, others: int, dtype: torch.dtype) -> Task:
    from baguakit.kernels import mixing_gpu as gpu

    weights = [1 / (others + 1)] * (others + 1)

    def work(module: Any) -> Tensors:
        x = drawn(n, dtype)
        module.mix_(x, [drawn(n, dtype, seed + 1) for seed in range(others)], weights)
        return (x,)

    return both(work, gpu, mixing, dtype.itemsize * n * (others + 2))


def land(n: int, dtype: torch.dtype) -> Task:
    from baguakit.kernels import mixing_gpu as gpu

    def work(module: Any) -> Tensors:
        x, result, before = (drawn(n, dtype, seed) for seed in range(3))
        x[::3] = before[::3]
        module.land_(x, result, before)
        return (x,)

    return both(work, gpu, mixing, 4 * dtype.itemsize * n)


def top_k(n: int, dtype: torch.dtype, residual: bool) -> Task:
    from baguakit.kernels import topk_gpu as gpu

    x, compressor = drawn(n, dtype).view(1, -1), bk.compressors.TopK(RATIO)
    chunk, (whole, rest) = compressor.chunk, divmod(n, compressor.chunk)
    k, rest = compressor.kept(chunk), compressor.kept(rest)

    def work(module: Any) -> Tensors:
        lost = torch.empty(1, n) if residual else None
        return *module.select(x, chunk, k, rest, lost), lost

    return both(work, gpu, topk, (x.itemsize + 4 * residual) * n + 8 * (whole * k + rest))


# Values that have changed.


def changed(n: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, int]:
    """Return the bytes of new and old values, and how many bytes the sectors have in which they differ.

    A share of `CHANGED` differs, by what half of the bytes of a value hold.
    """
    source, size = torch.Generator().manual_seed(0), dtype.itemsize
    old = drawn(n, dtype).view(changes.WORDS[size])
    d, most = torch.rand(n, generator=source) < CHANGED, 1 << 4 * size - 1
    moved = torch.randint(1, most, (n,), generator=source) * (1 - 2 * torch.randint(0, 2, (n,), generator=source))
    new, old = ((old + (moved * each).to(old.dtype)).view(torch.uint8) for each in (d, 0))
    return new, old, SECTOR * int((new != old).view(-1, SECTOR).any(1).sum())


def pack(n: int, dtype: torch.dtype) -> Task:
    from baguakit.kernels.changes import gpu

    new, old, differ = changed(n, dtype)

    def work(module: Any) -> Tensors:
        x = old.clone()
        heads, parts = module.encode(new, x, dtype.itemsize)
        return heads, torch.cat(parts), x

    heads, packed, _ = work(changes)
    return both(work, gpu, changes, 2 * len(new) + differ + len(packed) + heads.nbytes)


def put_in(n: int, dtype: torch.dtype) -> Task:
    from baguakit.kernels.changes import gpu

    new, old, differ = changed(n, dtype)
    heads, parts = changes.encode(new, old.clone(), dtype.itemsize)
    lengths, packed = changes.lengths_of(heads), torch.cat(parts)
    starts = lengths.cumsum(0) - lengths

    def work(module: Any) -> Tensors:
        x = old.clone()
        module.add_(x, dtype.itemsize, heads, starts, packed)
        return (x,)

    return both(work, gpu, changes, 2 * differ + len(packed) + heads.nbytes + starts.nbytes)


# Optimizer steps.


def step(n: int, rule: Any, p: torch.dtype, g: torch.dtype, master: bool = False, block: int | None = None) -> Task:
    from baguakit.kernels.steps import gpu as launch

    conditions = {"lr": 1e-3, "taken": 3}

    def tensors() -> steps.Columns:
        gradients = drawn(n, seed=1).to(g) if block is None else packed_of(bk.compressors.MinMaxUInt8(block), n, 1)[0]
        states = {name: [drawn(n, seed=2 + i).abs()] for i, name in enumerate("uv"[: rule.states])}
        weights = drawn(n)
        return {"p": [weights.to(p)], "g": [gradients]} | states | ({"master": [weights]} if master else {})

    def by_definition() -> Tensors:
        x = tensors()
        values = x["g"] if block is None else [unpacked(x["g"][0])]
        steps.step_(rule, x | {"g": values}, steps.Conditions(**conditions))
        return results(x)

    def unpacked(row: Tensor) -> Tensor:
        return bk.compressors.MinMaxUInt8(block or 0).decompress(row.view(1, -1), n)[0]

    def by_kernels() -> Tensors:
        x = tensors()
        launch.step_(rule, table.tables_of(x), steps.Conditions(**conditions), block)
        return results(x)

    def results(x: steps.Columns) -> Tensors:
        return [*itertools.chain(*(x[name] for name in x if name != "g"))]

    read = used(bk.compressors.MinMaxUInt8(block), n) if block else g.itemsize * n
    written = 2 * (8 // 2 * rule.states + (4 if master else p.itemsize)) * n + (p.itemsize * n if master else 0)
    return Task(by_kernels, by_definition, read + written)


def norm(n: int, dtype: torch.dtype) -> Task:
    from baguakit.kernels.steps import gpu

    grads = [drawn(n, dtype)]

    def by_definition() -> Tensors:
        found = torch.empty(())
        steps.gradient_norm_(found, grads, None)
        return (found,)

    def by_kernels() -> Tensors:
        found = torch.empty(())
        gpu.gradient_norm_(found, table.tables_of({"g": grads}), None)
        return (found,)

    return Task(by_kernels, by_definition, dtype.itemsize * n)


def operations() -> Iterator[Operation]:
    """All there are: new formats are found."""
    for name in bk.compressors.__all__:
        kind = getattr(bk.compressors, name)
        if issubclass(kind, Blockwise) and kind is not Blockwise:
            yield from of_format(kind())
    for dtype, kept in DTYPES.items():
        for others in (1, 2, 8):
            yield Operation("mixing", f"mix {others + 1} tensors", dtype, lambda n, a=(others, kept): mix(n, *a))
        yield Operation("mixing", "land", dtype, lambda n, kept=kept: land(n, kept))
        for residual in (False, True):
            named = f"keep {RATIO:.0%}{', residual' * residual}"
            yield Operation("top-k", named, dtype, lambda n, a=(kept, residual): top_k(n, *a))
    yield from of_steps()
    for dtype, kept in DTYPES.items():
        yield Operation("changes", f"find and pack {CHANGED:.0%}", dtype, lambda n, kept=kept: pack(n, kept))
        yield Operation("changes", f"put in {CHANGED:.0%}", dtype, lambda n, kept=kept: put_in(n, kept))


def of_format(codec: Blockwise) -> Iterator[Operation]:
    family = repr(codec)
    variants = [(False, False), (True, False)] + [(True, True)] * ("stochastic" in codec.__dataclass_fields__)
    for dtype, kept in DTYPES.items():
        for residual, stochastic in variants:
            name = f"compress{', residual' * residual}{', stochastic' * stochastic}"
            yield Operation(family, name, dtype, lambda n, a=(codec, kept, residual, stochastic): compress(n, *a))
        yield Operation(family, "decompress", dtype, lambda n, a=(codec, kept): decompress(n, *a))
        yield Operation(family, "add 2 rows", dtype, lambda n, a=(codec, kept): add(n, *a))
    for residual in (False, True):
        name = f"average {ROWS} rows{', residual' * residual}"
        yield Operation(family, name, "fp32", lambda n, a=(codec, residual): reduce(n, *a))


def of_steps() -> Iterator[Operation]:
    wide, half = torch.float32, torch.bfloat16
    rules = {
        "sgd with momentum": steps.SGD(0.9),
        "adamw": steps.Adam(weight_decay=0.1, decoupled=True),
        "lion": steps.Lion(weight_decay=0.1),
    }
    for name, rule in rules.items():
        yield Operation("optimizer", name, "fp32", lambda n, rule=rule: step(n, rule, wide, wide))
        yield Operation("optimizer", name, "bf16", lambda n, rule=rule: step(n, rule, half, half))
    adamw = rules["adamw"]
    yield Operation("optimizer", "adamw, fp32 master", "bf16", lambda n: step(n, adamw, half, half, master=True))
    yield Operation("optimizer", "adamw of packed gradients", "fp32", lambda n: step(n, adamw, wide, wide, block=512))
    for dtype, kept in DTYPES.items():
        yield Operation("optimizer", "norm of gradients", dtype, lambda n, kept=kept: norm(n, kept))
