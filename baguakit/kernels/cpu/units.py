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
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor

from . import libraries
from .inductor import Unit, examples

# The least values, and the least values in a row, for which units are compiled: fewer gain less than 0.1 ms a call,
# which does not pay for a compilation, and on shorter rows a call takes longer than its arithmetic.
COMPILED_VALUES, COMPILED_ROW = 1 << 16, 1 << 12

RunUnit = Callable[..., None]  # runs a unit: the first argument; the others are the unit's
Kind = tuple[Any, ...]
"""All that the code of units depends on besides their number of arguments: constants, width and dtype of blocks."""
Key = tuple[Unit, Kind, int]

_log = logging.getLogger("baguakit")
_units: dict[Key, Unit] = {}
_lock = threading.Lock()


def plain(unit: Unit, *arguments: Any) -> None:
    """Run a unit as it is written."""
    unit(*arguments)


def call(kind: Kind, unit: Unit, *arguments: Any) -> None:
    """Run a unit compiled, which takes seconds the first time."""
    key = (unit, kind, len(arguments))
    if key not in _units:
        _compile({key: arguments})
    _units[key](*arguments)


def ready(kind: Kind, unit: Unit, *arguments: Any) -> None:
    """Run a unit compiled where larger tensors have had it compiled, else as it is written: nothing waits for it."""
    _units.get((unit, kind, len(arguments)), unit)(*arguments)


# The function that runs units in a thread; None runs them as they are written.
how: ContextVar[Callable[..., None] | None] = ContextVar("baguakit units", default=call)


@contextlib.contextmanager
def eager(instead: Callable[..., None] | None = None) -> Iterator[None]:
    """Run every unit of this thread as it is written, or by another function."""
    token = how.set(instead)
    try:
        yield
    finally:
        how.reset(token)


@contextlib.contextmanager
def together() -> Iterator[None]:
    """Compile in one go, at the end, what this thread calls meanwhile: until then units run as they are written."""
    noted: dict[Key, tuple[Any, ...]] = {}

    def note(kind: Kind, unit: Unit, *arguments: Any) -> None:
        noted.setdefault((unit, kind, len(arguments)), arguments)
        ready(kind, unit, *arguments)

    with eager(note):
        yield
    _compile(noted)


def runner(kind: Kind, rows: int, n: int) -> RunUnit:
    """Return the function that runs units of one kind on rows of `n` values on the CPU.

    Their tensors are contiguous and have two dimensions: two or more blocks, and their width; or are small.
    """
    chosen = how.get()
    if chosen is None:
        return plain
    torch.get_num_threads()  # a new thread takes the number that was set when it first asks
    if rows * n >= COMPILED_VALUES and n >= COMPILED_ROW:
        return partial(chosen, kind)
    return partial(ready, kind) if rows == 1 else plain  # `plain` takes all rows together


def _compile(noted: dict[Key, tuple[Any, ...]]) -> None:
    """Compile units that are not compiled yet, for arguments like those noted, in one library for all of them."""
    with _lock:
        if noted.keys() <= _units.keys():
            return
        # torch's own warnings while it compiles are not the user's, and would end it where warnings are errors.
        with torch.inference_mode(False), torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            candidates: list[Unit | None] = [None] * len(noted)
            if libraries.compiler() is not None:
                try:
                    candidates = libraries.load([(unit, like) for (unit, *_), like in noted.items()])
                except Exception as error:  # whatever ails the compiler, the definition is right
                    reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
                    _log.warning("compression on the CPU runs as written, many times slower than compiled: %s", reason)
            for (key, like), candidate in zip(noted.items(), candidates, strict=True):
                if candidate is not None and not all(_agree(key[0], candidate, examples(like, n)) for n in (2, 37)):
                    words = "%s runs as written, many times slower than compiled: compiled, its result differs"
                    _log.warning(words, key[0].__name__)
                    candidate = None
                _units.setdefault(key, candidate or key[0])


def _agree(unit: Unit, candidate: Unit, arguments: list[Any]) -> bool:
    """Return whether two units write the same values into copies of the arguments, and NaN in the same places."""
    copies = [part.clone() if isinstance(part, Tensor) else part for part in arguments]
    unit(*arguments)
    candidate(*copies)
    pairs = [(a, b) for a, b in zip(arguments, copies, strict=True) if isinstance(a, Tensor)]
    return all(torch.allclose(a, b, rtol=0, atol=0, equal_nan=True) for a, b in pairs)
