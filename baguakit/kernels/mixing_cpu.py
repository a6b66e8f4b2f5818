"""The launchers of `mixing.c`, which has the arithmetic of `mixing.py` for CPUs, with the same roundings."""

from collections.abc import Sequence
from ctypes import c_double, c_void_p

from torch import Tensor

from . import cpu, mixing


def mix_(x: Tensor, others: Sequence[Tensor], weights: Sequence[float]) -> None:
    n, count = x.numel(), len(others)
    if count == 0:
        return mixing.mix_(x, others, weights)
    addresses, factors = (c_void_p * count)(*map(Tensor.data_ptr, others)), (c_double * (count + 1))(*weights)
    cpu.call("mixing", "mix", x, addresses, factors, n, count, cpu.DTYPES.index(x.dtype), cpu.threads(n))


def land_(x: Tensor, result: Tensor, before: Tensor, good: Tensor | None = None) -> None:
    if good is None or good:
        n = x.numel()
        cpu.call("mixing", "land", x, result, before, n, cpu.DTYPES.index(x.dtype), cpu.threads(n))
