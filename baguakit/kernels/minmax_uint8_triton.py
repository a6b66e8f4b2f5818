"""The arithmetic of `minmax_uint8.py` for GPUs: the same roundings in the same order, so the same bytes. Its
docstring states the format.

A program holds a tile of whole blocks, a block to a line. Only tiles that reach past the end of their row have masks,
so that all others move whole lines of memory. Launches turn off the fusion of multiplication and addition, which
would round once where the definition rounds twice.
"""

# What Triton compiles has no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

import contextlib
from typing import Any

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from ._blocks import aligned
from ._noise import seed_words
from .minmax_uint8 import empty

SMALLEST = tl.constexpr(2.0**-126)
NAN = tl.constexpr(float("nan"))
INFINITY = tl.constexpr(float("inf"))
ULP = tl.constexpr(2.0**-24)
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


# The arithmetic of a tile of fp32 values, (blocks, width), whose step, bottom and scale are (blocks,).


@triton.jit
def find_grid(x, inside, INTERVALS: tl.constexpr):
    low = tl.min(x if inside is None else tl.where(inside, x, INFINITY), 1)
    high = tl.max(x if inside is None else tl.where(inside, x, -INFINITY), 1)
    broken = tl.max((x - x != 0).to(tl.int32), 1) != 0  # min and max drop NaN
    equal = (low == high) & (high != 0)
    spread = high * 0.5 - low * 0.5
    step = tl.where(equal, high, tl.maximum(tl.div_rn(spread, INTERVALS / 2), SMALLEST))
    scale = tl.where(equal, 0.0, tl.div_rn(1.0, step))
    lowest = low * scale
    lowest = tl.where(tl.abs(lowest) < SMALLEST, 0.0, lowest)
    bottom = tl.where(equal, 1.0, tl.floor(lowest + (INTERVALS - 254) / 2))
    return tl.where(broken, NAN, step), tl.where(broken, 0.0, bottom), tl.where(broken, NAN, scale)


@triton.jit
def quantize(x, bottom, scale, at, seed, seed_high, DRAWN: tl.constexpr):
    level = x * scale[:, None]
    if DRAWN:
        below = tl.floor(level)
        level = below + (level - below > uniform(at, seed, seed_high)).to(tl.float32)
    else:
        level = tl.floor(level + 0.5)
    codes = tl.minimum(tl.maximum(level - bottom[:, None], 0.0), 255.0)
    return tl.where((scale == scale)[:, None], codes, 0.0).to(tl.uint8)


@triton.jit
def dequantize(codes, step, bottom):
    return (codes.to(tl.float32) + bottom[:, None]) * step[:, None]


@triton.jit
def uniform(at, seed, seed_high):
    h = mix(at.to(tl.uint32) ^ seed.to(tl.uint32, bitcast=True))
    return (mix(h ^ (at >> 32).to(tl.uint32) ^ seed_high.to(tl.uint32, bitcast=True)) >> 8).to(tl.float32) * ULP


@triton.jit
def mix(h):
    h = (h ^ (h >> 16)) * 0x21F0AAAD
    h = (h ^ (h >> 15)) * 0x735A2D97
    return h ^ (h >> 15)


# Moving a tile. `some` tells which blocks are in the row and `inside` which values; both are None where all are.


@triton.jit
def locate(tile, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    """The number of each block of the tile, and the columns of its values."""
    block = tile.to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    return block, block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]


@triton.jit
def codes_at(row_ptr, at, WIDTH: tl.constexpr):
    # `packed_ptr` is not specialized on its alignment, so that this is all that Triton knows and a thread holds WIDTH
    # codes. With 16 codes to a thread, each access of a warp to the values they come from would touch a part of every
    # line it needs, and of none the whole.
    return tl.multiple_of(row_ptr + at, [WIDTH, WIDTH])


@triton.jit
def load(ptr, inside):
    return tl.load(ptr) if inside is None else tl.load(ptr, inside, 0)


@triton.jit
def store(ptr, value, inside):
    if INTERPRETED and ptr.dtype.element_ty == tl.bfloat16:  # the interpreter cuts bits off; a GPU rounds, as here
        bits = value.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        value = tl.where(value == value, rounded, 0x7FC0).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    tl.store(ptr, value.to(ptr.dtype.element_ty), inside)


