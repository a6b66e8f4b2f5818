"""The operations of a format as operators of torch.

CUDA tensors take the kernels; few values on a CPU take NumPy, if the format has its arithmetic for that; all others
take the definition.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ..cpu import units
from ..shared.tracing import Operator, imported
from . import definition
from .format import Format


class Operators(NamedTuple):
    """The functions of `definition` for one format."""

    format: Format
    compress: Operator[Tensor]
    decompress_: Operator[None]
    add_: Operator[None]
    reduce: Operator[Tensor]


def operators(format: Format) -> Operators:
    """Register the operators of a format; once for each."""

    def compress(x: Tensor, block: int, residual: Tensor | None, key: int | None) -> Tensor:
        if residual is not None:
            _check_apart(residual, "residual", x, "values")
        packed: Tensor = _implementation(format, x, key).compress(format, x, block, residual, key)
        return packed

    def decompress_(out: Tensor, packed: Tensor, block: int) -> None:
        _check_apart(out, "out", packed, "packed rows")
        _implementation(format, packed).decompress_(format, out, packed, block)

    def add_(out: Tensor, packed: Tensor, weights: Tensor, block: int) -> None:
        _check_apart(out, "out", packed, "packed rows")
        _implementation(format, packed).add_(format, out, packed, weights, block)

    def reduce(packed: Tensor, n: int, block: int, residual: Tensor | None, key: int | None) -> Tensor:
        if residual is not None:
            _check_apart(residual, "residual", packed, "packed rows")
        sent: Tensor = _implementation(format, packed, key).reduce(format, packed, n, block, residual, key)
        return sent

    def fake_compress(x: Tensor, block: int, residual: Tensor | None, key: int | None) -> Tensor:
        return x.new_empty(x.shape[0], format.row_bytes(x.shape[1], block), dtype=torch.uint8)

    def fake_reduce(packed: Tensor, n: int, block: int, residual: Tensor | None, key: int | None) -> Tensor:
        return packed.new_empty(1, format.row_bytes(n, block))

    return Operators(
        format,
        Operator(compress, {"residual"}, f"{format.name}_compress", fake_compress),
        Operator(decompress_, {"out"}, f"{format.name}_decompress_"),
        Operator(add_, {"out"}, f"{format.name}_add_"),
        Operator(reduce, {"residual"}, f"{format.name}_reduce", fake_reduce),
    )


def _check_apart(written: Tensor, its_name: str, read: Tensor, name: str) -> None:
    """Raise a ValueError if two tensors share memory; else increment the version of the one to be written."""
    a, b = written.data_ptr(), read.data_ptr()
    if written.numel() and read.numel() and a < b + read.nbytes and b < a + written.nbytes:
        raise ValueError(f"{its_name} and the {name} share memory; give {its_name} memory of its own")
    increment_version(written)  # compiled units write unseen


def _implementation(format: Format, values: Tensor, key: int | None = None) -> Any:
    """Return the module whose functions take `values`, or packed rows."""
    if values.is_cuda:
        return imported(".launch", __package__)
    few_values = 0 < values.numel() < units.COMPILED_VALUES
    if few_values and key is None and format.in_numpy is not None and units.thread.how is not None:
        return format.in_numpy
    return definition
