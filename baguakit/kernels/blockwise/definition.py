"""The operations of all blockwise formats: packing, unpacking, adding and averaging rows of values.

This file is the definition, which CPU tensors use; `gpu.py` gives the same bytes on GPUs. The definition divides by
tensors, not by Python numbers: on CUDA, torch would multiply by the inverse of a number instead.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from .. import noise
from ..inductor import units
from ..inductor.inductor import piecewise
from ..rotation import in_memory, restore, rotate, signs_of
from .format import PLANES, Format, Run, join_, split, stripes

# The *units* are in-place functions on a run of blocks, compiled separately on a CPU. `measure_` and `encode_` are two
# units, because in a single unit Inductor would measure a block again for each of its values. The *parts* of a row are
# its headers and, for each plane, its codes.


def measure_(header: Tensor, scale: Tensor, x: Tensor, format: Format, *draws: Tensor) -> None:
    measured = format.measure(x.float(), bool(draws))
    header.copy_(measured[0])
    scale.copy_(measured[1])


def encode_(header: Tensor, scale: Tensor, x: Tensor, format: Format, *codes_and_draws: Tensor) -> None:
    planes = len(PLANES[format.bits])
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
def unpack_(out: Tensor, signs: Tensor | None, format: Format, *parts: Tensor) -> None:
    _write_(out, _restored(_values(format, *parts), signs), format)


def accumulate_(total: Tensor, weights: Tensor, format: Format, *parts: Tensor) -> None:
    """Add each packed row times its weight to `total`. `parts` has the parts of row 0, then the parts of row 1, …"""
    value = stripes(total, format.bits)
    count = 1 + len(PLANES[format.bits])
    for row in range(len(parts) // count):
        value = value + _values(format, *parts[row * count : (row + 1) * count]) * weights[row]
    _write_(total, value, format)


@piecewise
def keep_loss_(residual: Tensor, x: Tensor, signs: Tensor | None, format: Format, *parts: Tensor) -> None:
    lost = stripes(x.float(), format.bits) - _restored(_values(format, *parts), signs)
    _write_(residual, lost, format)


@piecewise
def add_loss_(residual: Tensor, x: Tensor, times: Tensor, signs: Tensor | None, format: Format, *parts: Tensor) -> None:
    lost = _restored(stripes(x, format.bits) - _values(format, *parts), signs)
    _write_(residual, stripes(_padded(residual, x.shape[-1]), format.bits) + lost * times, format)


def _values(format: Format, header: Tensor, *codes: Tensor) -> Tensor:
    """Return the decoded values of blocks, in the stripes of the packed codes: a CPU can vectorise this order."""
    return format.decode(split(codes, format.bits), header.unsqueeze(-2))


def _restored(striped: Tensor, signs: Tensor | None) -> Tensor:
    """Undo the rotation of blocks, unless `signs` is None. Blocks and result are laid out as `stripes` returns them."""
    return striped if signs is None else restore(in_memory(striped.flatten(-2)), signs).reshape(striped.shape)


def _padded(x: Tensor, width: int) -> Tensor:
    return pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x


def _write_(out: Tensor, striped: Tensor, format: Format) -> None:
    if out.shape[-1] < striped.shape[-2] * striped.shape[-1]:
        out.copy_(striped.flatten(-2)[..., : out.shape[-1]])
    else:
        stripes(out, format.bits).copy_(striped)


def compress(format: Format, x: Tensor, block: int, residual: Tensor | None = None, key: int | None = None) -> Tensor:
    """Return the packed rows of `x` (rows, n); `residual` (fp32, same shape) receives the error of packing."""
    rows, n = x.shape
    layout = format.layout(n, block)
    packed = layout.empty(rows, x.device)
    for run in layout.runs:
        run_unit, signs, together = _tools(format, run, rows, n, x, residual)
        for row in [slice(None)] if together and key is None else range(rows):  # draws know one start
            parts = run.parts_of(packed[row])
            start = 0 if isinstance(row, slice) else row * n + run.columns.start
            values = coded = _padded(run.values_of(x[row]), run.width)
            if signs is not None:
                coded = torch.empty_like(values, dtype=torch.float32)
                run_unit(rotate_, coded, values, signs)
            _pack_(format, run_unit, parts, coded, start, key)
            if residual is not None:
                run_unit(keep_loss_, run.values_of(residual[row]), values, signs, format, *parts)
    return packed


def decompress_(format: Format, out: Tensor, packed: Tensor, block: int, ok: Tensor | None = None) -> None:
    """Write the values of each packed row into `out` (rows, n); if not all are finite, the bool `ok` becomes False."""
    rows, n = out.shape
    for run in format.layout(n, block).runs:
        run_unit, signs, together = _tools(format, run, rows, n, out, packed)
        for row in [slice(None)] if together else range(rows):
            run_unit(unpack_, run.values_of(out[row]), signs, format, *run.parts_of(packed[row]))
    if ok is not None:
        ok.logical_and_(out.isfinite().all())


def add_(format: Format, out: Tensor, packed: Tensor, weights: Tensor, block: int) -> None:
    """Add each packed row times its weight (fp32) to `out` (n,), one row after another, in fp32.

    Rotated rows are summed from zero; the rotation of the sum is then undone, and the result is added to `out`.
    """
    rows, n = packed.shape[0], out.shape[0]
    for run in format.layout(n, block).runs:
        values = run.values_of(out)
        total = summed = _padded(values.float(), run.width)
        run_unit, signs, _ = _tools(format, run, rows, n, total, packed)
        if signs is not None:
            summed = torch.zeros_like(total)
        _add_rows_(format, run_unit, summed, run, packed, weights)
        if signs is not None:
            run_unit(add_restored_, total, summed, signs)
        if total is not values:
            values.copy_(total[..., : values.shape[-1]])


def reduce(
    format: Format, packed: Tensor, n: int, block: int, residual: Tensor | None = None, key: int | None = None,
    ok: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return one packed row: the mean of the packed rows, which are summed in their order before the division.

    Add to `residual` (fp32, (n,)) the error of the second packing, times the number of rows. Set the bool `ok` to True,
    to save a separate launch; `decompress_` sets it to False if a value is not finite.
    """
    layout, rows = format.layout(n, block), packed.shape[0]
    sent = layout.empty(1, packed.device)
    if ok is not None:
        ok.fill_(True)
    ones = torch.ones(rows, dtype=torch.float32, device=packed.device)
    divisor = ones.new_full((1,), rows)
    for run in layout.runs:
        mean = torch.zeros(run.height, run.width, dtype=torch.float32, device=packed.device)
        run_unit, signs, _ = _tools(format, run, rows, n, mean, packed)
        _add_rows_(format, run_unit, mean, run, packed, ones)
        mean /= divisor
        parts = run.parts_of(sent[0])
        _pack_(format, run_unit, parts, mean, run.columns.start, key)
        if residual is not None:
            run_unit(add_loss_, run.values_of(residual), mean, divisor, signs, format, *parts)
    return sent


