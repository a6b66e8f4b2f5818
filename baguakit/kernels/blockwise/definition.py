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


def measure_(header: Tensor, scale: Tensor, x: Tensor, format: Format) -> None:
    _measure_(header, scale, format.measure(x.float(), False))


def measure_for_draws_(header: Tensor, scale: Tensor, x: Tensor, format: Format) -> None:
    _measure_(header, scale, format.measure(x.float(), True))


def _measure_(header: Tensor, scale: Tensor, measured: tuple[Tensor, Tensor]) -> None:
    header.copy_(measured[0])
    scale.copy_(measured[1])


def encode_(header: Tensor, scale: Tensor, x: Tensor, format: Format, *codes: Tensor) -> None:
    join_(codes, format.encode(x.float(), header, scale, None), format.bits)


def encode_by_draws_(
    header: Tensor, scale: Tensor, x: Tensor, start_and_seed: Tensor, format: Format, *codes: Tensor
) -> None:
    position = start_and_seed[0] + torch.arange(x.numel(), device=x.device).view(x.shape)
    draw = noise.uniform(position, start_and_seed[1:])
    join_(codes, format.encode(x.float(), header, scale, draw), format.bits)


def unpack_(out: Tensor, header: Tensor, format: Format, *codes: Tensor) -> None:
    _write_(out, _values(header, format, codes), format)


def accumulate_(total: Tensor, weights: Tensor, format: Format, *rows: Tensor) -> None:
    """Add rows, given as headers and codes in turn, each times its weight."""
    value = stripes(total, format.bits)
    parts = 1 + len(planes_of(format.bits))
    for row in range(len(rows) // parts):
        header, *codes = rows[row * parts : (row + 1) * parts]
        value = value + _values(header, format, codes) * weights[row]
    _write_(total, value, format)


def keep_loss_(residual: Tensor, x: Tensor, header: Tensor, format: Format, *codes: Tensor) -> None:
    _write_(residual, stripes(x.float(), format.bits) - _values(header, format, codes), format)


def add_loss_(residual: Tensor, x: Tensor, times: Tensor, header: Tensor, format: Format, *codes: Tensor) -> None:
    lost = stripes(x, format.bits) - _values(header, format, codes)
    _write_(residual, stripes(residual, format.bits) + lost * times, format)


@piecewise
def rotate_(out: Tensor, x: Tensor, signs: Tensor) -> None:
    missing = signs.shape[0] - x.shape[-1]
    out.copy_(rotate(pad(x.float(), (0, missing)) if missing else x.float(), signs))


@piecewise
def restore_(out: Tensor, header: Tensor, signs: Tensor, format: Format, *codes: Tensor) -> None:
    out.copy_(_restored(out, header, signs, format, codes))


@piecewise
def keep_restored_loss_(
    residual: Tensor, x: Tensor, header: Tensor, signs: Tensor, format: Format, *codes: Tensor
) -> None:
    residual.copy_(x.float() - _restored(x, header, signs, format, codes))


@piecewise
def add_restored_(total: Tensor, rotated: Tensor, signs: Tensor, times: Tensor) -> None:
    total.add_(restore(rotated, signs)[..., : total.shape[-1]] * times)


def _restored(like: Tensor, header: Tensor, signs: Tensor, format: Format, codes: Sequence[Tensor]) -> Tensor:
    """Return the values that rotated blocks restore to, without those that are missing in blocks such as `like`."""
    rotated = in_memory(_values(header, format, codes).flatten(-2))
    return restore(rotated, signs)[..., : like.shape[-1]]


def _values(header: Tensor, format: Format, codes: Sequence[Tensor]) -> Tensor:
    """Return the values of blocks in the stripes of their codes: neighbours in memory are neighbours for a CPU."""
    return format.decode(split(codes, format.bits), header.unsqueeze(-2))


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
        run_unit = _runner(format, run, rows, n, x, residual)
        for row in _rows(rows, run_unit, key):
            codes, header = run.codes_of([plane[row] for plane in planes]), headers[row][..., run.blocks, :]
            start = 0 if isinstance(row, slice) else row * n + run.columns.start
            values = run.values_of(x[row])
            coded = _coded(run_unit, values, run, format)
            _pack_(run_unit, codes, header, coded, start, key, format)
            if residual is None:
                continue
            lost = run.values_of(residual[row])
            if format.rotated:
                run_unit(keep_restored_loss_, lost, values, header, signs_of(run.width, x.device), format, *codes)
            else:
                run_unit(keep_loss_, lost, coded, header, format, *codes)
    return packed


def decompress_(format: Format, out: Tensor, packed: Tensor, block: int) -> None:
    """Write the values of each packed row into `out` (rows, n)."""
    rows, n = out.shape
    if not out.numel():
        return
    layout = format.layout(n, block)
    planes, headers = layout.parts(packed)
    for run in layout.runs:
        run_unit = _runner(format, run, rows, n, out, packed)
        for row in _rows(rows, run_unit):
            values, header = run.values_of(out[row]), headers[row][..., run.blocks, :]
            codes = run.codes_of([plane[row] for plane in planes])
            if format.rotated:
                run_unit(restore_, values, header, signs_of(run.width, out.device), format, *codes)
            else:
                run_unit(unpack_, values, header, format, *codes)


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
        total = values.float()
        run_unit = _runner(format, run, rows, n, total, packed)
        if format.rotated:
            rotated = torch.zeros(run.height, run.width, dtype=torch.float32, device=out.device)
            _add_rows_(run_unit, rotated, run, *parts, weights, format)
            run_unit(add_restored_, total, rotated, signs_of(run.width, out.device), weights.new_ones(1))
        else:
            total = pad(total, (0, run.missing)) if run.missing else total
            _add_rows_(run_unit, total, run, *parts, weights, format)
        if total is not values:
            values.copy_(_cut(total, run))


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
        if residual is None:
            continue
        kept = run.values_of(residual)
        if format.rotated or run.missing:
            lost = torch.empty_like(mean)
            run_unit(keep_loss_, lost, mean, header, format, *codes)
            if format.rotated:
                run_unit(add_restored_, kept, lost, signs_of(run.width, lost.device), divisor)
            else:
                kept += _cut(lost, run) * divisor
        else:
            run_unit(add_loss_, kept, mean, divisor, header, format, *codes)
    return sent


def _coded(run_unit: units.RunUnit, values: Tensor, run: Run, format: Format) -> Tensor:
    """Return the values of a run as they are coded."""
    if not format.rotated:
        return pad(values, (0, run.missing)) if run.missing else values
    rotated = torch.empty(*values.shape[:-1], run.width, dtype=torch.float32, device=values.device)
    run_unit(rotate_, rotated, values, signs_of(run.width, values.device))
    return rotated


def _cut(values: Tensor, run: Run) -> Tensor:
    return values[..., : run.width - run.missing]


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
    if key is None:
        run_unit(measure_, header, scale, x, format)
        run_unit(encode_, header, scale, x, format, *codes)
    else:
        run_unit(measure_for_draws_, header, scale, x, format)
        run_unit(encode_by_draws_, header, scale, x, noise.start_and_seed(start, key, x.device), format, *codes)


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
