"""Definitions compiled once for the CPU.

A unit is a function of tensors and constants that overwrites its first arguments; two-dimensional tensors hold as
many rows (blocks), and any other is small. `call` runs a unit compiled, `plain` as it is written. What Inductor makes
of units is kept in libraries, one for each set of units, widths and dtypes, which every process of this machine loads
without Dynamo: they have no guards that another size could fail, and the user's own use of `torch.compile`, its resets
and its limits do not touch them. A unit is used only if it gives the bits of the definition on a probe, which makes
the definition the oracle on every machine.
"""

import contextlib
import logging
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from . import libraries
from .examples import Unit, agree, examples

WORTHWHILE = 1 << 16  # values in all: fewer gain less than 0.1 ms a call, which is long in paying for a compilation
SHORTEST = 1 << 12  # values of a row: with fewer, a call takes longer than its arithmetic

Do = Callable[..., None]

_log = logging.getLogger("baguakit")
_units: dict[Any, Unit] = {}
_lock = threading.Lock()
_local = threading.local()


@contextlib.contextmanager
def eager() -> Iterator[None]:
    """Run every unit of this thread as it is written."""
    with _instead(plain):
        yield


@contextlib.contextmanager
def together() -> Iterator[None]:
    """Compile in one go, at the end, what this thread calls meanwhile: until then units run as they are written."""
    noted: dict[Any, tuple[Unit, tuple[Any, ...]]] = {}

    def note(unit: Unit, *arguments: Any) -> None:
        if _all_suit(arguments):
            noted.setdefault(_key(unit, arguments), (unit, arguments))
        ready(unit, *arguments)

    with _instead(note):
        yield
    _compile(noted)


@contextlib.contextmanager
def _instead(do: Do) -> Iterator[None]:
    before, _local.call = getattr(_local, "call", call), do
    try:
        yield
    finally:
        _local.call = before


def is_eager() -> bool:
    return getattr(_local, "call", call) is plain


def runner(rows: int, n: int) -> Do:
    """Return what runs units on rows of `n` values: `call`, `ready` or, where that would gain nothing, `plain`."""
    do: Do = getattr(_local, "call", call)
    if do is plain or (rows * n >= WORTHWHILE and n >= SHORTEST):
        return do
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
    torch.get_num_threads()  # a new thread takes the number that was set when it first asks
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
        _compile({key: (unit, like)})
    return _units[key]


def _key(unit: Unit, like: tuple[Any, ...]) -> Any:
    return (unit, *((part.dtype, part.shape[1:]) if isinstance(part, Tensor) else part for part in like))


def _compile(noted: dict[Any, tuple[Unit, tuple[Any, ...]]]) -> None:
    """See to it that units are compiled, from one library for all of them."""
    with _lock:
        if noted.keys() <= _units.keys():
            return
        # torch's own warnings while it compiles are not the user's, and would end it where warnings are errors.
        with torch.inference_mode(False), torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for (key, (unit, like)), candidate in zip(noted.items(), _loaded([*noted.values()]), strict=True):
                _units.setdefault(key, _checked(unit, like, candidate))


def _loaded(calls: list[tuple[Unit, tuple[Any, ...]]]) -> list[Unit | None]:
    if libraries.compiler() is not None:
        try:
            return libraries.load(calls)
        except Exception as error:  # whatever ails the compiler, the definition is right
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            _log.warning("compression on the CPU runs as written, many times slower than compiled: %s", reason)
    return [None] * len(calls)


def _checked(unit: Unit, like: tuple[Any, ...], candidate: Unit | None) -> Unit:
    """The candidate if it does what the unit does, else the unit."""
    if candidate is None:
        return unit
    if all(agree(unit, candidate, examples(like, rows)) for rows in (2, 37)):
        return candidate
    _log.warning("%s runs as written, many times slower than compiled: compiled, its result differs", unit.__name__)
    return unit