def _pack_(
    format: Format, run_unit: units.RunUnit, parts: Sequence[Tensor], x: Tensor, start: int, key: int | None
) -> None:
    header, *codes = parts
    scale = torch.empty(*header.shape[:-1], 1, dtype=torch.float32, device=x.device)
    draws = [] if key is None else [torch.tensor([start, *noise.seed_words(key)], device=x.device)]
    run_unit(measure_, header, scale, x, format, *draws)
    run_unit(encode_, header, scale, x, format, *codes, *draws)


def _add_rows_(
    format: Format, run_unit: units.RunUnit, total: Tensor, run: Run, packed: Tensor, weights: Tensor
) -> None:
    """Add the rows to `total`: four rows in a pass while four are left, then one row in a pass."""
    first, rows = 0, len(weights)
    while first < rows:
        last = first + 4 if first + 4 <= rows else first + 1
        parts = [part for row in range(first, last) for part in run.parts_of(packed[row])]
        run_unit(accumulate_, total, weights[first:last], format, *parts)
        first = last


def _tools(
    format: Format, run: Run, rows: int, n: int, values: Tensor, beside: Tensor | None
) -> tuple[units.RunUnit, Tensor | None, bool]:
    """Return (function that runs units on `run`, signs of the rotation or None, whether one call takes all rows).

    A run of one block is not compiled. One call for all rows is cheaper, but compiled units take only 2-d tensors.
    """
    contiguous = values.is_contiguous() and (beside is None or beside.is_contiguous())
    compiled = run.height > 1 and values.is_cpu and contiguous
    run_unit = units.runner((format, run.width, values.dtype), rows, n) if compiled else units.plain
    return run_unit, signs_of(run.width, values.device) if format.rotated else None, run_unit is units.plain