@triton.jit
def header_of(row_ptr, header_at, block, dtype: tl.constexpr):
    return (row_ptr + header_at + 8 * block).to(tl.pointer_type(dtype))


@triton.jit
def load_values(row_ptr, header_at, block, at, some, inside, WIDTH: tl.constexpr):
    pair = load(header_of(row_ptr, header_at, block, tl.uint64), some)  # step and bottom in one access
    step = pair.to(tl.uint32).to(tl.float32, bitcast=True)
    bottom = (pair >> 32).to(tl.uint32).to(tl.float32, bitcast=True)
    return dequantize(load(codes_at(row_ptr, at, WIDTH), inside), step, bottom)


@triton.jit
def store_values(
    row_ptr, header_at, x, origin, seed, seed_high, block, at, some, inside, DRAWN: tl.constexpr, WIDTH: tl.constexpr
):
    """Quantize and store a tile, and return what it lost."""
    step, bottom, scale = find_grid(x, inside, 254.0 if DRAWN else 255.0)
    codes = quantize(x, bottom, scale, origin + at, seed, seed_high, DRAWN)
    tl.store(codes_at(row_ptr, at, WIDTH), codes, inside)
    pair = header_of(row_ptr, header_at, block, tl.float32)
    tl.store(pair, step, some)
    tl.store(pair + 1, bottom, some)
    return x - dequantize(codes, step, bottom)


# The kernels. A program takes tile `first + program % tiles` of row `program // tiles`.


@triton.jit(
    do_not_specialize=["n", "first", "tiles", "seed", "seed_high"], do_not_specialize_on_alignment=["packed_ptr"]
)
def compress_kernel(
    x_ptr, residual_ptr, packed_ptr, stride, row_bytes, header_at, n, first, tiles, seed, seed_high,
    DRAWN: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, MASKED: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) // tiles).to(tl.int64)
    block, at = locate(first + tl.program_id(0) % tiles, BLOCK, BLOCKS)
    some = block * BLOCK < n if MASKED else None
    inside = at < n if MASKED else None
    x = load(x_ptr + row * stride + at, inside).to(tl.float32)
    row_ptr = packed_ptr + row * row_bytes
    lost = store_values(row_ptr, header_at, x, row * n, seed, seed_high, block, at, some, inside, DRAWN, WIDTH)
    if residual_ptr is not None:
        tl.store(residual_ptr + row * stride + at, lost, inside)


@triton.jit(do_not_specialize=["n", "first", "tiles"], do_not_specialize_on_alignment=["packed_ptr"])
def decompress_kernel(
    out_ptr, packed_ptr, stride, row_bytes, header_at, n, first, tiles,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, MASKED: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) // tiles).to(tl.int64)
    block, at = locate(first + tl.program_id(0) % tiles, BLOCK, BLOCKS)
    some = block * BLOCK < n if MASKED else None
    inside = at < n if MASKED else None
    values = load_values(packed_ptr + row * row_bytes, header_at, block, at, some, inside, WIDTH)
    store(out_ptr + row * stride + at, values, inside)


