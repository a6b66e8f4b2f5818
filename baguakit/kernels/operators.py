"""The operations of all families, by device: CUDA tensors take the kernels, all others the definition.

They are operators of torch where somebody records them, and plain calls where nobody does: a dispatch costs the host
more than the launch of a kernel, on a thread that backward waits for.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial, update_wrapper
from importlib import import_module
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from . import mixing, topk
from .blockwise import definition as blockwise
from .blockwise.format import Format
from .cpu import units

Result = TypeVar("Result")

imported = cache(import_module)  # Triton is imported at the first kernel: where there is no GPU, it need not be there


def recorded(x: Tensor) -> bool:
    """Return whether work on `x` is recorded, or stands for other work.

    So it is under `torch.compile`, in a dispatch mode (`make_fx`, `FakeTensorMode`), and for a subclass of tensors.
    """
    modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
    return torch.compiler.is_compiling() or type(x) is not Tensor or modes() > 0


class Operator(Generic[Result]):
    """A function of a tensor and other arguments, called as an operator of torch where it is recorded.

    It has no gradient: what calls it asks for none. No argument of the function has a default, because torch 2.11 looks
    for mutated arguments among those that are not.

    Args:
        function: what is called.
        mutates: the names of the arguments that it overwrites.
        name: of the operator, if not that of the function.
        fake: returns what has the shapes of its results, if it has any.
    """

    def __init__(
        self,
        function: Callable[..., Result],
        mutates: Iterable[str],
        name: str = "",
        fake: Callable[..., Result] | None = None,
    ) -> None:
        update_wrapper(self, function)
        self.function = function
        name = f"baguakit::{name or function.__name__}"
        self.registered: Any = torch.library.custom_op(name, function, mutates_args=mutates)
        if fake is not None:
            self.registered.register_fake(fake)

    def __call__(self, x: Tensor, *arguments: Any) -> Result:
        function: Callable[..., Result] = self.registered if recorded(x) else self.function
        return function(x, *arguments)


def uploaded(x: Tensor, device: torch.device) -> Tensor:
    """Return `x` on `device`. The host waits for nothing.

    A tensor on the CPU is pinned first: the copy of another may wait for all that its stream has been given before.
    """
    if x.is_cpu and device.type == "cuda" and not torch.compiler.is_compiling():  # Dynamo need not know pinned memory
        x = x.pin_memory()
    return x.to(device, non_blocking=True)


# Mixing: weighted sums, and the landing of results.


@partial(Operator, mutates={"x"})
def mix_(x: Tensor, others: Sequence[Tensor], weights: Sequence[float]) -> None:
    """Mix tensors of one shape, dtype and device:  x ← weights[0] · x + Σ weights[k] · others[k − 1].

    x is contiguous, and shares no memory with the others.
    """
    _for(x).mix_(x.view(-1), [other.reshape(-1) for other in others], weights)


@partial(Operator, mutates={"x"})
def land_(x: Tensor, result: Tensor, before: Tensor) -> None:
    """Land a result:  x ← result where x equals `before`, else x + (result − before)."""
    alike = x.dtype == result.dtype == before.dtype
    if alike and x.is_contiguous() and result.is_contiguous() and before.is_contiguous():
        _for(x).land_(x.view(-1), result.view(-1), before.view(-1))
    else:  # the definition takes any strides, and promotes
        mixing.land_(x, result, before)


def _for(x: Tensor) -> Any:
    if not x.is_cuda:
        return mixing
    increment_version(x)  # kernels write unseen
    return imported(".mixing_gpu", __package__)


# The k largest values of each chunk.


def _fake_select(x: Tensor, chunk: int, k: int, rest: int, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    shape = (x.shape[0], x.shape[1] // chunk * k + rest)
    return x.new_empty(shape, dtype=torch.int32), x.new_empty(shape, dtype=torch.float32)


@partial(Operator, mutates={"residual"}, name="topk_select", fake=_fake_select)
def select(x: Tensor, chunk: int, k: int, rest: int, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the places and values of the `k` largest of each chunk of rows `x` (rows, n), and `rest` of a shorter one.

    `residual` (fp32, same shape) receives all the others.
    """
    if not x.is_cuda:
        return topk.select(x, chunk, k, rest, residual)
    if residual is not None:
        increment_version(residual)  # kernels write unseen
    selected: tuple[Tensor, Tensor] = imported(".topk_gpu", __package__).select(x, chunk, k, rest, residual)
    return selected


# The operations of formats in blocks.


class Operators(NamedTuple):
    """The functions of `blockwise/definition.py` for one format."""

    format: Format
    compress: Operator[Tensor]
    decompress_: Operator[None]
    add_: Operator[None]
    reduce: Operator[Tensor]


def operators_of(format: Format) -> Operators:
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
    """Return the module whose functions take `values`, or packed rows.

    Few values on a CPU take NumPy, if the format has its arithmetic for that.
    """
    if values.is_cuda:
        return imported(".blockwise.gpu", __package__)
    few_values = 0 < values.numel() < units.COMPILED_VALUES
    if few_values and key is None and format.in_numpy is not None and units.thread.how is not None:
        return format.in_numpy
    return blockwise
