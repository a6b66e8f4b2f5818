"""The GPU kernels for the k largest values of each chunk: the same bytes as the definition. The host does not wait.

A program of `select_kernel` takes a chunk. If less than an eighth is kept, it does so in three steps, and each has
fewer sizes to compare:

    1  the maxima of groups of eight or four neighbours. The k-th largest maximum bounds the threshold from below, so
       what is kept is in the groups of the k largest.
    2  the values of these groups
    3  those that may be kept

Each step bisects the range of its sizes: steps 1 and 2 until k to 2 k sizes reach the tried one, step 3 until k do. The
places of those are written where those of the kept values will be, and the next step reads them. Otherwise there is
only step 3, over the whole chunk. A program of `add_kernel` takes one chunk of all rows; after each row it waits until
all its threads have added their values.
"""

from typing import Any

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from . import topk
from .gpu import byte_of, launch, load, rounded, store
from .mixing import WIDE

SIZE, INFINITY = tl.constexpr(topk.SIZE), tl.constexpr(topk.INFINITY)
READ, TILE = 1024, 512  # values that a program of `select_kernel` reads at once, and places that one packs
ZEROS: dict[Any, int] = {torch.bfloat16: 16, torch.float16: 13}  # the lowest bits of a size
# The limit of registers per thread. If few values are kept, a warp takes a chunk alone and waits for no other; with the
# limit a multiprocessor has 25 of them: while some compute, others read. A few values are spilled.
REGISTERS = 80


@triton.jit
def divided(at, left):
    """Return two masks: of the values in complete groups of four, which move together, and of the other values."""
    whole = at // 4 * 4 + 3 < left
    return whole, (at < left) & ~whole


@triton.jit
def load_chunk(chunk_ptr, at, left, CHUNK):
    """Return the values at places of a chunk in fp32, with zeros after the `left` existing values."""
    if left == CHUNK:
        v = tl.load(chunk_ptr + at).to(tl.float32)
    else:
        whole, others = divided(at, left)
        v = tl.load(chunk_ptr + at, whole, 0).to(tl.float32)
        v = tl.where(whole, v, tl.load(chunk_ptr + at, others, 0).to(tl.float32))
    return v


@triton.jit
def store_chunk(chunk_ptr, at, v, left, CHUNK):
    if left == CHUNK:
        tl.store(chunk_ptr + at, v)
    else:
        whole, others = divided(at, left)
        tl.store(chunk_ptr + at, v, whole)
        tl.store(chunk_ptr + at, v, others)


@triton.jit
def size_of(v, inside, ZEROS):
    """Return the sizes of values; all NaNs have one, and a value that is not inside has −1."""
    return tl.where(inside, tl.minimum(v.to(tl.int32, bitcast=True) & SIZE, INFINITY + (1 << ZEROS)), -1)


@triton.jit
def reaching(size, least):
    """Count the sizes that reach `least`."""
    return -tl.sum((least - 1 - size) >> 31)  # fewer instructions than comparisons


