"""The GPU kernels for the k largest values of each chunk: the same bytes as the definition. The host does not wait.

A program of `select_kernel` holds a chunk in registers. It reads each value once, finds the threshold by bisection, and
writes the kept values. The bisection begins between the least and the largest maximum of groups of adjacent values. It
ends when exactly k values reach the tried size: after ten tries for most chunks, and 31 at most. A program of
`add_kernel` takes one chunk of all rows; after each row it waits until all its threads have added their values.
"""

from typing import Any

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from . import topk
from .gpu import byte_of, launch, rounded
from .mixing import WIDE

NAN = tl.constexpr(topk.NAN)
NEIGHBOURS = tl.constexpr(16)
TILE = 512  # places that a program packs
ZEROS = {torch.bfloat16: 16, torch.float16: 13}  # the lowest bits of a size
# The limit of registers per thread. With it, three programs of the longest chunk share a multiprocessor: one computes
# while others read. Some values are spilled, but with a residual an H100 takes 0.6 of the time without a limit.
REGISTERS = 80


@triton.jit
def divided(at, left):
    """Return two masks: of the values in complete groups of four, which move together, and of the other values."""
    whole = at // 4 * 4 + 3 < left
    return whole, (at < left) & ~whole


@triton.jit
def load(chunk_ptr, left, CHUNK):
    """Return a chunk of values in fp32, with zeros after the `left` existing values."""
    at = tl.arange(0, CHUNK)
    if left == CHUNK:
        v = tl.load(chunk_ptr + at).to(tl.float32)
    else:
        whole, others = divided(at, left)
        v = tl.load(chunk_ptr + at, whole, 0).to(tl.float32)
        v = tl.where(whole, v, tl.load(chunk_ptr + at, others, 0).to(tl.float32))
    return v


@triton.jit
def store(chunk_ptr, v, left, CHUNK):
    at = tl.arange(0, CHUNK)
    if left == CHUNK:
        tl.store(chunk_ptr + at, v)
    else:
        whole, others = divided(at, left)
        tl.store(chunk_ptr + at, v, whole)
        tl.store(chunk_ptr + at, v, others)


