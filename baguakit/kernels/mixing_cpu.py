"""Run `mixing.c`: the arithmetic of `mixing.py` for CPUs, with the same roundings. fp64 is left to the definition."""

from collections.abc import Sequence
from ctypes import c_float, c_void_p

import torch
from torch import Tensor

from . import cpu, mixing


def mix_(x: Tensor, others: Sequence[Tensor], weights: Sequence[float]) -> None:
    n, count = x.numel(), len(others)
    if count == 0 or x.dtype == torch.float64:
        return mixing.mix_(x, others, weights)
    addresses, factors = (c_void_p * count)(*map(Tensor.data_ptr, others)), (c_float * (count + 1))(*weights)
    cpu.call("mixing", "mix", x, addresses, factors, n, count, cpu.DTYPES.index(x.dtype), cpu.threads(n))


def land_(x: Tensor, result: Tensor, before: Tensor, good: Tensor | None = None) -> None:
    if x.dtype == torch.float64:
        mixing.land_(x, result, before, good)
    elif good is None or good:
        n = x.numel()
        cpu.call("mixing", "land", x, result, before, n, cpu.DTYPES.index(x.dtype), cpu.threads(n))
