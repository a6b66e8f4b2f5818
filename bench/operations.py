"""Every operation that has a kernel, ready to be checked and timed: what it must move, and what it is held against."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import baguakit as bk
from baguakit.compressors.formats import Blockwise
from baguakit.kernels import mixing
from baguakit.kernels import operators as mixing_ops
from baguakit.kernels.blockwise import definition as blockwise
from baguakit.kernels.inductor import units

from .measuring import DEVICE, Work

ROWS = 8  # packed rows that are averaged
RATIO = 0.01  # what top-k keeps


@dataclass(frozen=True)
class Ready:
    """An operation on tensors of one length.

    Attributes:
        work: does it once. It may be called any number of times.
        bytes: what it must at least read and write.
        check: raises unless its result is right.
        peers: other ways to the same result, by name.
    """

    work: Work
    bytes: int
    check: Work
    peers: dict[str, Work] = field(default_factory=dict)


@dataclass(frozen=True)
class Operation:
    """`ready(n)` makes it ready for n values in fp32."""

    family: str
    name: str
    ready: Callable[[int], Ready]


@functools.lru_cache(maxsize=16)
def drawn(n: int, seed: int = 0) -> Tensor:
    return torch.randn(n, generator=torch.Generator(DEVICE).manual_seed(seed), device=DEVICE)


def equal(result: Tensor, expected: Tensor) -> None:
    assert torch.equal(result.cpu(), expected.cpu()), "the result is not that of the definition"


def by_definition(work: Callable[[], Any]) -> Any:
    """Return what `work` returns if a definition is run as it is written."""
    with units.eager():
        return work()


def as_written(work: Work) -> dict[str, Work]:
    """Name a peer: the definition as it is written, on the same device."""
    return {"eager definition": lambda: by_definition(work)}


# Mixing and landing.


def mix(n: int, others: int) -> Ready:
    x, ys = drawn(n).clone(), [drawn(n, seed + 1) for seed in range(others)]
    weights = [1 / (others + 1)] * (others + 1)

    def check() -> None:
        mixed, expected = drawn(n).clone(), drawn(n).cpu().clone()
        mixing_ops.mix_(mixed, ys, weights)
        mixing.mix_(expected, [y.cpu() for y in ys], weights)
        equal(mixed, expected)

    def definition(a: Tensor, *b: Tensor) -> None:
        mixing.mix_(a, b, weights)

    compiled = torch.compile(definition, dynamic=False)
    peers: dict[str, Work] = {"eager definition": lambda: definition(x, *ys), "torch.compile": lambda: compiled(x, *ys)}
    return Ready(lambda: mixing_ops.mix_(x, ys, weights), 4 * n * (others + 2), check, peers)


def land(n: int) -> Ready:
    x, result, before = drawn(n).clone(), drawn(n, 1), drawn(n, 2)

    def definition(a: Tensor, r: Tensor, b: Tensor) -> None:
        a.copy_(torch.where(a == b, r, a + (r - b)))

    def check() -> None:
        moved = torch.where(drawn(n, 3) > 0, before, drawn(n))
        expected = moved.cpu().clone()
        definition(expected, result.cpu(), before.cpu())
        mixing_ops.land_(moved, result, before, None)
        equal(moved, expected)

    compiled = torch.compile(definition, dynamic=False)
    peers: dict[str, Work] = {
        "eager definition": lambda: definition(x, result, before),
        "torch.compile": lambda: compiled(x, result, before),
    }
    return Ready(lambda: mixing_ops.land_(x, result, before, None), 16 * n, check, peers)


# The k largest.


def top_k(n: int, residual: bool) -> Ready:
    compressor, x = bk.compressors.TopK(RATIO), drawn(n).view(1, -1)
    lost = torch.empty_like(x) if residual else None
    chunks = x.view(-1, min(compressor.chunk, n))
    k = compressor.kept(chunks.shape[1])

    def by_sort(largest: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        places = largest(chunks.abs()).sort().values
        if lost is not None:
            lost.copy_(x).view(chunks.shape).scatter_(1, places, 0.0)
        return places.int(), chunks.gather(1, places)

    def by_topk() -> tuple[Tensor, Tensor]:
        return by_sort(lambda sizes: sizes.topk(k, sorted=False).indices)

    def by_stable_sort() -> tuple[Tensor, Tensor]:
        return by_sort(lambda sizes: sizes.sort(descending=True, stable=True).indices[:, :k])

    def check() -> None:
        sent = compressor.decompress(compressor.compress(x, lost), n)
        rest = None if lost is None else lost.clone()
        places, values = by_stable_sort()
        equal(sent.view(chunks.shape), torch.zeros_like(chunks).scatter_(1, places.long(), values))
        if rest is not None and lost is not None:
            equal(rest, lost)

    peers = {"torch.topk": by_topk, "torch.sort": by_stable_sort, "torch.compile of torch.topk": torch.compile(by_topk)}
    return Ready(lambda: compressor.compress(x, lost), (4 + 4 * residual) * n + compressor.row_bytes(n), check, peers)


# Wire formats. Other peers stand in bench_codec.py.


def compress(n: int, codec: Blockwise, residual: bool) -> Ready:
    x = drawn(n).view(1, -1)
    lost = torch.empty_like(x) if residual else None

    def check() -> None:
        expected_lost = torch.empty(1, n) if residual else None
        expected = by_definition(lambda: codec.compress(x.cpu(), expected_lost))
        equal(codec.compress(x, lost), expected)
        if lost is not None and expected_lost is not None:
            equal(lost, expected_lost)

    peers = as_written(lambda: blockwise.compress(codec.form, x, codec.block, lost))
    return Ready(lambda: codec.compress(x, lost), (4 + 4 * residual) * n + codec.row_bytes(n), check, peers)


def decompress(n: int, codec: Blockwise) -> Ready:
    packed, out = codec.compress(drawn(n).view(1, -1)), torch.empty(1, n, device=DEVICE)

    def check() -> None:
        equal(codec.decompress(packed, n, out=out), by_definition(lambda: codec.decompress(packed.cpu(), n)))

    peers = as_written(lambda: blockwise.decompress_(codec.form, out, packed, codec.block))
    return Ready(lambda: codec.decompress(packed, n, out=out), 4 * n + codec.row_bytes(n), check, peers)


def add(n: int, codec: Blockwise) -> Ready:
    packed = torch.cat([codec.compress(drawn(n, seed).view(1, -1)) for seed in range(2)])
    out, weights = torch.zeros(n, device=DEVICE), torch.tensor([0.25, 0.5], device=DEVICE)

    def check() -> None:
        expected = by_definition(lambda: codec.add_(torch.zeros(n), packed.cpu(), weights.cpu()))
        equal(codec.add_(torch.zeros_like(out), packed, weights), expected)

    peers = as_written(lambda: blockwise.add_(codec.form, out, packed, weights, codec.block))
    return Ready(lambda: codec.add_(out, packed, weights), 8 * n + 2 * codec.row_bytes(n), check, peers)


def reduce(n: int, codec: Blockwise) -> Ready:
    packed = torch.cat([codec.compress(drawn(n, row).view(1, -1)) for row in range(ROWS)])

    def check() -> None:
        equal(codec.reduce(packed, n), by_definition(lambda: codec.reduce(packed.cpu(), n)))

    peers = as_written(lambda: blockwise.reduce(codec.form, packed, n, codec.block))
    return Ready(lambda: codec.reduce(packed, n), (ROWS + 1) * codec.row_bytes(n), check, peers)


# Optimizer steps.

STEPS = {  # primitive: how many tensors it remembers, options, torch's own
    "sgd_step_": (1, {"lr": 1e-3, "momentum": 0.9}, torch.optim.SGD),
    "adamw_step_": (2, {"lr": 1e-3}, torch.optim.AdamW),
}


def step(n: int, name: str) -> Ready:
    primitive, (count, options, kind) = getattr(bk.primitives, name), STEPS[name]
    p, g, *states = drawn(n).clone(), drawn(n, 1), *(torch.zeros(n, device=DEVICE) for _ in range(count))

    def check() -> None:
        weights, remembered = drawn(n).clone(), [torch.zeros(n, device=DEVICE) for _ in range(count)]
        primitive(weights, g, *remembered, 0, **options)
        like = torch.nn.Parameter(drawn(n).clone())
        like.grad = g
        kind([like], foreach=False, **options).step()
        torch.testing.assert_close(weights, like.detach(), rtol=1e-5, atol=1e-7)

    return Ready(lambda: primitive(p, g, *states, 0, **options), 4 * n * (3 + 2 * count), check)


def operations() -> Iterator[Operation]:
    """All there are: new formats and primitives are found."""
    for name in bk.compressors.__all__:
        kind = getattr(bk.compressors, name)
        if issubclass(kind, Blockwise) and kind is not Blockwise:
            codec = kind()
            family = repr(codec)
            yield Operation(family, "compress", functools.partial(compress, codec=codec, residual=False))
            yield Operation(family, "compress, residual", functools.partial(compress, codec=codec, residual=True))
            yield Operation(family, "decompress", functools.partial(decompress, codec=codec))
            yield Operation(family, "add 2 rows", functools.partial(add, codec=codec))
            yield Operation(family, f"average {ROWS} rows", functools.partial(reduce, codec=codec))
    for others in (1, 2, 8):
        yield Operation("mixing", f"mix {others + 1} tensors", functools.partial(mix, others=others))
    yield Operation("mixing", "land", land)
    for residual in (False, True):
        ready = functools.partial(top_k, residual=residual)
        yield Operation("top-k", f"keep {RATIO:.0%}{', residual' * residual}", ready)
    for name in STEPS:
        if hasattr(bk.primitives, name):
            yield Operation("optimizer", name, functools.partial(step, name=name))
