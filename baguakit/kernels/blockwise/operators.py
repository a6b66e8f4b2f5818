"""The operations of a format as operators of torch, which `torch.compile` passes over.

CUDA tensors take the kernels, and import them at the first; few values on a CPU take NumPy, if the format has its
arithmetic for that; all others take the definition. No argument has a default, because torch 2.11 looks for mutated
arguments among those that are not.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ..cpu import units
from ..shared.tracing import recorded
from . import definition, in_numpy
from .format import Format


class Operations(NamedTuple):
    """The functions of `definition` for one format."""

    compress: Callable[[Tensor, int, Tensor | None, int | None], Tensor]
    decompress_: Callable[[Tensor, Tensor, int], None]
    add_: Callable[[Tensor, Tensor, Tensor, int], None]
    reduce: Callable[[Tensor, int, int, Tensor | None, int | None], Tensor]


class Operators(NamedTuple):
    """The operations of a format: as operators of torch, and as the functions that those call."""

    format: Format
    registered: Operations
    direct: Operations

    def on(self, x: Tensor) -> Operations:
        """Return those to be called for `x`: the operators only where somebody records them."""
        return self.registered if recorded(x) else self.direct


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

    def register(name: str, function: Callable[..., Any], written: str) -> Any:
        return torch.library.custom_op(f"baguakit::{format.name}_{name}", function, mutates_args={written})

    registered = Operations(
        register("compress", compress, "residual"),
        register("decompress_", decompress_, "out"),
        register("add_", add_, "out"),
        register("reduce", reduce, "residual"),
    )
    registered.compress.register_fake(fake_compress)  # type: ignore[attr-defined]
    registered.reduce.register_fake(fake_reduce)  # type: ignore[attr-defined]
    return Operators(format, registered, Operations(compress, decompress_, add_, reduce))


def _check_apart(written: Tensor, its_name: str, read: Tensor, name: str) -> None:
    """Raise a ValueError if two tensors share memory; else increment the version of the one to be written."""
    a, b = written.data_ptr(), read.data_ptr()
    if written.numel() and read.numel() and a < b + read.nbytes and b < a + written.nbytes:
        raise ValueError(f"{its_name} and the {name} share memory; give {its_name} memory of its own")
    increment_version(written)  # compiled units write unseen


def _implementation(format: Format, values: Tensor, key: int | None = None) -> Any:
    """Return the module whose functions take `values`, or packed rows."""
    if values.is_cuda:
        return _kernels()
    few_values = 0 < values.numel() < units.COMPILED_VALUES
    if few_values and key is None and format.arrays is not None and units.thread.how is not None:
        return in_numpy
    return definition


@cache
def _kernels() -> Any:
    from . import launch

    return launch