@triton.jit(do_not_specialize=["rows", "n", "first", "tiles"], do_not_specialize_on_alignment=["packed_ptr"])
def add_kernel(
    out_ptr, packed_ptr, weights_ptr, rows, row_bytes, header_at, n, first, tiles,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, MASKED: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    block, at = locate(first + tl.program_id(0), BLOCK, BLOCKS)
    some = block * BLOCK < n if MASKED else None
    inside = at < n if MASKED else None
    total = load(out_ptr + at, inside).to(tl.float32)
    for _ in tl.range(rows, loop_unroll_factor=1 if MASKED else 4):
        total += load_values(packed_ptr, header_at, block, at, some, inside, WIDTH) * tl.load(weights_ptr)
        packed_ptr += row_bytes
        weights_ptr += 1
    store(out_ptr + at, total, inside)


@triton.jit(
    do_not_specialize=["rows", "n", "first", "tiles", "seed", "seed_high"],
    do_not_specialize_on_alignment=["packed_ptr"],
)
def reduce_kernel(
    sent_ptr, residual_ptr, packed_ptr, rows, row_bytes, header_at, n, first, tiles, seed, seed_high,
    DRAWN: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, MASKED: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    block, at = locate(first + tl.program_id(0), BLOCK, BLOCKS)
    some = block * BLOCK < n if MASKED else None
    inside = at < n if MASKED else None
    total, count = tl.zeros((BLOCKS, BLOCK), tl.float32), 0.0
    for _ in tl.range(rows, loop_unroll_factor=1 if MASKED else 4):
        total += load_values(packed_ptr, header_at, block, at, some, inside, WIDTH)
        packed_ptr += row_bytes
        count += 1
    mean = tl.div_rn(total, count)
    lost = store_values(sent_ptr, header_at, mean, 0, seed, seed_high, block, at, some, inside, DRAWN, WIDTH)
    if residual_ptr is not None:
        tl.store(residual_ptr + at, load(residual_ptr + at, inside) + lost * count, inside)


# The launchers, with the arguments of the definition's functions.

# Values of a tile; a warp takes 1024 of it, so that each thread has eight 16-byte loads of fp32 in flight. What looks
# for the range of a block keeps blocks of up to 1024 within one warp, which then waits for no other; what only
# streams fills a multiprocessor, which holds 32 programs, with two.
TILES = {compress_kernel: 1024, decompress_kernel: 2048, add_kernel: 2048, reduce_kernel: 1024}


def compress(x: Tensor, block: int, residual: Tensor | None = None, key: int | None = None) -> Tensor:
    rows, n = x.shape
    packed, options = empty(rows, n, block, x.device), _draws(key) | {"WIDTH": 16 // x.itemsize}
    _launch(compress_kernel, rows, n, block, options, x.contiguous(), residual, packed, _stride(x), packed.shape[1])
    return packed


def decompress_(out: Tensor, packed: Tensor, block: int) -> None:
    rows, n = out.shape
    options = {"WIDTH": 16 // out.itemsize}
    _launch(decompress_kernel, rows, n, block, options, out, _aligned(packed), _stride(out), packed.shape[1])


def add_(out: Tensor, packed: Tensor, weights: Tensor, block: int) -> None:
    options = {"WIDTH": 16 // out.itemsize}
    _launch(add_kernel, 1, len(out), block, options, out, _aligned(packed), weights, _count(packed), packed.shape[1])


def reduce(packed: Tensor, n: int, block: int, residual: Tensor | None = None, key: int | None = None) -> Tensor:
    sent, options = empty(1, n, block, packed.device), _draws(key) | {"WIDTH": 16 if residual is None else 4}
    _launch(reduce_kernel, 1, n, block, options, sent, residual, _aligned(packed), _count(packed), packed.shape[1])
    return sent


def _aligned(packed: Tensor) -> Tensor:
    return packed if packed.data_ptr() % 16 == 0 else packed.clone()


def _count(packed: Tensor) -> Any:
    # The interpreter of Triton 3.6 cannot count to an argument, only to a constant.
    return tl.constexpr(len(packed)) if INTERPRETED.value else len(packed)


def _stride(x: Tensor) -> int:
    # A single row begins where the tensor does, whatever its length: zero keeps its accesses wide.
    return x.shape[1] if x.shape[0] > 1 else 0


def _draws(key: int | None) -> dict[str, int]:
    seed, seed_high = seed_words(key or 0)
    return {
        "seed": seed - (seed >> 31 << 32),
        "seed_high": seed_high - (seed_high >> 31 << 32),
        "DRAWN": key is not None,
    }


def _launch(
    kernel: Any, rows: int, n: int, block: int, options: dict[str, int], *arguments: Tensor | int | None
) -> None:
    """Launch the tiles that lie wholly in their row, and then the last of each row if it does not."""
    tile = max(block, TILES[kernel])
    whole, rest = divmod(n, tile)
    options |= {"BLOCK": block, "BLOCKS": tile // block, "num_warps": tile // 1024, "enable_fp_fusion": False}
    device = next(argument.device for argument in arguments if isinstance(argument, Tensor))
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        for first, tiles, masked in ((0, whole, False), (whole, int(rest > 0), True)):
            if rows * tiles:
                kernel[(rows * tiles,)](*arguments, aligned(n), n, first, tiles, MASKED=masked, **options)