@triton.jit
def ranks(found):
    """Return the rank of each one among zeros and ones. Both halves are summed at once, in 16 bits each."""
    a, b = tl.split(tl.trans(tl.reshape(found, (2, found.numel // 2))))
    both = tl.cumsum(a + (b << 16), 0)
    first = both & 0xFFFF
    return tl.reshape(tl.trans(tl.join(first, (both >> 16) + tl.max(first))), (found.numel,)) - 1


@triton.jit
def largest(size, low, count, k, most):
    """Find `k` to `most` of the largest sizes; of equals the first. The `count` ≥ `k` sizes that reach `low` are known.

    Return a mask of the found sizes, their ranks by place, the least of them, and their number.
    """
    high = tl.max(size) + 1
    while (high - low > 1) & (count > most):
        middle = low + (high - low) // 2
        tried = reaching(size, middle)
        enough = tried >= k
        low, high = tl.where(enough, middle, low), tl.where(enough, high, middle)
        count = tl.where(enough, tried, count)
    if count > most:  # of the sizes that equal `low`, the last are too many
        equal = (size == low).to(tl.int32)
        size = tl.where((equal > 0) & (tl.cumsum(equal, 0) > tl.sum(equal) - (count - k)), -2, size)
        count = k
    found = size >= low
    return found, ranks(found.to(tl.int32)), low, count


@triton.jit
def with_tile(maxima, tile, x_ptr, residual_ptr, at, inside):
    """Return `maxima` with those of a tile in row `tile`: NaN of a group with one. Copy the tile to the residual."""
    v = load(x_ptr + tile * at.numel + at, inside).to(tl.float32)
    if residual_ptr is not None:
        store(residual_ptr + tile * at.numel + at, v, inside)
    found = tl.abs(v) if inside is None else tl.where(inside, tl.abs(v), -1.0)
    for step in tl.static_range(3):
        if 1 << step < at.shape[1]:
            a, b = tl.split(tl.reshape(found, (found.numel // 2, 2)))
            found = tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
    return tl.where(tl.arange(0, maxima.shape[0])[:, None] == tile, found[None, :], maxima)


@triton.jit
def sizes_of_groups(x_ptr, residual_ptr, left, CHUNK, TILE, GROUP, ZEROS):
    """Return the size of each group's maximum, −1 of an absent group; copy the values to `residual`."""
    at = tl.arange(0, TILE // GROUP)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    maxima, whole = tl.full((CHUNK // TILE, TILE // GROUP), -1.0, tl.float32), left // TILE
    for tile in range(whole):
        maxima = with_tile(maxima, tile, x_ptr, residual_ptr, at, None)
    if whole * TILE < left:
        maxima = with_tile(maxima, whole, x_ptr, residual_ptr, at, at < left - whole * TILE)
    return tl.minimum(tl.maximum(tl.ravel(maxima).to(tl.int32, bitcast=True), -1), INFINITY + (1 << ZEROS))


@triton.jit(do_not_specialize=["n", "chunks", "k", "rest"])
def select_kernel(
    places_ptr, values_ptr, residual_ptr, x_ptr, stride, n, chunks, k, rest,
    CHUNK: tl.constexpr, TILE: tl.constexpr, GROUP: tl.constexpr, SLOTS: tl.constexpr, ZEROS: tl.constexpr,
):  # fmt: skip
    row, chunk = (tl.program_id(0) // chunks).to(tl.int64), tl.program_id(0) % chunks
    start, slot = row * stride + chunk.to(tl.int64) * CHUNK, row * (n // CHUNK * k + rest) + chunk.to(tl.int64) * k
    left = tl.minimum(n - chunk.to(tl.int64) * CHUNK, CHUNK).to(tl.int32)
    wanted = tl.where(left == CHUNK, k, rest)
    x_ptr += start
    residual_ptr = None if residual_ptr is None else residual_ptr + start
    if SLOTS * GROUP < CHUNK:
        most, slots = tl.minimum(2 * wanted, SLOTS), tl.arange(0, SLOTS)
        found_ptr = (places_ptr + slot).to(tl.pointer_type(tl.int16))  # there is room for twice as many
        size = sizes_of_groups(x_ptr, residual_ptr, left, CHUNK, TILE, GROUP, ZEROS)
        found, ranked, low, count = largest(size, tl.min(size), tl.cast(CHUNK // GROUP, tl.int32), wanted, most)
        tl.store(found_ptr + ranked, tl.arange(0, CHUNK // GROUP).to(tl.int16), found)
        tl.debug_barrier()
        inside = slots < count
        group = tl.load(found_ptr + slots, inside, 0).to(tl.int32)
        tl.debug_barrier()
        at = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        v = load_chunk(x_ptr, at, left, CHUNK)
        size = tl.ravel(size_of(v, inside[:, None] & (at < left), ZEROS))
        found, ranked, low, count = largest(size, low, reaching(size, low), wanted, most)
        tl.store(found_ptr + ranked, tl.ravel(at).to(tl.int16), found)
        tl.debug_barrier()
        inside = slots < count
        at = tl.load(found_ptr + slots, inside, 0).to(tl.int32)
        v = tl.load(x_ptr + at).to(tl.float32)
    else:
        at, low, count = tl.arange(0, CHUNK), 0, left
        v, inside = load_chunk(x_ptr, at, left, CHUNK), at < left
        if residual_ptr is not None:
            store_chunk(residual_ptr, at, v, left, CHUNK)
    tl.debug_barrier()
    size = size_of(v, inside, ZEROS) >> ZEROS
    kept, ranked, _, _ = largest(size, (low + (1 << ZEROS) - 1) >> ZEROS, count, wanted, wanted)
    tl.store(places_ptr + slot + ranked, at, kept)
    tl.store(values_ptr + slot + ranked, tl.where(v == v, v, float("nan")), kept)
    if residual_ptr is not None:
        tl.store(residual_ptr + at, v - v, kept)


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
        store_chunk(total_ptr, tl.arange(0, CHUNK), tl.zeros((CHUNK,), tl.float32), left, CHUNK)
    elif out_ptr is not None:
        at = tl.arange(0, CHUNK)
        store_chunk(total_ptr, at, load_chunk(out_ptr + chunk * CHUNK, at, left, CHUNK), left, CHUNK)
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
        at = tl.arange(0, CHUNK)
        result = rounded(load_chunk(total_ptr, at, left, CHUNK), out_ptr.dtype.element_ty)
        store_chunk(out_ptr + chunk * CHUNK, at, result, left, CHUNK)
        broken = (~(tl.abs(result.to(tl.float32)) < float("inf"))).to(tl.int32)
    if ok_ptr is not None:
        tl.store(ok_ptr, 0, tl.max(broken, 0) > 0)


def options_of(values: int, each: int = 16) -> dict[str, Any]:
    """Return the launch options of a kernel whose programs hold so many values, `each` in a thread."""
    warps = max(1, values // (32 * each))
    return {"num_warps": warps} | ({} if torch.version.hip else {"maxnreg": REGISTERS})


def form_of(chunk: int, k: int, dtype: torch.dtype | None) -> dict[str, Any]:
    """Return the constants and launch options of `select_kernel` for at most `k` values of a chunk."""
    slots = max(2, 1 << (k - 1).bit_length())
    group = 8 if slots * 32 <= chunk else 4
    constants = {"CHUNK": chunk, "TILE": min(chunk, READ), "GROUP": group, "SLOTS": slots, "ZEROS": ZEROS.get(dtype, 0)}
    return constants | options_of(min(slots * group, chunk), 32)


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
        **form_of(chunk, max(k, rest), x.dtype),
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
