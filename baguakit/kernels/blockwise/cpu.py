"""Run the operations of blockwise formats on CPU tensors by compiled C, with the signatures of `definition.py`."""

import ctypes
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from .. import cpu
from ..noise import seed_words
from ..rotation import signs_of
from .float8 import Float8Format
from .format import PLANES, Format
from .uniform import SPACINGS, UniformFormat

FAR = 1 << 22  # values: so many fp32 results go past the caches, and are then read as fast as from there
BLOCKS = tuple(1 << power for power in range(6, 14))


class Form(ctypes.Structure):
    """The constants of a format, and the layout of its rows: `Form` in codes.h."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("bits", "wide", "padded", "rotated")),
        *((name, ctypes.c_float) for name in ("unit", "spacing")),
        *((name, ctypes.c_int32) for name in ("m", "e", "exponent", "largest", "block")),
        *((name, ctypes.c_int64) for name in ("n", "blocks", "row", "header_at")),
        ("planes_at", ctypes.c_int64 * 9),  # by their bits
        ("signs", ctypes.c_void_p),
    )


@lru_cache(maxsize=4096)
def _form(format: Format, n: int, block: int) -> tuple[Form, Any]:
    """Return the constants of rows of `n` values, and what must live as long."""
    layout, signs = format.layout(n, block), signs_of(block, torch.device("cpu")) if format.rotated else None
    form = Form(bits=format.bits, padded=format.padded, rotated=format.rotated, block=block, n=n, blocks=-(-n // block))
    form.row, form.header_at, form.signs = layout.row, layout.header_at, None if signs is None else signs.data_ptr()
    for plane, at in zip(PLANES[format.bits], layout.planes_at, strict=True):
        form.planes_at[plane] = at
    if isinstance(format, UniformFormat):
        form.wide, form.unit, form.spacing = format.wide, format.unit, SPACINGS.get(format.bits, 0.0)
    elif isinstance(format, Float8Format):
        form.exponent, (form.m, form.e, form.largest) = format.exponent, format.numbers
    return form, signs


def serves(format: Format, block: int) -> bool:
    """Return whether the C file has the operations of a format; otherwise the definition runs."""
    return type(format) in (UniformFormat, Float8Format) and block in BLOCKS


def compress(format: Format, x: Tensor, block: int, residual: Tensor | None = None, key: int | None = None) -> Tensor:
    rows, n = x.shape
    sent = format.layout(n, block).empty(rows, x.device)
    _run("compress", format, n, block, rows, key, values=x.contiguous(), sent=sent, residual=residual)
    return sent


def decompress_(format: Format, out: Tensor, packed: Tensor, block: int, ok: Tensor | None = None) -> None:
    _run("decompress", format, out.shape[1], block, out.shape[0], values=out, packed=packed, ok=ok)


def add_(format: Format, out: Tensor, packed: Tensor, weights: Tensor, block: int) -> None:
    _run("add", format, len(out), block, len(packed), values=out, packed=packed, weights=weights)


def reduce(
    format: Format, packed: Tensor, n: int, block: int, residual: Tensor | None = None, key: int | None = None,
    ok: Tensor | None = None,
) -> Tensor:  # fmt: skip
    sent = format.layout(n, block).empty(1, packed.device)
    if ok is not None:
        ok.fill_(True)
    _run("reduce", format, n, block, len(packed), key, packed=packed, sent=sent, residual=residual)
    return sent


def _run(
    operation: str, format: Format, n: int, block: int, rows: int, key: int | None = None, **tensors: Tensor | None
) -> None:
    names = "values", "packed", "sent", "residual", "weights", "ok"
    values = tensors.get("values")
    dtype = 0 if values is None else cpu.DTYPES.index(values.dtype)
    draws = key is not None, *seed_words(key or 0)
    given, work = map(tensors.get, names), (rows * n >= FAR, cpu.threads(rows * n))
    cpu.call("blockwise", operation, _form(format, n, block)[0], rows, *given, dtype, *draws, *work)
