"""Definitions compiled once for the CPU.

A unit is a function of tensors that overwrites its first arguments; two-dimensional arguments hold as many rows (blocks), and any other is small.
`call` runs a unit on many values through Inductor, and on few as it is written. What Inductor makes is taken once for each width and set of dtypes and
then called directly: it has no guards that another size could fail, and the user's own use of `torch.compile`, its resets and its limits do not touch it.
It is used only if it gives the bits of the definition on a probe, which makes the definition the oracle on every machine.
"""

import contextlib
import inspect
import logging
import os
import shutil
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

Unit = Callable[..., None]

WORTHWHILE = 1 << 14  # values; with fewer, the calls cost more than the arithmetic
ROWS = 1 << 12  # of the example that is traced: enough for Inductor to divide the work among threads

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


def worthwhile(count: int) -> bool:
    return count >= WORTHWHILE and not is_eager()


def call(unit: Unit, *arguments: Tensor) -> None:
    first = arguments[0]
    if first.dim() == 2 and first.shape[0] > 1 and worthwhile(first.numel()) and all(map(_plain, arguments)):
        torch.get_num_threads()  # a thread learns of torch.set_num_threads at its first question
        unit = compiled(unit, arguments)
    unit(*arguments)


def _plain(argument: Tensor) -> bool:
    return argument.device.type == "cpu" and argument.is_contiguous()


def compiled(unit: Unit, like: tuple[Tensor, ...]) -> Unit:
    """Return what computes `unit` for arguments of these dtypes and widths, compiling it the first time."""
    key = (unit, *((argument.dtype, argument.shape[1:]) for argument in like))
    if key not in _units:
        with _lock:
            if key not in _units:
                _units[key] = _compile(unit, like) if has_compiler() else unit
    return _units[key]


def has_compiler() -> bool:
    return _find_compiler(os.environ.get("CXX"))


def _compile(unit: Unit, like: tuple[Tensor, ...]) -> Unit:
    try:
        with torch.inference_mode(False), torch.no_grad():
            candidate = _trace(unit, [_example(argument, ROWS) for argument in like])
            if _agree(unit, candidate, like):
                return candidate
        reason = "its result differs from the definition's"
    except Exception as error:  # whatever is wrong with the compiler, the definition is right
        reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
    _log.warning("%s runs as it is written, not compiled, and will be many times slower (%s)", unit.__name__, reason)
    return unit
