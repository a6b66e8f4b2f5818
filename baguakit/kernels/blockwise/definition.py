"""The operations of all blockwise formats: packing, unpacking, adding and averaging rows of values.

This file is the definition. `cpu.c` gives the same bytes on CPUs, and `gpu.py` on GPUs; on a CPU without a C compiler,
and for formats that only Python defines, the definition itself runs. It divides by tensors, not by Python numbers: on
CUDA, torch would multiply by the inverse of a number instead.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from .. import noise
from ..rotation import restore, rotate, signs_of
from .format import Format, Run, join_, split


def compress(format: Format, x: Tensor, block: int, residual: Tensor | None = None, key: int | None = None) -> Tensor:
    """Return the packed rows of `x` (rows, n); `residual` (fp32, same shape) receives the error of packing."""
    rows, n = x.shape
    layout = format.layout(n, block)
    packed = layout.empty(rows, x.device)
    for run in layout.runs:
        values, signs = _padded(run.values_of(x), run), _signs(format, run, x)
        coded = values if signs is None else rotate(values, signs)
        starts = torch.arange(rows, device=x.device).view(-1, 1, 1) * n + run.columns.start
        _pack_(format, run, packed, coded, starts, key)
        if residual is not None:
            decoded = _decoded(format, run, packed)
            lost = values - (decoded if signs is None else restore(decoded, signs))
            _write_(run.values_of(residual), lost)
    return packed


def decompress_(format: Format, out: Tensor, packed: Tensor, block: int, ok: Tensor | None = None) -> None:
    """Write the values of each packed row into `out` (rows, n); if not all are finite, the bool `ok` becomes False."""
    for run in format.layout(out.shape[1], block).runs:
        decoded, signs = _decoded(format, run, packed), _signs(format, run, out)
        _write_(run.values_of(out), decoded if signs is None else restore(decoded, signs))
    if ok is not None:
        ok.logical_and_(out.isfinite().all())


def add_(format: Format, out: Tensor, packed: Tensor, weights: Tensor, block: int) -> None:
    """Add each packed row times its weight (fp32) to `out` (n,), one row after another, in fp32.

    Rotated rows are summed from zero; the rotation of the sum is then undone, and the result is added to `out`.
    """
    for run in format.layout(len(out), block).runs:
        values, signs = _padded(run.values_of(out), run), _signs(format, run, out)
        total = values if signs is None else torch.zeros_like(values)
        for row, weight in zip(packed, weights, strict=True):
            total = total + _decoded(format, run, row) * weight
        _write_(run.values_of(out), total if signs is None else values + restore(total, signs))


def reduce(
    format: Format, packed: Tensor, n: int, block: int, residual: Tensor | None = None, key: int | None = None,
    ok: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return one packed row: the mean of the packed rows, which are summed in their order before the division.

    Add to `residual` (fp32, (n,)) the error of the second packing, times the number of rows. Set the bool `ok` to True,
    to save a separate launch; `decompress_` sets it to False if a value is not finite.
    """
    layout = format.layout(n, block)
    sent = layout.empty(1, packed.device)
    if ok is not None:
        ok.fill_(True)
    rows = torch.full((1,), float(len(packed)), dtype=torch.float32, device=packed.device)
    for run in layout.runs:
        total = torch.zeros(run.height, run.width, dtype=torch.float32, device=packed.device)
        for row in packed:
            total = total + _decoded(format, run, row)
        mean = total / rows
        start = torch.full((1, 1), run.columns.start, dtype=torch.int64, device=packed.device)
        _pack_(format, run, sent[0], mean, start, key)
        if residual is not None:
            lost, signs = mean - _decoded(format, run, sent[0]), _signs(format, run, packed)
            lost = (lost if signs is None else restore(lost, signs)) * rows
            _write_(run.values_of(residual), _padded(run.values_of(residual), run) + lost)
    return sent


def _pack_(format: Format, run: Run, packed: Tensor, x: Tensor, starts: Tensor, key: int | None) -> None:
    """Write blocks (…, blocks, width) to `packed`; their first values are at `starts` (…, 1, 1) for draws."""
    header, *codes = run.parts_of(packed)
    draw = None
    if key is not None:
        position = starts + torch.arange(run.height * run.width, device=x.device).view(run.height, run.width)
        draw = noise.uniform(position, torch.tensor(noise.seed_words(key), device=x.device))
    measured, scale = format.measure(x, key is not None)
    header.copy_(measured)
    join_(codes, format.encode(x, measured, scale, draw), format.bits)


def _decoded(format: Format, run: Run, packed: Tensor) -> Tensor:
    """Return the values of blocks (…, blocks, width) in packed rows, still rotated."""
    header, *codes = run.parts_of(packed)
    return format.decode(split(codes, format.bits, run.width), header)


def _signs(format: Format, run: Run, beside: Tensor) -> Tensor | None:
    return signs_of(run.width, beside.device) if format.rotated else None


def _padded(x: Tensor, run: Run) -> Tensor:
    """Return values of blocks in fp32, with zeros after the last."""
    return pad(x.float(), (0, run.width - x.shape[-1]))


def _write_(out: Tensor, values: Tensor) -> None:
    out.copy_(values[..., : out.shape[-1]])
