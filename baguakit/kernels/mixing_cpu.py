"""The launchers of `mixing.c`, which has the arithmetic of `mixing.py` for CPUs, with the same roundings."""

from collections.abc import Sequence
from ctypes import c_double, c_int64, c_void_p
from pathlib import Path
from typing import Any

from torch import Tensor

from . import cpu, mixing

SOURCE = Path(__file__).with_name("mixing.c")


def mix_(x: Tensor, others: Sequence[Tensor], weights: Sequence[float]) -> None:
    library, count = _library(x), len(others)
    if library is None or count == 0:
        return mixing.mix_(x, others, weights)
    addresses, factors = (c_void_p * count)(*map(Tensor.data_ptr, others)), (c_double * (count + 1))(*weights)
    library.mix(c_void_p(x.data_ptr()), addresses, factors, *_sizes(x, c_int64(count)))


def land_(x: Tensor, result: Tensor, before: Tensor, good: Tensor | None = None) -> None:
    library = _library(x)
    if library is None:
        return mixing.land_(x, result, before, good)
    if good is None or good:
        library.land(*(c_void_p(each.data_ptr()) for each in (x, result, before)), *_sizes(x))


def _library(x: Tensor) -> Any:
    """Return the functions for the dtype of `x`; None if only the definition takes it."""
    return cpu.functions(SOURCE) if x.dtype in cpu.DTYPES else None


def _sizes(x: Tensor, *count: Any) -> tuple[Any, ...]:
    return c_int64(x.numel()), *count, cpu.DTYPES.index(x.dtype), cpu.threads(x.numel())
