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

from ..shared.tracing import recorded
from . import definition, few
from .format import Format


class Operations(NamedTuple):
    """The functions of `definition` for one format."""

    compress: Callable[[Tensor, int | None, Tensor | None, int | None], Tensor]
    decompress_: Callable[[Tensor, Tensor, int | None], None]
    add_: Callable[[Tensor, Tensor, Tensor, int | None], None]
    reduce: Callable[[Tensor, int, int | None, Tensor | None, int | None], Tensor]


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

    def compress(x: Tensor, block: int | None, residual: Tensor | None, key: int | None) -> Tensor:
        _check_apart(residual, "residual", x, "values")
        packed: Tensor = _for(format, x, block, key).compress(format, x, block, residual, key)
        return packed

    def decompress_(out: Tensor, packed: Tensor, block: int | None) -> None:
        _check_apart(out, "out", packed, "packed rows")
        _for(format, packed, block).decompress_(format, out, packed, block)

    def add_(out: Tensor, packed: Tensor, weights: Tensor, block: int | None) -> None:
        _check_apart(out, "out", packed, "packed rows")
        _for(format, packed, block).add_(format, out, packed, weights, block)

    def reduce(packed: Tensor, n: int, block: int | None, residual: Tensor | None, key: int | None) -> Tensor:
        _check_apart(residual, "residual", packed, "packed rows")
        sent: Tensor = _for(format, packed, block, key).reduce(format, packed, n, block, residual, key)
        return sent

    def fake_compress(x: Tensor, block: int | None, residual: Tensor | None, key: int | None) -> Tensor:
        return x.new_empty(x.shape[0], format.row_bytes(x.shape[1], block), dtype=torch.uint8)

    def fake_reduce(packed: Tensor, n: int, block: int | None, residual: Tensor | None, key: int | None) -> Tensor:
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


def _check_apart(written: Tensor | None, its_name: str, read: Tensor, name: str) -> None:
    """Raise if what is written lies in the memory of what is read; else count what is about to be written."""
    if written is None:
        return
    a, b = written.data_ptr(), read.data_ptr()
    if written.numel() and read.numel() and a < b + read.nbytes and b < a + written.nbytes:
        raise ValueError(f"{its_name} and the {name} share memory; give {its_name} memory of its own")
    increment_version(written)  # compiled units write unseen


def _for(format: Format, values: Tensor, block: int | None, key: int | None = None) -> Any:
    if values.is_cuda:
        # One block for a whole row is there for comparison, and has no kernel.
        return definition if block is None else _kernels()
    return few if key is None and few.takes(format, values) else definition


@cache
def _kernels() -> Any:
    from . import launch

    return launch
