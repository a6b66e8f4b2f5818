"""The arithmetic of `definition.py` for GPUs, with the same roundings in the same order: the same bits.

One launch steps all parameters of the same dtypes. A program takes one tile of one parameter, which it finds in tables
on the device (see `operators.py`). Full tiles have no masks, and move 16 bytes of fp32 per thread, if all addresses are
multiples of 16. The numbers of the step are arguments, or are on the device (see `numbers_kernel`).
"""

from typing import Any

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from ..blockwise.uniform_gpu import decode
from ..gpu import launch, load, mix, signed, store, uniform
from ..noise import seed_words
from . import definition
from .definition import Conditions, Update, decay_of, numbers_of
from .operators import FIELDS, SUM_TILE, TILE, StepTables

# The first line has positions in the device's numbers, after the seven of an update; the second line, in FIELDS.
FACTOR, SKIP, SEED, SEED_HIGH = (tl.constexpr(place) for place in range(7, 11))
P_AT, G_AT, U_AT, V_AT, MASTER_AT, LENGTH, START, WHOLE = (tl.constexpr(place) for place in range(len(FIELDS)))
RECORD = tl.constexpr(len(FIELDS))
COUPLED, DECOUPLED = tl.constexpr(definition.COUPLED), tl.constexpr(definition.DECOUPLED)
TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.uint8: tl.uint8}
PACKED = tl.constexpr((8, False, False))  # the FORM of packed gradients


# The arithmetic of fp32 values. Of `u` and `v`, the first `STATES` tensors are the optimizer's state. In place of a
# missing state, another tensor is passed and returned unchanged: Triton 3.6 cannot return None together with a tensor.


@triton.jit
def update(p, g, u, v, n, RULE, DECAY, NESTEROV, STATES):
    if RULE == "Lion":
        decay, old, new, kept, taken, rate, _ = n
        c = u * old + g * new
        sign = tl.where(c > 0, 1.0, tl.where(c < 0, -1.0, c))
        p = p * decay + sign * rate
        u = u * kept + g * taken
    else:
        if DECAY == DECOUPLED:
            p = p * n[0]
        elif DECAY == COUPLED:
            g = g + p * n[0]
        if RULE == "Adam":
            _, first, kept, second, root, eps, size = n
            u = u + (g - u) * first
            v = v * kept + g * second * g
            p = p + tl.div_rn(u * size, tl.div_rn(tl.sqrt_rn(v), root) + eps)
        else:
            _, kept, taken, momentum, rate, _, _ = n
            if STATES > 0:
                u = u * kept + g * taken
                g = g + u * momentum if NESTEROV else u
            p = p + g * rate
    return p, u, v


