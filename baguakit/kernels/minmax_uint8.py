"""Min-max quantization: each block of values becomes one byte a value, on a grid of 256 levels that holds zero.

    step   = (high / 2 − low / 2) / 127.5            halves, so that no finite block overflows
    bottom = ⌊low · (1 / step) + ½⌋
    code   = ⌊x · (1 / step) + ½⌋ − bottom           clamped to 0 … 255
    x′     = (code + bottom) · step                  |x′ − x| ≤ (high − low) / 510, and a few ulps of the block's largest value

Every level is an integer times the step, so zero survives exactly. Three kinds of block have a step of their own: equal values, which take that
value (code 0, bottom 1: exact); a block so narrow that its step would be subnormal, which takes 2⁻¹²⁶, the smallest normal number, so that
devices that flush subnormals read the same (its error is at most 2⁻¹²⁷); and one that holds a NaN or an infinity, which takes the NaN 0x7fc00000,
bottom and codes 0, and reads as NaN throughout. The grid reaches half a step past the block: only values within 0.4 % of the largest fp32 can
read as infinite, and no finite block as NaN.

With a `key`, rounding is stochastic and unbiased: step = (high / 2 − low / 2) / 127 and bottom = ⌊low / step⌋, so that both neighbours of each value
are levels, and the upper one is taken with probability x / step − ⌊x / step⌋, drawn from the key and the value's position.

On the wire a row is its codes, zeros up to a multiple of 16 bytes, (step, bottom) as fp32 for each block, and zeros up to a multiple of 16. The
last block of a row holds the values that remain. Arithmetic is fp32: bf16 and fp16 are exact in it, and fp64 is rounded to it first.

This file is the definition, and what CPU tensors take; `minmax_uint8_triton.py` holds the same arithmetic for GPUs, and gives the same bytes.
"""

from typing import Any

import torch
from torch import Tensor

from . import _compiled, _noise
from ._blocks import Run, aligned, blocks_of, rows_of, runs_of

HEADER = 8  # bytes: step and bottom
SMALLEST = 2.0**-126
NAN = float("nan")


def row_bytes(n: int, block: int | None) -> int:
    """How many bytes a row of `n` values takes on the wire; without `block` the row is one block."""
    return aligned(n) + aligned(HEADER * blocks_of(n, block))


# The definition: values (…, width) of fp32 are blocks of `width`. It divides by tensors, because CUDA turns `x / 127.5` into `x * (1 / 127.5)`.


