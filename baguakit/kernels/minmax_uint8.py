"""Min-max quantization: each block of values becomes one byte a value, on a grid of 256 levels that holds zero.

    step   = (high / 2 − low / 2) / 127.5            halves, so that no finite block overflows
    bottom = ⌊low · (1 / step) + ½⌋
    code   = ⌊x · (1 / step) + ½⌋ − bottom           clamped to 0 … 255
    x′     = (code + bottom) · step                  |x′ − x| ≤ (high − low) / 510 + a few ulps of the largest |x|

Every level is an integer times the step, so zero survives exactly. Three kinds of block have a step of their own:
equal values, which take that value (code 0, bottom 1: exact); a block so narrow that its step would be subnormal,
which takes 2⁻¹²⁶, the smallest normal number, so that devices that flush subnormals read the same (its error is at
most 2⁻¹²⁷); and one that holds a NaN or an infinity, which takes the NaN 0x7fc00000, bottom and codes 0, and reads as
NaN throughout. The grid reaches half a step past the block: only values within 0.4 % of the largest fp32 can read as
infinite, and no finite block as NaN.

With a `key`, rounding is stochastic and unbiased: step = (high / 2 − low / 2) / 127 and bottom = ⌊low / step⌋, so
that both neighbours of each value are levels, and the upper one is taken with probability x / step − ⌊x / step⌋,
drawn from the key and the value's position.

On the wire a row is its codes, zeros up to a multiple of 16 bytes, (step, bottom) as fp32 for each block, and zeros
up to a multiple of 16. The last block of a row holds the values that remain. Arithmetic is fp32: bf16 and fp16 are
exact in it, and fp64 is rounded to it first.

This file is the definition, and what CPU tensors take; `minmax_uint8_triton.py` holds the same arithmetic for GPUs,
and gives the same bytes.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from . import _compiled, _noise
from ._blocks import Run, aligned, blocks_of, runs_of

Do = Callable[..., None]

HEADER = 8  # bytes: step and bottom
SMALLEST = 2.0**-126
NAN = float("nan")


def row_bytes(n: int, block: int | None) -> int:
    """How many bytes a row of `n` values takes on the wire; without `block` the row is one block."""
    return aligned(n) + aligned(HEADER * blocks_of(n, block))


# The definition: values (…, width) of fp32 are blocks of `width`. It divides by tensors, because CUDA multiplies by
# the inverse of a number.


def grid(x: Tensor, intervals: float = 255.0) -> tuple[Tensor, Tensor]:
    """Return the (step, bottom) of each block, and the 1 / step that turns values into levels (NaN if broken)."""
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    spread = high * 0.5 - low * 0.5
    broken = spread - spread != 0  # amin and amax pass NaN on
    equal = (low == high) & (high != 0)
    step = torch.where(equal, high, (spread / x.new_full((1,), intervals / 2)).clamp(min=SMALLEST))
    scale = torch.where(equal, 0.0, step.reciprocal()).masked_fill(broken, NAN)
    lowest = low * scale
    lowest = torch.where(lowest.abs() < SMALLEST, 0.0, lowest)  # a GPU's floor takes subnormals for zero
    bottom = torch.where(equal, 1.0, (lowest + (intervals - 254) / 2).floor())
    return torch.cat([step.masked_fill(broken, NAN), bottom.masked_fill(broken, 0)], -1), scale


def quantize(x: Tensor, header: Tensor, scale: Tensor, draw: Tensor | None = None) -> Tensor:
    codes = (_round(x * scale, draw) - header[..., 1:]).clamp(0, 255)
    return torch.where(scale == scale, codes, 0.0).to(torch.uint8)  # what a NaN becomes in uint8 is undefined


def _round(level: Tensor, draw: Tensor | None) -> Tensor:
    if draw is None:
        return (level + 0.5).floor()
    below = level.floor()
    return below + (level - below > draw).float()


def dequantize(codes: Tensor, header: Tensor) -> Tensor:
    return (codes.float() + header[..., 1:]) * header[..., :1]


# What is done to a run of blocks, overwriting the first arguments: the units that a CPU compiles. A grid is a unit of
# its own because Inductor would otherwise compute it again for each value.


def measure_(header: Tensor, scale: Tensor, x: Tensor) -> None:
    found = grid(x)
    header.copy_(found[0])
    scale.copy_(found[1])


def measure_for_draws_(header: Tensor, scale: Tensor, x: Tensor) -> None:
    found = grid(x, intervals=254.0)
    header.copy_(found[0])
    scale.copy_(found[1])


def encode_(codes: Tensor, header: Tensor, scale: Tensor, x: Tensor) -> None:
    codes.copy_(quantize(x, header, scale))


def encode_by_draws_(codes: Tensor, header: Tensor, scale: Tensor, x: Tensor, start_and_seed: Tensor) -> None:
    position = start_and_seed[0] + torch.arange(x.numel(), device=x.device).view(x.shape)
    codes.copy_(quantize(x, header, scale, _noise.uniform(position, start_and_seed[1:])))


def decode_(out: Tensor, codes: Tensor, header: Tensor) -> None:
    out.copy_(dequantize(codes, header))


def accumulate_(total: Tensor, weights: Tensor, *rows: Tensor) -> None:
    """Add rows, given as codes and headers in turn, each times its weight."""
    value = total
    for row in range(len(rows) // 2):
        value = value + dequantize(rows[2 * row], rows[2 * row + 1]) * weights[row]
    total.copy_(value)


def keep_loss_(residual: Tensor, x: Tensor, codes: Tensor, header: Tensor) -> None:
    residual.copy_(x - dequantize(codes, header))


def add_loss_(residual: Tensor, x: Tensor, codes: Tensor, header: Tensor, times: Tensor) -> None:
    residual.copy_(residual + (x - dequantize(codes, header)) * times)


# The operations on rows: each walks over runs of whole blocks, then over the block of what remains.


def _parts(packed: Tensor, n: int, block: int | None) -> tuple[Tensor, Tensor]:
    """Return the codes of each row and its (step, bottom) pairs, as views."""
    count = blocks_of(n, block)
    headers = packed[:, aligned(n) : aligned(n) + HEADER * count].view(torch.float32)
    return packed[:, :n], headers.unflatten(1, (count, 2))


def empty(rows: int, n: int, block: int | None, device: torch.device) -> Tensor:
    packed = torch.empty(rows, row_bytes(n, block), dtype=torch.uint8, device=device)
    for unused in (packed[:, n : aligned(n)], packed[:, aligned(n) + HEADER * blocks_of(n, block) :]):
        if unused.numel():
            unused.zero_()
    return packed


def _encode_(do: Do, codes: Tensor, header: Tensor, x: Tensor, start: int, key: int | None) -> None:
    scale = torch.empty_like(header[..., :1])
    if key is None:
        do(measure_, header, scale, x)
        do(encode_, codes, header, scale, x)
    else:
        do(measure_for_draws_, header, scale, x)
        do(encode_by_draws_, codes, header, scale, x, _noise.start_and_seed(start, key, x.device))


def _add_rows_(do: Do, total: Tensor, run: Run, codes: Tensor, headers: Tensor, weights: Tensor) -> None:
    parts = [part for code, header in zip(codes, headers, strict=True) for part in (run.of(code), run.headers(header))]
    first = 0
    while first < len(codes):
        count = 4 if first + 4 <= len(codes) else 1  # one pass over the total adds four rows
        do(accumulate_, total, weights[first : first + count], *parts[2 * first : 2 * (first + count)])
        first += count


def compress(x: Tensor, block: int | None, residual: Tensor | None = None, key: int | None = None) -> Tensor:
    rows, n = x.shape
    packed, do = empty(rows, n, block, x.device), _compiled.runner(rows, n)
    if not x.numel():
        return packed
    codes, headers = _parts(packed, n, block)
    for row in _rows(rows, do, key):
        for run in runs_of(n, block):
            values, code, header = run.of(x[row]).float(), run.of(codes[row]), run.headers(headers[row])
            start = 0 if isinstance(row, slice) else row * n + run.columns.start
            _encode_(do, code, header, values, start, key)
            if residual is not None:
                do(keep_loss_, run.of(residual[row]), values, code, header)
    return packed


def decompress_(out: Tensor, packed: Tensor, block: int | None) -> None:
    rows, n = out.shape
    if not out.numel():
        return
    codes, headers = _parts(packed, n, block)
    do = _compiled.runner(rows, n)
    for row in _rows(rows, do):
        for run in runs_of(n, block):
            do(decode_, run.of(out[row]), run.of(codes[row]), run.headers(headers[row]))


def add_(out: Tensor, packed: Tensor, weights: Tensor, block: int | None) -> None:
    n = out.shape[0]
    if not n:
        return
    codes, headers = _parts(packed, n, block)
    for run in runs_of(n, block):
        total = run.of(out).float()
        _add_rows_(_compiled.runner(len(packed), n), total, run, codes, headers, weights)
        if out.dtype != torch.float32:
            run.of(out).copy_(total)


def reduce(packed: Tensor, n: int, block: int | None, residual: Tensor | None = None, key: int | None = None) -> Tensor:
    sent, do = empty(1, n, block, packed.device), _compiled.runner(len(packed), n)
    if not n:
        return sent
    (codes, headers), (sent_codes, sent_headers) = _parts(packed, n, block), _parts(sent, n, block)
    ones = torch.ones(len(packed), device=packed.device)
    rows = ones.new_full((1,), len(packed))
    for run in runs_of(n, block):
        mean = torch.zeros_like(run.of(codes[0]), dtype=torch.float32)
        _add_rows_(do, mean, run, codes, headers, ones)
        mean /= rows
        code, header = run.of(sent_codes[0]), run.headers(sent_headers[0])
        _encode_(do, code, header, mean, run.columns.start, key)
        if residual is not None:
            do(add_loss_, run.of(residual), mean, code, header, rows)
    return sent


def _rows(rows: int, do: Do, key: int | None = None) -> list[slice] | range:
    # Together saves calls; but compiled units know two dimensions, and draws one start.
    return [slice(None)] if do is _compiled.plain and key is None else range(rows)