@triton.jit
def threshold_of(size, k, CHUNK):
    """Return the largest size that at least `k` values reach, or any size that exactly `k` values reach."""
    maxima = tl.max(tl.reshape(size, (CHUNK // NEIGHBOURS, NEIGHBOURS)), 1)
    low, high = tl.where(k <= CHUNK // NEIGHBOURS, tl.min(maxima), 0), tl.max(maxima) + 1
    reached = k + 1
    while (high - low > 1) & (reached != k):
        middle = low + (high - low) // 2
        count = -tl.sum((middle - 1 - size) >> 31)  # fewer instructions than comparisons
        enough = count >= k
        low, high = tl.where(enough, middle, low), tl.where(enough, high, middle)
        reached = tl.where(enough, count, reached)
    return low


@triton.jit(do_not_specialize=["n", "chunks", "k", "rest"])
def select_kernel(
    places_ptr, values_ptr, residual_ptr, x_ptr, stride, n, chunks, k, rest, CHUNK: tl.constexpr, ZEROS: tl.constexpr
):
    row, chunk = (tl.program_id(0) // chunks).to(tl.int64), tl.program_id(0) % chunks
    start, slot = row * stride + chunk.to(tl.int64) * CHUNK, row * (n // CHUNK * k + rest) + chunk.to(tl.int64) * k
    left = tl.minimum(n - chunk.to(tl.int64) * CHUNK, CHUNK).to(tl.int32)
    at, wanted = tl.arange(0, CHUNK), tl.where(left == CHUNK, k, rest)
    v = load(x_ptr + start, left, CHUNK)
    bits = tl.where(v == v, v.to(tl.int32, bitcast=True), NAN)
    size = tl.where(at < left, (bits & 0x7FFFFFFF) >> ZEROS, -1)
    threshold = threshold_of(size, wanted, CHUNK)
    larger, equal = (size > threshold).to(tl.int32), (size == threshold).to(tl.int32)
    equals = wanted - tl.sum(larger)
    both = tl.cumsum(larger * 65536 + equal, 0)  # at most CHUNK each
    equal_to = both & 0xFFFF
    kept = (size > threshold) | ((size == threshold) & (equal_to <= equals))
    slots = (both >> 16) + tl.minimum(equal_to, equals) - 1
    tl.store(places_ptr + slot + slots, at, kept)
    tl.store(values_ptr + slot + slots, bits.to(tl.float32, bitcast=True), kept)
    if residual_ptr is not None:
        store(residual_ptr + start, tl.where(kept, v - v, v), left, CHUNK)


@triton.jit(do_not_specialize=["row_bytes", "values_at", "count", "tiles"], do_not_specialize_on_alignment=["ok_ptr"])
def join_kernel(
    packed_ptr, places_ptr, values_ptr, ok_ptr, row_bytes, values_at, count, tiles,
    BITS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    # In a plane of w bytes, code i of a row is in byte i mod w; ⌊i / w⌋ tells which bits of the byte it takes.
    row = (tl.program_id(0) // tiles).to(tl.int64)
    at = (tl.program_id(0) % tiles).to(tl.int64) * TILE + tl.arange(0, TILE)
    packed_ptr += row * row_bytes
    places_ptr += row * count
    plane_ptr, eighth = packed_ptr, (count.to(tl.int64) + 7) // 8
    for plane in tl.static_range(4):
        if BITS & (8 >> plane):
            width, byte = eighth * (8 >> plane), tl.zeros((TILE,), tl.int32)
            for stripe in tl.static_range(1 << plane):
                value = at + stripe * width
                place = tl.load(places_ptr + value, (at < width) & (value < count), 0)
                code = (place >> (BITS & -(16 >> plane))) & ((1 << (8 >> plane)) - 1)
                byte |= code << (stripe * (8 >> plane))
            tl.store(plane_ptr + at, byte.to(tl.uint8), at < width)
            plane_ptr += width
    tl.store(plane_ptr + at, tl.zeros((TILE,), tl.uint8), at < values_at - BITS * eighth)
    if values_ptr is not None:
        sent_ptr = (packed_ptr + values_at).to(tl.pointer_type(tl.float32))
        tl.store(sent_ptr + at, tl.load(values_ptr + row * count + at, at < count, 0), at < count)
    if ok_ptr is not None:
        tl.store(ok_ptr, 1, tl.program_id(0) == 0)


@triton.jit
def load_places(plane_ptr, value, inside, count, BITS):
    eighth, place = (count.to(tl.int64) + 7) // 8, tl.zeros(value.shape, tl.int32)
    for plane in tl.static_range(4):
        if BITS & (8 >> plane):
            width, stripe = eighth * (8 >> plane), tl.zeros(value.shape, tl.int32)
            for before in tl.static_range(1, 1 << plane):
                stripe += (value >= before * width).to(tl.int32)
            byte = tl.load(plane_ptr + (value - stripe * width), inside, 0).to(tl.int32)
            code = (byte >> (stripe * (8 >> plane))) & ((1 << (8 >> plane)) - 1)
            place |= code << (BITS & -(16 >> plane))
            plane_ptr += width
    return place


@triton.jit(
    do_not_specialize=["weight", "rows", "row_bytes", "stride", "n", "count", "k", "rest"],
    do_not_specialize_on_alignment=["packed_ptr", "values_ptr", "weights_ptr", "ok_ptr"],
)
def add_kernel(
    total_ptr, out_ptr, packed_ptr, values_ptr, weights_ptr, ok_ptr, weight, rows, row_bytes, stride, n, count, k, rest,
    CHUNK: tl.constexpr, SLOTS: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0).to(tl.int64)
    left = tl.minimum(n - chunk * CHUNK, CHUNK).to(tl.int32)
    wanted = tl.where(left == CHUNK, k, rest)
    total_ptr += chunk * CHUNK
    if weights_ptr is None:
        store(total_ptr, tl.zeros((CHUNK,), tl.float32), left, CHUNK)
    elif out_ptr is not None:
        store(total_ptr, load(out_ptr + chunk * CHUNK, left, CHUNK), left, CHUNK)
    row, broken = 0, tl.zeros((SLOTS,), tl.int32)
    while row < rows:
        tl.debug_barrier()
        factor = tl.full((1,), weight, tl.float32) if weights_ptr is None else tl.load(weights_ptr + row)
        first = 0
        while first < wanted:
            slot = first + tl.arange(0, SLOTS)
            value, inside = chunk * k + slot, slot < wanted
            place = load_places(packed_ptr, value, inside, count, BITS)
            inside &= place < left  # whatever was received
            part = tl.load(values_ptr + value, inside, 0) * factor
            total = tl.load(total_ptr + place, inside, 0) + part.to(total_ptr.dtype.element_ty)
            tl.store(total_ptr + place, total, inside)
            broken |= (~(tl.abs(total) < float("inf"))).to(tl.int32)  # as all sums stay that once are
            first += SLOTS
        packed_ptr += row_bytes
        values_ptr += stride
        row += 1
    if out_ptr is not None:
        tl.debug_barrier()
        result = rounded(load(total_ptr, left, CHUNK), out_ptr.dtype.element_ty)
        store(out_ptr + chunk * CHUNK, result, left, CHUNK)
        broken = (~(tl.abs(result.to(tl.float32)) < float("inf"))).to(tl.int32)
    if ok_ptr is not None:
        tl.store(ok_ptr, 0, tl.max(broken, 0) > 0)


def options_of(chunk: int) -> dict[str, Any]:
    """Return the launch options of the kernels that take chunks."""
    return {"num_warps": max(1, chunk // 512)} | ({} if torch.version.hip else {"maxnreg": REGISTERS})


def select(x: Tensor, chunk: int, k: int, rest: int, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Select the kept values. Arguments and results are those of `topk.select`."""
    x = x.contiguous()
    rows, n = x.shape
    places = torch.empty(rows, n // chunk * k + rest, dtype=torch.int32, device=x.device)
    values = torch.empty(places.shape, dtype=torch.float32, device=x.device)
    chunks = triton.cdiv(n, chunk) if places.numel() else 0
    stride = n if rows > 1 else 0  # a single row begins where the tensor does: zero keeps its accesses wide
    launch(
        select_kernel, rows * chunks, places, values, residual, x, stride, n, chunks, k, rest,
        CHUNK=chunk, ZEROS=ZEROS.get(x.dtype, 0), **options_of(chunk),
    )  # fmt: skip
    return places, values


def join_(packed: Tensor, places: Tensor, values: Tensor | None, chunk: int, ok: Tensor | None = None) -> None:
    rows, count = places.shape
    tiles = triton.cdiv(count + 7, TILE)  # also of the places that are filled up to whole bytes
    launch(
        join_kernel, rows * tiles if count else 0,
        packed, places, values, byte_of(ok), packed.shape[1], topk.values_at(count, chunk), count, tiles,
        BITS=chunk.bit_length() - 1, TILE=TILE,
    )  # fmt: skip


def add_(
    out: Tensor, packed: Tensor, values: Tensor | None, weights: Tensor | None, chunk: int, k: int, rest: int,
    ok: Tensor | None = None,
) -> None:  # fmt: skip
    rows, n = len(packed), len(out)
    count = n // chunk * k + rest
    if values is None:
        packed = packed if packed.data_ptr() % 4 == 0 else packed.clone()
        values = packed[:, topk.values_at(count, chunk) :].view(torch.float32)
    total = out if out.dtype in WIDE else torch.empty_like(out, dtype=torch.float32)
    options = options_of(chunk)
    slots = options["num_warps"] * (64 if torch.version.hip else 32)  # one per thread, which writes what it has read
    launch(
        add_kernel, triton.cdiv(n, chunk) if rows else 0,
        total, None if total is out else out, packed, values, weights, byte_of(ok),
        1 / max(rows, 1), rows, packed.shape[1], values.stride(0), n, count, k, rest,
        CHUNK=chunk, SLOTS=slots, BITS=chunk.bit_length() - 1, **options, enable_fp_fusion=False,
    )  # fmt: skip