def quantize(x: Tensor, draw: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the codes of each block, and its (step, bottom)."""
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    spread = high * 0.5 - low * 0.5
    broken = spread - spread != 0  # amin and amax pass NaN on
    equal = (low == high) & (high != 0)
    step = (spread / x.new_full((1,), 127.5 if draw is None else 127.0)).clamp(min=SMALLEST)
    step = torch.where(equal, high, step)
    scale = torch.where(equal | broken, 0.0, step.reciprocal())
    bottom = torch.where(equal, 1.0, (low * scale + (0.5 if draw is None else 0.0)).floor())
    codes = (_round(x * scale, draw) - bottom).clamp(0, 255)
    header = torch.cat([step.masked_fill(broken, NAN), bottom.masked_fill(broken, 0)], -1)
    return codes.masked_fill(broken, 0).to(torch.uint8), header


def _round(level: Tensor, draw: Tensor | None) -> Tensor:
    if draw is None:
        return (level + 0.5).floor()
    below = level.floor()
    return below + (level - below > draw).float()


def dequantize(codes: Tensor, header: Tensor) -> Tensor:
    step, bottom = header[..., :1], header[..., 1:]
    return (codes.float() + bottom) * step


# What is done to a run of blocks, overwriting the first arguments: the units that a CPU compiles.


def encode_(codes: Tensor, header: Tensor, x: Tensor) -> None:
    quantized = quantize(x)
    codes.copy_(quantized[0])
    header.copy_(quantized[1])


def encode_at_random_(codes: Tensor, header: Tensor, x: Tensor, start_and_seed: Tensor) -> None:
    position = start_and_seed[0] + torch.arange(x.numel(), device=x.device).view(x.shape)
    quantized = quantize(x, _noise.uniform(position, start_and_seed[1:]))
    codes.copy_(quantized[0])
    header.copy_(quantized[1])


def decode_(out: Tensor, codes: Tensor, header: Tensor) -> None:
    out.copy_(dequantize(codes, header))


def accumulate_(total: Tensor, codes: Tensor, header: Tensor, weight: Tensor) -> None:
    total.copy_(total + dequantize(codes, header) * weight)


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


def _empty(rows: int, n: int, block: int | None, device: torch.device) -> Tensor:
    packed = torch.empty(rows, row_bytes(n, block), dtype=torch.uint8, device=device)
    packed[:, n : aligned(n)] = 0
    packed[:, aligned(n) + HEADER * blocks_of(n, block) :] = 0
    return packed


def _encode_(codes: Tensor, header: Tensor, x: Tensor, start: int, key: int | None) -> None:
    if key is None:
        _compiled.call(encode_, codes, header, x)
    else:
        _compiled.call(encode_at_random_, codes, header, x, _noise.start_and_seed(start, key, x.device))


def compress_definition(x: Tensor, block: int | None, residual: Tensor | None = None, key: int | None = None) -> Tensor:
    packed = _empty(*x.shape, block, x.device)
    if not packed.numel():
        return packed
    codes, headers = _parts(packed, x.shape[1], block)
    for row in rows_of(*x.shape, together=key is None):
        for run in runs_of(x.shape[1], block):
            values, code, header = run.of(x[row]).float(), run.of(codes[row]), run.headers(headers[row])
            _encode_(code, header, values, 0 if isinstance(row, slice) else row * x.shape[1] + run.columns.start, key)
            if residual is not None:
                _compiled.call(keep_loss_, run.of(residual[row]), values, code, header)
    return packed


def decompress_definition_(out: Tensor, packed: Tensor, block: int | None) -> None:
    if not out.numel():
        return
    codes, headers = _parts(packed, out.shape[1], block)
    for row in rows_of(*out.shape):
        for run in runs_of(out.shape[1], block):
            _compiled.call(decode_, run.of(out[row]), run.of(codes[row]), run.headers(headers[row]))


def add_definition_(out: Tensor, packed: Tensor, weights: Tensor, block: int | None) -> None:
    if not out.numel():
        return
    codes, headers = _parts(packed, out.shape[0], block)
    for run in runs_of(out.shape[0], block):
        total = run.of(out).float()
        _add_rows_(total, run, codes, headers, weights)
        if out.dtype != torch.float32:
            run.of(out).copy_(total)


def _add_rows_(total: Tensor, run: Run, codes: Tensor, headers: Tensor, weights: Tensor) -> None:
    for row in range(codes.shape[0]):
        _compiled.call(accumulate_, total, run.of(codes[row]), run.headers(headers[row]), weights[row : row + 1])


def reduce_definition(
    packed: Tensor, n: int, block: int | None, residual: Tensor | None = None, key: int | None = None
) -> Tensor:
    sent = _empty(1, n, block, packed.device)
    if not n:
        return sent
    codes, headers = _parts(packed, n, block)
    sent_codes, sent_headers = _parts(sent, n, block)
    weights, rows = (
        packed.new_ones(packed.shape[0], dtype=torch.float32),
        packed.new_full((1,), packed.shape[0], dtype=torch.float32),
    )
    for run in runs_of(n, block):
        mean = torch.zeros_like(run.of(codes[0]), dtype=torch.float32)
        _add_rows_(mean, run, codes, headers, weights)
        mean /= rows
        code, header = run.of(sent_codes[0]), run.headers(sent_headers[0])
        _encode_(code, header, mean, run.columns.start, key)
        if residual is not None:
            _compiled.call(add_loss_, run.of(residual), mean, code, header, rows)
    return sent


# The operators. Triton is imported by the first CUDA tensor; one range for a whole row has no kernel and takes the definition on any device.


@torch.library.custom_op("baguakit::minmax_uint8_compress", mutates_args={"residual"})
def compress(x: Tensor, block: int | None, residual: Tensor | None = None, key: int | None = None) -> Tensor:
    """Return the packed rows of `x` (rows, n); `residual` (fp32, same shape) receives what they lost, rounded to fp32."""
    return _for(x, block).compress(x, block, residual, key)


@torch.library.custom_op("baguakit::minmax_uint8_decompress_", mutates_args={"out"})
def decompress_(out: Tensor, packed: Tensor, block: int | None) -> None:
    """Write the values of each packed row into `out` (rows, n)."""
    _for(packed, block).decompress_(out, packed, block)


@torch.library.custom_op("baguakit::minmax_uint8_add_", mutates_args={"out"})
def add_(out: Tensor, packed: Tensor, weights: Tensor, block: int | None) -> None:
    """Add the packed rows, each times its weight (fp32), one after another to `out` (n,); the sum is kept in fp32 until all are added."""
    _for(packed, block).add_(out, packed, weights, block)


@torch.library.custom_op("baguakit::minmax_uint8_reduce", mutates_args={"residual"})
def reduce(packed: Tensor, n: int, block: int | None, residual: Tensor | None = None, key: int | None = None) -> Tensor:
    """Return the mean of the packed rows, summed in their order and divided by their number, packed again.

    To `residual` (fp32, (n,)) is added the number of rows times what the second packing lost.
    """
    return _for(packed, block).reduce(packed, n, block, residual, key)


@compress.register_fake
def _(x: Tensor, block: int | None, residual: Tensor | None = None, key: int | None = None) -> Tensor:
    return x.new_empty(x.shape[0], row_bytes(x.shape[1], block), dtype=torch.uint8)


@reduce.register_fake
def _(packed: Tensor, n: int, block: int | None, residual: Tensor | None = None, key: int | None = None) -> Tensor:
    return packed.new_empty(1, row_bytes(n, block))


class _Definition:
    compress = staticmethod(compress_definition)
    decompress_ = staticmethod(decompress_definition_)
    add_ = staticmethod(add_definition_)
    reduce = staticmethod(reduce_definition)


def _for(values: Tensor, block: int | None) -> Any:
    if block is None or not values.is_cuda:
        return _Definition
    from . import minmax_uint8_triton

    return minmax_uint8_triton