@triton.jit
def drawn(x, at, seed, seed_high):
    """Round each fp32 value to one of its two neighbours in bf16 at random."""
    chance = (uniform(at, seed, seed_high) * 65536).to(tl.uint32)
    bits = (x.to(tl.uint32, bitcast=True) + chance) >> 16
    return tl.where(x == x, bits, 0x7FC0).to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def column(record, FIELD, TYPE, WIDE):
    # With this hint a thread gets four adjacent values of any dtype, so that it holds the same values of all columns.
    pointer = tl.load(record + FIELD).to(tl.pointer_type(TYPE))
    return tl.multiple_of(pointer, 4 * (TYPE.primitive_bitwidth // 8)) if WIDE else pointer


@triton.jit
def places(tile, LINE, TILE):
    """Return the positions of a tile's values, in lines of LINE values."""
    return (tile * TILE + tl.arange(0, TILE // LINE) * LINE)[:, None] + tl.arange(0, LINE)[None, :]


@triton.jit
def gradients(record, tile, at, inside, G, WIDE, BLOCK, LINE, TILE):
    if BLOCK is None:
        return load(column(record, G_AT, G, WIDE) + at, inside).to(tl.float32)
    else:
        row, n = column(record, G_AT, tl.uint8, False), tl.load(record + LENGTH)
        begin = tile * TILE + tl.arange(0, TILE // LINE) * LINE  # of the lines
        words = (row + (n + 15) // 16 * 16 + begin // BLOCK * 8).to(tl.pointer_type(tl.uint64))
        word = load(words, None if inside is None else begin < n)
        # A thread loads four codes, and four fp32 weights (16 bytes). Rows begin at aligned addresses.
        codes = load(tl.multiple_of(row + at, [4, 4]) if WIDE else row + at, inside)
        return tl.trans(decode(tl.trans(codes), word, PACKED))  # there a block is a column


@triton.jit
def step_tile(
    record, tile, n, factor, seed, seed_high, RULE, DECAY, NESTEROV, STATES, P, G, MASTER, DRAWN, BLOCK, TILE, WIDE
):
    # A line is a block of packed gradients, or a whole tile. Masked lines are half as long, because Triton gives a
    # thread, for each shape, as many adjacent values as the widest access takes, and masked accesses take one value.
    SPAN: tl.constexpr = TILE if BLOCK is None else BLOCK
    LINE: tl.constexpr = (SPAN if SPAN < TILE else TILE) // (1 if WIDE else 2)
    at = places(tile, LINE, TILE)
    inside = None if WIDE else at < tl.load(record + LENGTH)
    p_at = column(record, P_AT, P, WIDE) + at
    weights_at = column(record, MASTER_AT, tl.float32, WIDE) + at if MASTER else p_at
    u_at = column(record, U_AT, tl.float32, WIDE) + at if STATES > 0 else None
    v_at = column(record, V_AT, tl.float32, WIDE) + at if STATES > 1 else None
    g = gradients(record, tile, at, inside, G, WIDE, BLOCK, LINE, TILE) * factor
    p = load(weights_at, inside).to(tl.float32)
    u = load(u_at, inside) if STATES > 0 else p
    v = load(v_at, inside) if STATES > 1 else p
    p, u, v = update(p, g, u, v, n, RULE, DECAY, NESTEROV, STATES)
    if STATES > 0:
        tl.store(u_at, u, inside)
    if STATES > 1:
        tl.store(v_at, v, inside)
    if MASTER:
        tl.store(weights_at, p, inside)
    if DRAWN:
        tl.store(p_at, drawn(p, tl.load(record + START) + at, seed, seed_high), inside)
    else:
        store(p_at, p, inside)


@triton.jit(do_not_specialize=["seed", "seed_high"])
def step_kernel(
    tiles_ptr, records_ptr, numbers_ptr, n0, n1, n2, n3, n4, n5, n6, factor, seed, seed_high,
    RULE: tl.constexpr, DECAY: tl.constexpr, NESTEROV: tl.constexpr, STATES: tl.constexpr, P: tl.constexpr,
    G: tl.constexpr, MASTER: tl.constexpr, DRAWN: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Step a tile. BLOCK is the block length of packed gradients; None if they are not packed."""
    if numbers_ptr is not None:
        words = numbers_ptr.to(tl.pointer_type(tl.int32))
        if tl.load(words + SKIP) != 0:
            return
        n0, n1, n2 = tl.load(numbers_ptr), tl.load(numbers_ptr + 1), tl.load(numbers_ptr + 2)
        n3, n4, n5 = tl.load(numbers_ptr + 3), tl.load(numbers_ptr + 4), tl.load(numbers_ptr + 5)
        n6, factor = tl.load(numbers_ptr + 6), tl.load(numbers_ptr + FACTOR)
        seed, seed_high = tl.load(words + SEED), tl.load(words + SEED_HIGH)
    n = (n0, n1, n2, n3, n4, n5, n6)
    entry = tl.load(tiles_ptr + tl.program_id(0))
    record = records_ptr + (entry >> 32) * RECORD
    tile = entry & 0xFFFFFFFF
    if tile < tl.load(record + WHOLE):
        step_tile(
            record, tile, n, factor, seed, seed_high,
            RULE, DECAY, NESTEROV, STATES, P, G, MASTER, DRAWN, BLOCK, TILE, True,
        )  # fmt: skip
    else:
        step_tile(
            record, tile, n, factor, seed, seed_high,
            RULE, DECAY, NESTEROV, STATES, P, G, MASTER, DRAWN, BLOCK, TILE, False,
        )  # fmt: skip


# If an input is a tensor on the device, a launch before the step computes the numbers with the fp64 arithmetic of
# `definition.py`. Its only program writes them to the device, and counts the step unless the step is skipped.

WARPS = 4  # eight values a thread: Adam, with four streams, then needs about a hundred registers


@triton.jit
def fp64(number):
    return tl.full((), number, tl.float64)


@triton.jit
def power(base, t):
    result = fp64(1.0)
    for _ in tl.static_range(31):
        result = tl.where((t & 1) != 0, result * base, result)
        base = base * base
        t = t >> 1
    return result


@triton.jit
def held(ptr, number):
    """Return the number at `ptr` in fp64; if `ptr` is None, return `number`."""
    return fp64(number) if ptr is None else tl.load(ptr).to(tl.float64)


@triton.jit(do_not_specialize=["taken", "seed", "seed_high"])
def numbers_kernel(
    numbers_ptr, lr_ptr, taken_ptr, scale_ptr, clip_ptr, found_ptr, lr: tl.float64, taken: tl.int64, scale: tl.float64,
    clip: tl.float64, o0: tl.float64, o1: tl.float64, o2: tl.float64, o3: tl.float64, seed, seed_high,
    RULE: tl.constexpr, DECAY: tl.constexpr,
):  # fmt: skip
    """Write the numbers of a step, and whether to skip the step. If it is not skipped, increase the count of steps."""
    words = numbers_ptr.to(tl.pointer_type(tl.int32))
    if found_ptr is not None:
        skip = tl.load(found_ptr) != 0
        tl.store(words + SKIP, skip.to(tl.int32))
        if skip:
            return
    else:
        tl.store(words + SKIP, 0)
    before = taken.to(tl.int64) if taken_ptr is None else tl.load(taken_ptr).to(tl.int64)
    rate, t = held(lr_ptr, lr), before + 1
    zero, o0, o1, o2, o3 = fp64(0.0), fp64(o0), fp64(o1), fp64(o2), fp64(o3)
    if RULE == "SGD":  # o: momentum, dampening, decay
        n = o2, tl.where(t == 1, zero, o0), tl.where(t == 1, fp64(1.0), 1 - o1), o0, -rate, zero, zero
    elif RULE == "Adam":  # o: β₁, β₂, ε, decay
        size, root = -(rate / (1 - power(o0, t))), tl.sqrt(1 - power(o1, t))
        n = 1 - rate * o3 if DECAY == DECOUPLED else o3, 1 - o0, o1, 1 - o1, root, o2, size
    else:  # o: β₁, β₂, decay
        n = 1 - rate * o2, o0, 1 - o0, o1, 1 - o1, -rate, zero
    for i in tl.static_range(7):
        tl.store(numbers_ptr + i, n[i].to(tl.float32))
    tl.store(numbers_ptr + FACTOR, (held(clip_ptr, clip) / held(scale_ptr, scale)).to(tl.float32))
    tl.store(words + SEED, seed)
    step_seed = seed_high.to(tl.uint32, bitcast=True) ^ mix((before + 1).to(tl.uint32))
    tl.store(words + SEED_HIGH, step_seed.to(tl.int32, bitcast=True))
    if taken_ptr is not None:
        tl.debug_barrier()  # all threads have read it; one stores
        tl.store(taken_ptr, (before + 1).to(taken_ptr.dtype.element_ty))


def step_(update: Update, tables: StepTables, conditions: Conditions, block: int | None = None) -> None:
    """Step all tensors of the tables; `block` is the block length of packed gradients."""
    c, device = conditions, tables.numbers.device
    found = (c.lr, c.taken, c.grad_scale, c.clip, c.found_inf)
    held = [x if isinstance(x, Tensor) and x.device == device else None for x in found]  # the others are on the host
    if held[-1] is None and float(c.found_inf) != 0:
        return
    constants = {"RULE": type(update).__name__, "DECAY": decay_of(update), "enable_fp_fusion": False}
    numbers: tuple[Any, ...] = (tables.numbers, *(0.0,) * 8, 0, 0)
    if any(x is not None for x in held):
        lr, taken, scale, clip, _ = (float(x) if at is None else 0.0 for x, at in zip(found, held, strict=True))
        options = [x for x in vars(update).values() if not isinstance(x, bool)]  # three, or four, as in the kernel
        launch(
            numbers_kernel, 1, tables.numbers, *held, lr, int(taken), scale, clip, *(*options, 0.0)[:4],
            *signed(seed_words(c.key or 0)), **constants, num_warps=1,
        )  # fmt: skip
    else:
        values, factor, seed = numbers_of(update, conditions)
        numbers = (None, *values, *(0.0,) * (7 - len(values)), factor, *signed(seed))
    constants |= {"NESTEROV": getattr(update, "nesterov", False), "STATES": update.states, "BLOCK": block}
    for (p, g, mastered), (tiles, records) in tables.by_kind.items():
        launch(
            step_kernel, len(tiles), tiles, records, *numbers, **constants, P=TYPES[p], G=TYPES[g],
            MASTER=mastered, DRAWN=c.key is not None and p == torch.bfloat16, TILE=TILE, num_warps=WARPS,
        )  # fmt: skip
    if isinstance(conditions.taken, Tensor) and held[1] is None:
        conditions.taken.add_(1)


TURN = 1024  # values that a program of a norm adds at a time: a sum in two stages, always in the same order


@triton.jit
def squares(record, tile, G, WIDE, TILE, TURN):
    """Return the sum of squares of a tile, `TURN` values at a time."""
    values = column(record, G_AT, G, WIDE)
    LINE: tl.constexpr = TURN if WIDE else TURN // 2  # as in a step
    total = tl.zeros((TURN // LINE, LINE), tl.float64)
    for turn in tl.range(TILE // TURN):
        at = places(tile * (TILE // TURN) + turn, LINE, TURN)
        g = load(values + at, None if WIDE else at < tl.load(record + LENGTH))
        wide = g.to(tl.float32).to(tl.float64)
        total += wide * wide
    return tl.sum(total)


@triton.jit
def partials_kernel(partials_ptr, tiles_ptr, records_ptr, G: tl.constexpr, TILE: tl.constexpr, TURN: tl.constexpr):
    entry = tl.load(tiles_ptr + tl.program_id(0))
    record = records_ptr + (entry >> 32) * RECORD
    tile = entry & 0xFFFFFFFF
    if tile < tl.load(record + WHOLE):
        total = squares(record, tile, G, True, TILE, TURN)
    else:
        total = squares(record, tile, G, False, TILE, TURN)
    tl.store(partials_ptr + tl.program_id(0), total)


@triton.jit(do_not_specialize=["count"])
def norm_kernel(norm_ptr, found_ptr, partials_ptr, count, TURN: tl.constexpr):
    total = tl.zeros((TURN,), tl.float64)
    for turn in tl.range((count + TURN - 1) // TURN):
        at = turn * TURN + tl.arange(0, TURN)
        total += tl.load(partials_ptr + at, at < count, 0)
    norm = tl.sqrt(tl.sum(total)).to(tl.float32)
    tl.store(norm_ptr, norm)
    if found_ptr is not None:
        tl.store(found_ptr, (norm - norm != 0).to(found_ptr.dtype.element_ty))


def gradient_norm_(norm: Tensor, tables: StepTables, found_inf: Tensor | None) -> None:
    """Write the gradients' norm to `norm`. Set `found_inf`, if given, to 1 if the norm is not finite, else to 0."""
    first = 0
    for (_, g, _), (tiles, records) in tables.by_kind.items():
        launch(
            partials_kernel, len(tiles), tables.partials[first:], tiles, records,
            G=TYPES[g], TILE=SUM_TILE, TURN=TURN, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
        first += len(tiles)
    launch(norm_kernel, 1, norm, found_inf, tables.partials, first, TURN=4 * TURN, num_warps=8, enable_fp_fusion=False)
