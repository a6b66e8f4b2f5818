"""Definitions compiled once for the CPU.

A unit is a function of tensors and constants that overwrites its first arguments; two-dimensional tensors hold as
many rows (blocks), and any other is small. `call` runs a unit through Inductor, `plain` as it is written. What
Inductor makes is taken once for each width and set of dtypes and then called directly: it has no guards that another
size could fail, and the user's own use of `torch.compile`, its resets and its limits do not touch it. It is used only
if it gives the bits of the definition on a probe, which makes the definition the oracle on every machine.
"""

import contextlib
import functools
import logging
import os
import shutil
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.fx
from torch import Tensor

Unit = Callable[..., object]

WORTHWHILE = 1 << 16  # values in all: fewer gain less than 0.1 ms a call, which is long in paying for a compilation
SHORTEST = 1 << 12  # values of a row: with fewer, a call takes longer than its arithmetic
ROWS = 1 << 12  # of the example that is traced: enough for Inductor to divide the work among threads

# Only what is marked is dynamic, whatever shapes were seen before.
DYNAMO_SETTINGS = {"assume_static_by_default": True, "automatic_dynamic_shapes": False, "suppress_errors": False}
INDUCTOR_SETTINGS = {
    "cpp.dynamic_threads": True,  # as many threads as torch.set_num_threads says when it runs, not when it was compiled
    "cpp.enable_floating_point_contract_flag": "off",
    "cpp.enable_unsafe_math_opt_flag": False,
    "cpp_wrapper": False,
    "compile_threads": 1,  # a few small functions are not worth a pool of processes
}

_log = logging.getLogger("baguakit")
_units: dict[Any, Unit] = {}
_lock = threading.Lock()
_local = threading.local()


@contextlib.contextmanager
def eager() -> Iterator[None]:
    """Run every unit of this thread as it is written."""
    before, _local.eager = is_eager(), True
    try:
        yield
    finally:
        _local.eager = before


def is_eager() -> bool:
    return getattr(_local, "eager", False)


def runner(rows: int, n: int) -> Callable[..., None]:
    """Return what runs units on rows of `n` values: `call`, `ready` or, where that would gain nothing, `plain`."""
    if is_eager():
        return plain
    if rows * n >= WORTHWHILE and n >= SHORTEST:
        return call
    return ready if rows == 1 else plain  # `plain` takes all rows together


def plain(unit: Unit, *arguments: Any) -> None:
    unit(*arguments)


def call(unit: Unit, *arguments: Any) -> None:
    """Run a unit compiled, which takes seconds the first time."""
    (compiled(unit, arguments) if _all_suit(arguments) else unit)(*arguments)


def ready(unit: Unit, *arguments: Any) -> None:
    """Run a unit compiled where larger tensors have had it compiled, else as it is written: nothing waits for it."""
    (_units.get(_key(unit, arguments), unit) if _all_suit(arguments) else unit)(*arguments)


def _all_suit(arguments: tuple[Any, ...]) -> bool:
    torch.get_num_threads()  # a thread learns of torch.set_num_threads at its first question
    return all(map(_suits, arguments))


def _suits(argument: Any) -> bool:
    if not isinstance(argument, Tensor):
        return True
    rows = argument.dim() < 2 or (argument.dim() == 2 and argument.shape[0] > 1)
    return rows and argument.device.type == "cpu" and argument.is_contiguous()


def compiled(unit: Unit, like: tuple[Any, ...]) -> Unit:
    """Return what computes `unit` for arguments of these dtypes, widths and values, compiling it the first time."""
    key = _key(unit, like)
    if key not in _units:
        with _lock:
            if key not in _units:
                _units[key] = _compile(unit, like) if _has_compiler() else unit
    return _units[key]


def _key(unit: Unit, like: tuple[Any, ...]) -> Any:
    return (unit, *((part.dtype, part.shape[1:]) if isinstance(part, Tensor) else part for part in like))


@functools.cache
def _has_compiler() -> bool:
    names = [name for name in (os.environ.get("CXX"), "g++", "clang++") if name]
    found = any(shutil.which(name) for name in names)
    if not found:
        _log.warning(
            "no C++ compiler (%s) was found: compression on the CPU will be many times slower", ", ".join(names)
        )
    return found


def _compile(unit: Unit, like: tuple[Any, ...]) -> Unit:
    try:
        # torch's own warnings while it compiles are not the user's, and would end it where warnings are errors.
        with torch.inference_mode(False), torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            candidate = _trace(unit, _examples(like, ROWS))
            if all(_agree(unit, candidate, _examples(like, rows)) for rows in (2, 37)):
                return candidate
        reason = "compiled, its result differs"
    except Exception as error:  # whatever ails the compiler, the definition is right
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    _log.warning("%s runs as written, many times slower than compiled: %s", unit.__name__, reason)
    return unit


def _trace(unit: Unit, examples: list[Any]) -> Unit:
    taken: list[tuple[Unit, list[int | None]]] = []

    def take(graph: torch.fx.GraphModule, inputs: list[Any]) -> Unit:
        with torch._inductor.config.patch(INDUCTOR_SETTINGS):
            made = torch._dynamo.lookup_backend("inductor")(graph, inputs)
        taken.append((made, [next((i for i, e in enumerate(examples) if e is given), None) for given in inputs]))
        return made

    for example in examples:
        if isinstance(example, Tensor) and example.dim() == 2:
            torch._dynamo.mark_dynamic(example, 0)
    # A code object of its own keeps Dynamo's records, and its limit on them, apart from those of other widths.
    copy = types.FunctionType(unit.__code__.replace(), unit.__globals__, unit.__name__)
    with torch._dynamo.config.patch(DYNAMO_SETTINGS):
        torch.compile(copy, backend=take, fullgraph=True)(*examples)
    if not taken:
        raise RuntimeError("torch.compile is disabled")
    made, order = taken[0]

    def run(*arguments: Any) -> None:
        # The only input that is no argument is the number of rows, the one size that was not fixed.
        made(*[arguments[0].shape[0] if i is None else arguments[i] for i in order])

    return run


def _examples(like: tuple[Any, ...], rows: int) -> list[Any]:
    # A generator of its own leaves the user's random numbers alone.
    source = torch.Generator().manual_seed(rows)
    return [_example(part, rows, source) if isinstance(part, Tensor) else part for part in like]


def _example(like: Tensor, rows: int, source: torch.Generator) -> Tensor:
    shape = (rows, *like.shape[1:]) if like.dim() == 2 else like.shape
    if not like.dtype.is_floating_point:
        return torch.randint(0, 256, shape, generator=source, device="cpu").to(like.dtype)
    scale = torch.randint(-40, 40, (*shape[:-1], 1), generator=source, device="cpu")
    values = torch.randn(shape, generator=source, dtype=torch.float32, device="cpu") * 2.0**scale
    values[0] = 0
    return values.to(like.dtype)


def _agree(unit: Unit, candidate: Unit, arguments: list[Any]) -> bool:
    copies = [part.clone() if isinstance(part, Tensor) else part for part in arguments]
    unit(*arguments)
    candidate(*copies)
    return all(_equal(*pair) for pair in zip(arguments, copies, strict=True) if isinstance(pair[0], Tensor))


def _equal(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal, every NaN being one."""
    broken = a != a
    return torch.equal(broken, b != b) and torch.equal(a.masked_fill(broken, 0), b.masked_fill(broken, 0))
