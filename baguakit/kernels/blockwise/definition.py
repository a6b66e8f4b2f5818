"""The operations of all blockwise formats: packing, unpacking, adding and averaging rows of values.

This file is the definition, and what CPU tensors take; `launch.py` does the same on GPUs, and gives the same
bytes. The definition divides by tensors, because CUDA multiplies by the inverse of a number.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ..cpu import units
from ..shared import noise
from .format import Format
from .layout import Run, join, runs_of, split, stripes

Do = Callable[..., None]


# What is done to a run of blocks, overwriting the first arguments: the units that a CPU compiles. To measure is one of
# its own because Inductor would otherwise do again for each value what is done once for a block.


def measure_(header: Tensor, scale: Tensor, x: Tensor, format: Format, drawn: bool) -> None:
    found = format.measure(x.float(), drawn)
    header.copy_(found[0])
    scale.copy_(found[1])


def encode_(codes: Tensor, header: Tensor, scale: Tensor, x: Tensor, format: Format) -> None:
    codes.copy_(join(format.encode(x.float(), header, scale, None), format.bits))


def encode_by_draws_(
    codes: Tensor, header: Tensor, scale: Tensor, x: Tensor, start_and_seed: Tensor, format: Format
) -> None:
    position = start_and_seed[0] + torch.arange(x.numel(), device=x.device).view(x.shape)
    draw = noise.uniform(position, start_and_seed[1:])
    codes.copy_(join(format.encode(x.float(), header, scale, draw), format.bits))


def unpack_(out: Tensor, codes: Tensor, header: Tensor, format: Format) -> None:
    _write_(out, _values(codes, header, format), format)


def accumulate_(total: Tensor, weights: Tensor, format: Format, *rows: Tensor) -> None:
    """Add rows, given as codes and headers in turn, each times its weight."""
    value = stripes(total, format.bits)
    for row in range(len(rows) // 2):
        value = value + _values(rows[2 * row], rows[2 * row + 1], format) * weights[row]
    _write_(total, value, format)


def keep_loss_(residual: Tensor, x: Tensor, codes: Tensor, header: Tensor, format: Format) -> None:
    _write_(residual, stripes(x.float(), format.bits) - _values(codes, header, format), format)


def add_loss_(residual: Tensor, x: Tensor, codes: Tensor, header: Tensor, times: Tensor, format: Format) -> None:
    lost = stripes(x, format.bits) - _values(codes, header, format)
    _write_(residual, stripes(residual, format.bits) + lost * times, format)


def _values(codes: Tensor, header: Tensor, format: Format) -> Tensor:
    """The values of blocks in the stripes of their codes: so seen, neighbours in memory are neighbours for a CPU."""
    return format.decode(split(codes, format.bits), header.unsqueeze(-2))


def _write_(out: Tensor, striped: Tensor, format: Format) -> None:
    if out.shape[-1] % striped.shape[-2]:
        out.copy_(striped.flatten(-2)[..., : out.shape[-1]])
    else:
        stripes(out, format.bits).copy_(striped)


# The operations on rows: each walks over runs of whole blocks, then over the block of what remains.


def compress(
    format: Format, x: Tensor, block: int | None, residual: Tensor | None = None, key: int | None = None
) -> Tensor:
    """Return the packed rows of `x` (rows, n); `residual` (fp32, same shape) receives what they lost."""
    rows, n = x.shape
    packed = format.empty(rows, n, block, x.device)
    if not x.numel():
        return packed
    codes, headers = format.parts(packed, n, block)
    for run in runs_of(n, block):
        do = _runner(rows, n, run)
        for row in _rows(rows, do, key):
            values, code, header = run.of(x[row]), run.codes(codes[row], format.bits), run.headers(headers[row])
            start = 0 if isinstance(row, slice) else row * n + run.columns.start
            _pack_(do, code, header, values, start, key, format)
            if residual is not None:
                do(keep_loss_, run.of(residual[row]), values, code, header, format)
    return packed


def decompress_(format: Format, out: Tensor, packed: Tensor, block: int | None) -> None:
    """Write the values of each packed row into `out` (rows, n)."""
    rows, n = out.shape
    if not out.numel():
        return
    codes, headers = format.parts(packed, n, block)
    for run in runs_of(n, block):
        do = _runner(rows, n, run)
        for row in _rows(rows, do):
            do(unpack_, run.of(out[row]), run.codes(codes[row], format.bits), run.headers(headers[row]), format)


def add_(format: Format, out: Tensor, packed: Tensor, weights: Tensor, block: int | None) -> None:
    """Add the packed rows, each times its weight (fp32), one after another to `out` (n,), all in fp32."""
    n = out.shape[0]
    if not n:
        return
    parts = format.parts(packed, n, block)
    for run in runs_of(n, block):
        total = run.of(out).float()
        _add_rows_(_runner(len(packed), n, run), total, run, *parts, weights, format)
        if out.dtype != torch.float32:
            run.of(out).copy_(total)


def reduce(
    format: Format, packed: Tensor, n: int, block: int | None, residual: Tensor | None = None, key: int | None = None
) -> Tensor:
    """Return the mean of the packed rows, summed in their order and divided by their number, packed again.

    To `residual` (fp32, (n,)) is added the number of rows times what the second packing lost.
    """
    sent = format.empty(1, n, block, packed.device)
    if not n:
        return sent
    parts, (sent_codes, sent_headers) = format.parts(packed, n, block), format.parts(sent, n, block)
    ones = torch.ones(len(packed), device=packed.device)
    rows = ones.new_full((1,), len(packed))
    for run in runs_of(n, block):
        do = _runner(len(packed), n, run)
        mean = torch.zeros(-(-(run.columns.stop - run.columns.start) // run.width), run.width, device=packed.device)
        _add_rows_(do, mean, run, *parts, ones, format)
        mean /= rows
        code, header = run.codes(sent_codes[0], format.bits), run.headers(sent_headers[0])
        _pack_(do, code, header, mean, run.columns.start, key, format)
        if residual is not None:
            do(add_loss_, run.of(residual), mean, code, header, rows, format)
    return sent


def _pack_(do: Do, codes: Tensor, header: Tensor, x: Tensor, start: int, key: int | None, format: Format) -> None:
    scale = torch.empty_like(header[..., :1], dtype=torch.float32)
    do(measure_, header, scale, x, format, key is not None)
    if key is None:
        do(encode_, codes, header, scale, x, format)
    else:
        do(encode_by_draws_, codes, header, scale, x, noise.start_and_seed(start, key, x.device), format)


def _add_rows_(
    do: Do, total: Tensor, run: Run, codes: Tensor, headers: Tensor, weights: Tensor, format: Format
) -> None:
    rows = [(run.codes(code, format.bits), run.headers(header)) for code, header in zip(codes, headers, strict=True)]
    first = 0
    while first < len(rows):
        count = 4 if first + 4 <= len(rows) else 1  # one pass over the total adds four rows
        some = [part for row in rows[first : first + count] for part in row]
        do(accumulate_, total, weights[first : first + count], format, *some)
        first += count


def _runner(rows: int, n: int, run: Run) -> Do:
    """Return the function that runs units on a run: on the rest, one block of each row, they run as written."""
    return units.plain if run.rest else units.runner(rows, n)


def _rows(rows: int, do: Do, key: int | None = None) -> list[slice] | range:
    # Together saves calls; but compiled units know two dimensions, and draws one start.
    return [slice(None)] if do is units.plain and key is None else range(rows)
