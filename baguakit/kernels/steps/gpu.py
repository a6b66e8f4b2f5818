"""The arithmetic of `definition.py` for GPUs: the same roundings in the same order, so the same bits.

One launch steps all tensors: a program takes a tile of one of them, and finds in tables on the device which (see
`table.py`). Tiles that are whole, of tensors whose addresses are all multiples of 16, have no masks and move 16
bytes of fp32 a thread. The numbers of the step are arguments, or lie on the device (see `launch.py`).
"""

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from ..formats.uniform_gpu import decode
from ..shared.gpu import load, store, uniform
from .table import FIELDS

# Places among the numbers on the device, behind the seven of the update rule; and among the FIELDS of a record.
FACTOR, SKIP, SEED, SEED_HIGH = (tl.constexpr(place) for place in range(7, 11))
P_AT, G_AT, U_AT, V_AT, MASTER_AT, LENGTH, START, WHOLE = (tl.constexpr(place) for place in range(len(FIELDS)))
RECORD = tl.constexpr(len(FIELDS))
COUPLED, DECOUPLED = tl.constexpr(1), tl.constexpr(2)  # what a decay is added to: gradients, or weights
TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.uint8: tl.uint8}
PACKED = tl.constexpr((8, False, False))  # the FORM of packed gradients


# The arithmetic of fp32 values. `u` and `v` are what the optimizer remembers, `STATES` of them; in place of one that it
# lacks stands any tensor, unused and returned as it came: Triton 3.6 cannot return None beside a tensor.


@triton.jit
def sgd(p, g, b, decay, kept, taken, momentum, rate, DECAY: tl.constexpr, NESTEROV: tl.constexpr, STATES: tl.constexpr):
    if DECAY == COUPLED:
        g = g + p * decay
    if STATES > 0:
        b = b * kept + g * taken
        g = g + b * momentum if NESTEROV else b
    return p + g * rate, b


@triton.jit
def adam(p, g, m, v, decay, first, kept, second, root, eps, size, DECAY: tl.constexpr):
    if DECAY == DECOUPLED:
        p = p * decay
    elif DECAY == COUPLED:
        g = g + p * decay
    m = m + (g - m) * first
    v = v * kept + g * second * g
    return p + tl.div_rn(m * size, tl.div_rn(tl.sqrt_rn(v), root) + eps), m, v


@triton.jit
def lion(p, g, m, decay, old, new, kept, taken, rate):
    c = m * old + g * new
    sign = tl.where(c > 0, 1.0, tl.where(c < 0, -1.0, c))
    return p * decay + sign * rate, m * kept + g * taken


@triton.jit
def update(p, g, u, v, n, RULE: tl.constexpr, DECAY: tl.constexpr, NESTEROV: tl.constexpr, STATES: tl.constexpr):
    if RULE == "SGD":
        p, u = sgd(p, g, u, n[0], n[1], n[2], n[3], n[4], DECAY, NESTEROV, STATES)
    elif RULE == "Adam":
        p, u, v = adam(p, g, u, v, n[0], n[1], n[2], n[3], n[4], n[5], n[6], DECAY)
    else:
        p, u = lion(p, g, u, n[0], n[1], n[2], n[3], n[4], n[5])
    return p, u, v


@triton.jit
def drawn(x, at, seed, seed_high):
    """Round fp32 values to one of their neighbours in bf16 at random."""
    chance = (uniform(at, seed, seed_high) * 65536).to(tl.uint32)
    bits = (x.to(tl.uint32, bitcast=True) + chance) >> 16
    return tl.where(x == x, bits, 0x7FC0).to(tl.uint16).to(tl.bfloat16, bitcast=True)


# Moving a tile.


@triton.jit
def column(record, FIELD: tl.constexpr, TYPE: tl.constexpr, WIDE: tl.constexpr):
    # Four values a thread whatever their type, so that those of all columns meet in one thread without being moved.
    pointer = tl.load(record + FIELD).to(tl.pointer_type(TYPE))
    return tl.multiple_of(pointer, 4 * (TYPE.primitive_bitwidth // 8)) if WIDE else pointer


@triton.jit
def places(tile, LINE: tl.constexpr, TILE: tl.constexpr):
    """Return the places of a tile's values, in lines."""
    return lines(tile, LINE, TILE)[:, None] + tl.arange(0, LINE)[None, :]


@triton.jit
def lines(tile, LINE: tl.constexpr, TILE: tl.constexpr):
    """Return the first places of a tile's lines."""
    return tile * TILE + tl.arange(0, TILE // LINE) * LINE


@triton.jit
def gradients(
    record, tile, at, inside,
    G: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr, LINE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    if BLOCK is None:
        return load(column(record, G_AT, G, WIDE) + at, inside).to(tl.float32)
    else:
        row, n = column(record, G_AT, tl.uint8, False), tl.load(record + LENGTH)
        begin = lines(tile, LINE, TILE)
        words = (row + (n + 15) // 16 * 16 + begin // BLOCK * 8).to(tl.pointer_type(tl.uint64))
        word = load(words, None if inside is None else begin < n)
        # As many codes a thread as it has fp32 weights in 16 bytes. A row begins on such an address by itself.
        codes = load(tl.multiple_of(row + at, [4, 4]) if WIDE else row + at, inside)
        return tl.trans(decode(tl.trans(codes), word, PACKED))  # there a block is a column


@triton.jit
def step_tile(
    record, tile, n, factor, seed, seed_high,
    RULE: tl.constexpr, DECAY: tl.constexpr, NESTEROV: tl.constexpr, STATES: tl.constexpr, P: tl.constexpr,
    G: tl.constexpr, MASTER: tl.constexpr, DRAWN: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    # Lines are blocks of packed gradients, or the tile; half as long where values move one by one. For Triton gives a
    # thread as many neighbouring values as the widest access to tensors of the same shape takes; those of the other
    # branch are of another, so that here neighbours belong to neighbouring threads.
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
    """Step a tile. BLOCK is that of packed gradients; None if they are not packed."""
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
