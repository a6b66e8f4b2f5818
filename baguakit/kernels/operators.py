"""All operations, dispatched by device: kernels where there are any for the device, and elsewhere the definition.

`mixing.py`, `topk.py` and `blockwise/definition.py` document the operations; here `format` is the name of a format.
While torch records, an operation is called as an operator of torch, otherwise as a plain function, because torch's
dispatch of an operator takes the host longer than the launch of a kernel, and backward may wait for the host.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial, update_wrapper
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.nn import Parameter

from . import cpu, mixing
from .blockwise import cpu as compiled
from .blockwise.format import FORMATS

Result = TypeVar("Result")

# The modules of families: the definition, and the kernels for CPUs and GPUs.
MODULES = {
    "mixing": ("mixing", "mixing_cpu", "mixing_gpu"), "topk": ("topk", "topk_cpu", "topk_gpu"),
    **{name: (f"{name}.definition", f"{name}.cpu", f"{name}.gpu") for name in ("blockwise", "changes", "steps")},
}  # fmt: skip
imported = cache(import_module)  # Triton is imported at the first kernel: where there is no GPU, it need not be there


class Operator(Generic[Result]):
    """A function of a tensor and other arguments. While torch records (compiles, traces), it is called as an operator.

    It has no gradient. `mutates` names the arguments that it overwrites. Such arguments have no defaults, because torch
    2.11 does not find a mutated argument that is left out. `fake` returns tensors with the shapes and dtypes of the
    results, if there are results. `name` is the name of the operator; by default, the name of the function.
    """

    def __init__(
        self, function: Callable[..., Result], mutates: Iterable[str], name: str = "", fake: Any = None
    ) -> None:
        update_wrapper(self, function)
        self.function = function
        name = f"baguakit::{name or function.__name__}"
        self.registered: Any = torch.library.custom_op(name, function, mutates_args=mutates)
        if fake is not None:
            self.registered.register_fake(fake)

    def __call__(self, x: Tensor, *arguments: Any) -> Result:
        # torch records calls under `torch.compile`, in a dispatch mode (`make_fx`, `FakeTensorMode`), and for
        # subclasses of Tensor.
        modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
        recorded = torch.compiler.is_compiling() or type(x) is not Tensor or modes() > 0
        result: Result = (self.registered if recorded else self.function)(x, *arguments)
        return result


@cache
def has_kernels(device: torch.device) -> bool:
    """Return whether there are kernels for a device. On other devices, operations run as in the definition.

    There are for CPUs, for CUDA (so torch also calls AMD's GPUs), and for the device that Triton serves: Intel's XPU.
    """
    if device.type == "cpu" or find_spec("triton") is None:
        return device.type == "cpu"
    return device.type == "cuda" or device.type == served_by_triton()


def served_by_triton() -> str:
    """Return the type of the device for which Triton compiles in this process; "" if there is none."""
    try:
        return str(imported("triton").runtime.driver.active.get_active_torch_device().type)
    except RuntimeError:  # no driver finds its device
        return ""


def home_of(x: Tensor, family: str, *written: Tensor | None, in_c: bool = True) -> Any:
    """Return the module for `x`: that of the kernels for its device; or the definition, for other dtypes and devices.

    Kernels write to the tensors `written` unseen by autograd, so their versions are increased here.
    """
    in_c = in_c and x.is_cpu and type(x) in (Tensor, Parameter) and x.dtype in cpu.TAKEN and bool(cpu.functions(family))
    on_gpu = x.is_cuda or (not x.is_cpu and has_kernels(x.device))
    if on_gpu or in_c:
        increment_version([each for each in written if each is not None])
    return imported(f".{MODULES[family][2 if on_gpu else int(in_c)]}", __package__)


@partial(Operator, mutates={"x"})
def mix_(x: Tensor, others: Sequence[Tensor], weights: Sequence[float]) -> None:
    # x is contiguous, and shares no memory with the others.
    home_of(x, "mixing", x).mix_(x.view(-1), [other.reshape(-1) for other in others], weights)


@partial(Operator, mutates={"x"})
def land_(x: Tensor, result: Tensor, before: Tensor, good: Tensor | None) -> None:
    alike = x.dtype == result.dtype == before.dtype
    if alike and x.is_contiguous() and result.is_contiguous() and before.is_contiguous():
        home_of(x, "mixing", x).land_(x.view(-1), result.view(-1), before.view(-1), good)
    else:  # the definition takes any strides, and promotes
        mixing.land_(x, result, before, good)


def _fake_select(x: Tensor, chunk: int, k: int, rest: int, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    shape = (x.shape[0], x.shape[1] // chunk * k + rest)
    return x.new_empty(shape, dtype=torch.int32), x.new_empty(shape, dtype=torch.float32)


@partial(Operator, mutates={"residual"}, name="topk_select", fake=_fake_select)
def select(x: Tensor, chunk: int, k: int, rest: int, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    selected: tuple[Tensor, Tensor] = home_of(x, "topk", residual).select(x, chunk, k, rest, residual)
    return selected


@partial(Operator, mutates={"packed", "ok"}, name="topk_join_")
def join_(packed: Tensor, places: Tensor, values: Tensor | None, chunk: int, ok: Tensor | None) -> None:
    home_of(packed, "topk").join_(packed, places, values, chunk, ok)


@partial(Operator, mutates={"out", "ok"}, name="topk_add_")
def add_rows_(
    out: Tensor, packed: Tensor, values: Tensor | None, weights: Tensor | None, chunk: int, k: int, rest: int,
    ok: Tensor | None,
) -> None:  # fmt: skip
    home_of(out, "topk", out).add_(out, packed, values, weights, chunk, k, rest, ok)


@partial(
    Operator, mutates={"residual"},
    fake=lambda x, format, block, *_: x.new_empty(
        x.shape[0], FORMATS[format].row_bytes(x.shape[1], block), dtype=torch.uint8
    ),
)  # fmt: skip
def compress(x: Tensor, format: str, block: int, residual: Tensor | None, key: int | None) -> Tensor:
    home = _blockwise(format, block, x, "values", residual, "residual")
    packed: Tensor = home.compress(FORMATS[format], x, block, residual, key)
    return packed


@partial(Operator, mutates={"out", "ok"})
def decompress_(out: Tensor, format: str, packed: Tensor, block: int, ok: Tensor | None) -> None:
    _blockwise(format, block, packed, "packed rows", out, "out").decompress_(FORMATS[format], out, packed, block, ok)


@partial(Operator, mutates={"out"})
def add_(out: Tensor, format: str, packed: Tensor, weights: Tensor, block: int) -> None:
    _blockwise(format, block, packed, "packed rows", out, "out").add_(FORMATS[format], out, packed, weights, block)


@partial(
    Operator, mutates={"residual", "ok"},
    fake=lambda packed, format, n, block, *_: packed.new_empty(1, FORMATS[format].row_bytes(n, block)),
)  # fmt: skip
def reduce(
    packed: Tensor, format: str, n: int, block: int, residual: Tensor | None, key: int | None, ok: Tensor | None
) -> Tensor:
    home = _blockwise(format, block, packed, "packed rows", residual, "residual")
    sent: Tensor = home.reduce(FORMATS[format], packed, n, block, residual, key, ok)
    return sent


@partial(
    Operator, mutates={"out", "residual", "counters"},
    fake=lambda out, x, residual, addresses, counters, *_: out.new_empty(len(counters), dtype=torch.bool),
)  # fmt: skip
def exchange_in_one_kernel_(
    out: Tensor, x: Tensor | None, residual: Tensor | None, addresses: Tensor, counters: Tensor, control: Tensor,
    rank: int, half_bytes: int, limit: int, format: str, block: int, sent: torch.dtype | None, kind: str,
    sends: Sequence[int], receives: Sequence[int], packed: Sequence[int], weights: Sequence[float], flag: bool,
) -> Tensor:  # fmt: skip
    # Values are sent in a format, or in the dtype `sent`, or exactly. `kind` is a function in `exchange`, whose `flag`
    # is `one_hop`, `average` or `varies`; a mean overwrites `out`, and has no x. `packed` are the lengths of the parts
    # that an all-to-all packs. The other arguments are those of `exchange.tiles_gpu.Memory`.
    _check_apart(out if x is None else x, "values", residual, "residual")
    increment_version([each for each in (out, residual) if each is not None])
    home = imported(f".exchange.{'mean' if kind == 'mean_' else 'rows'}_gpu", __package__)
    memory = home.Memory(
        rank, len(addresses), addresses, counters, control, half_bytes, limit, kind == "neighbor_mean_"
    )
    plain = home.Wire(None, dtype=sent or out.dtype, exact=sent is None) if sent or out.is_floating_point() else None
    wire = home.Wire(FORMATS[format], block) if format else plain
    rounds = wire if format or sent else None
    ok: Tensor = getattr(home, kind)(memory, *{
        "mean_": (wire, out, residual, flag), "reduce_scatter": (wire, x, out, residual, flag),
        "all_gather": (rounds, x, out), "all_to_all": (rounds, x, out, sends, receives, {*packed}.__contains__),
        "neighbor_mean_": (wire, out, sends, receives, weights, flag),
    }[kind])  # fmt: skip
    return ok


def _blockwise(format: str, block: int, read: Tensor, name: str, written: Tensor | None, its_name: str) -> Any:
    """Return the module for the device of `read`; raise a ValueError if `read` and `written` share memory."""
    _check_apart(read, name, written, its_name)
    return home_of(read, "blockwise", written, in_c=compiled.serves(FORMATS[format], block))


def _check_apart(read: Tensor, name: str, written: Tensor | None, its_name: str) -> None:
    if written is not None:
        a, b = written.data_ptr(), read.data_ptr()
        if written.numel() and read.numel() and a < b + read.nbytes and b < a + written.nbytes:
            raise ValueError(f"{its_name} and the {name} share memory; give {its_name} memory of its own")
