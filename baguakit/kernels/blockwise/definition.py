"""The operations of all blockwise formats: packing, unpacking, adding and averaging rows of values.

This file is the definition, and what CPU tensors take; `launch.py` does the same on GPUs, and gives the same
bytes. The definition divides by tensors, because CUDA multiplies by the inverse of a number.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..cpu import units
from ..cpu.inductor import piecewise
from ..shared import noise
from ..shared.rotation import in_memory, restore, rotate, signs_of
from .format import Format
from .layout import Run, join_, planes_of, split, stripes

# What is done to a run of blocks, overwriting tensors: the units that a CPU compiles. To measure is one of its own
# because Inductor would otherwise do again for each value what is done once for a block. Codes come by plane.


def measure_(header: Tensor, scale: Tensor, x: Tensor, format: Format, *draws: Tensor) -> None:
    measured = format.measure(x.float(), bool(draws))
    header.copy_(measured[0])
    scale.copy_(measured[1])


def encode_(header: Tensor, scale: Tensor, x: Tensor, format: Format, *codes_and_draws: Tensor) -> None:
    planes = len(planes_of(format.bits))
    codes, draws = codes_and_draws[:planes], codes_and_draws[planes:]
    draw = None
    for start_and_seed in draws:  # one, or none
        position = start_and_seed[0] + torch.arange(x.numel(), device=x.device).view(x.shape)
        draw = noise.uniform(position, start_and_seed[1:])
    join_(codes, format.encode(x.float(), header, scale, draw), format.bits)


@piecewise
def rotate_(out: Tensor, x: Tensor, signs: Tensor) -> None:
    out.copy_(rotate(x.float(), signs))


@piecewise
def add_restored_(total: Tensor, rotated: Tensor, signs: Tensor) -> None:
    total.add_(restore(rotated, signs)[..., : total.shape[-1]])


@piecewise
def unpack_(out: Tensor, header: Tensor, signs: Tensor | None, format: Format, *codes: Tensor) -> None:
    _write_(out, _restored(_values(header, format, codes), signs), format)


def accumulate_(total: Tensor, weights: Tensor, format: Format, *rows: Tensor) -> None:
    """Add rows, given as headers and codes in turn, each times its weight."""
    value = stripes(total, format.bits)
    parts = 1 + len(planes_of(format.bits))
    for row in range(len(rows) // parts):
        header, *codes = rows[row * parts : (row + 1) * parts]
        value = value + _values(header, format, codes) * weights[row]
    _write_(total, value, format)


@piecewise
def keep_loss_(
    residual: Tensor, x: Tensor, header: Tensor, signs: Tensor | None, format: Format, *codes: Tensor
) -> None:
    lost = stripes(x.float(), format.bits) - _restored(_values(header, format, codes), signs)
    _write_(residual, lost, format)


@piecewise
def add_loss_(
    residual: Tensor, x: Tensor, times: Tensor, header: Tensor, signs: Tensor | None, format: Format, *codes: Tensor
) -> None:
    lost = _restored(stripes(x, format.bits) - _values(header, format, codes), signs)
    _write_(residual, stripes(_padded(residual, x.shape[-1]), format.bits) + lost * times, format)


def _values(header: Tensor, format: Format, codes: Sequence[Tensor]) -> Tensor:
    """Return the values of blocks in the stripes of their codes: neighbours in memory are neighbours for a CPU."""
    return format.decode(split(codes, format.bits), header.unsqueeze(-2))


def _restored(striped: Tensor, signs: Tensor | None) -> Tensor:
    """Return what blocks were before they were rotated, if they were: both in stripes."""
    return striped if signs is None else restore(in_memory(striped.flatten(-2)), signs).reshape(striped.shape)


def _padded(x: Tensor, width: int) -> Tensor:
    return pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x


def _write_(out: Tensor, striped: Tensor, format: Format) -> None:
    if out.shape[-1] < striped.shape[-2] * striped.shape[-1]:
        out.copy_(striped.flatten(-2)[..., : out.shape[-1]])
    else:
        stripes(out, format.bits).copy_(striped)


# The operations on rows: each walks over the runs of the layout.


def compress(format: Format, x: Tensor, block: int, residual: Tensor | None = None, key: int | None = None) -> Tensor:
    """Return the packed rows of `x` (rows, n); `residual` (fp32, same shape) receives what they lost."""
    rows, n = x.shape
    layout = format.layout(n, block)
    packed = layout.empty(rows, x.device)
    if not x.numel():
        return packed
    planes, headers = layout.parts(packed)
    for run in layout.runs:
        run_unit, signs = _runner(format, run, rows, n, x, residual), _signs(format, run, x.device)
        for row in _rows(rows, run_unit, key):
            codes, header = run.codes_of([plane[row] for plane in planes]), headers[row][..., run.blocks, :]
            start = 0 if isinstance(row, slice) else row * n + run.columns.start
            values = coded = _padded(run.values_of(x[row]), run.width)
            if signs is not None:
                coded = torch.empty_like(values, dtype=torch.float32)
                run_unit(rotate_, coded, values, signs)
            _pack_(run_unit, codes, header, coded, start, key, format)
            if residual is not None:
                run_unit(keep_loss_, run.values_of(residual[row]), values, header, signs, format, *codes)
    return packed


def decompress_(format: Format, out: Tensor, packed: Tensor, block: int) -> None:
    """Write the values of each packed row into `out` (rows, n)."""
    rows, n = out.shape
    if not out.numel():
        return
    layout = format.layout(n, block)
    planes, headers = layout.parts(packed)
    for run in layout.runs:
        run_unit, signs = _runner(format, run, rows, n, out, packed), _signs(format, run, out.device)
        for row in _rows(rows, run_unit):
            values, header = run.values_of(out[row]), headers[row][..., run.blocks, :]
            codes = run.codes_of([plane[row] for plane in planes])
            run_unit(unpack_, values, header, signs, format, *codes)


def add_(format: Format, out: Tensor, packed: Tensor, weights: Tensor, block: int) -> None:
    """Add the packed rows, each times its weight (fp32), one after another to `out` (n,), all in fp32.

    Rotated rows are added to zeros, and what they restore to is added to `out`.
    """
    rows, n = packed.shape[0], out.shape[0]
    if not n:
        return
    layout = format.layout(n, block)
    parts = layout.parts(packed)
    for run in layout.runs:
        values = run.values_of(out)
        total = summed = _padded(values.float(), run.width)
        run_unit, signs = _runner(format, run, rows, n, total, packed), _signs(format, run, out.device)
        if signs is not None:
            summed = torch.zeros_like(total)
        _add_rows_(run_unit, summed, run, *parts, weights, format)
        if signs is not None:
            run_unit(add_restored_, total, summed, signs)
        if total is not values:
            values.copy_(total[..., : values.shape[-1]])


def reduce(
    format: Format, packed: Tensor, n: int, block: int, residual: Tensor | None = None, key: int | None = None
) -> Tensor:
    """Return the mean of the packed rows, summed in their order and divided by their number, packed again.

    To `residual` (fp32, (n,)) is added the number of rows times what the second packing lost.
    """
    layout, rows = format.layout(n, block), packed.shape[0]
    sent = layout.empty(1, packed.device)
    if not n:
        return sent
    parts, (sent_planes, sent_headers) = layout.parts(packed), layout.parts(sent)
    ones = torch.ones(rows, dtype=torch.float32, device=packed.device)
    divisor = ones.new_full((1,), rows)
    for run in layout.runs:
        mean = torch.zeros(run.height, run.width, dtype=torch.float32, device=packed.device)
        run_unit = _runner(format, run, rows, n, mean, packed)
        _add_rows_(run_unit, mean, run, *parts, ones, format)
        mean /= divisor
        codes, header = run.codes_of([plane[0] for plane in sent_planes]), sent_headers[0][run.blocks]
        _pack_(run_unit, codes, header, mean, run.columns.start, key, format)
        if residual is not None:
            signs = _signs(format, run, packed.device)
            run_unit(add_loss_, run.values_of(residual), mean, divisor, header, signs, format, *codes)
    return sent


def _signs(format: Format, run: Run, device: torch.device) -> Tensor | None:
    return signs_of(run.width, device) if format.rotated else None


def _pack_(
    run_unit: units.RunUnit,
    codes: Sequence[Tensor],
    header: Tensor,
    x: Tensor,
    start: int,
    key: int | None,
    format: Format,
) -> None:
    scale = torch.empty(*header.shape[:-1], 1, dtype=torch.float32, device=x.device)
    draws = [] if key is None else [noise.start_and_seed(start, key, x.device)]
    run_unit(measure_, header, scale, x, format, *draws)
    run_unit(encode_, header, scale, x, format, *codes, *draws)


def _add_rows_(
    run_unit: units.RunUnit,
    total: Tensor,
    run: Run,
    planes: Sequence[Tensor],
    headers: Tensor,
    weights: Tensor,
    format: Format,
) -> None:
    """Add the rows to `total`: four in one pass over it, or one."""
    first, rows = 0, headers.shape[0]
    while first < rows:
        parts: list[Tensor] = []
        last = first + 4 if first + 4 <= rows else first + 1
        for row in range(first, last):
            parts += headers[row][run.blocks], *run.codes_of([plane[row] for plane in planes])
        run_unit(accumulate_, total, weights[first:last], format, *parts)
        first = last


def _runner(format: Format, run: Run, rows: int, n: int, values: Tensor, beside: Tensor | None) -> units.RunUnit:
    """Return the function that runs units on a run of `rows` rows: a single block of each row runs as written."""
    if run.height == 1 or not values.is_cpu or not values.is_contiguous():
        return units.plain
    if beside is not None and not beside.is_contiguous():
        return units.plain
    return units.runner((format, run.width, values.dtype), rows, n)


def _rows(rows: int, run_unit: units.RunUnit, key: int | None = None) -> list[slice] | range:
    # Together saves calls; but compiled units know two dimensions, and draws one start.
    return [slice(None)] if run_unit is units.plain and key is None else range(rows)
