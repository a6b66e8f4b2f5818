"""Compile units of definitions once for the CPU, and store the compiled code in libraries.

A unit is a function of tensors and constants that overwrites its first arguments. Its two-dimensional tensors have the
same number of rows (blocks); other tensors are small. `call` runs a unit compiled, and `plain` runs it uncompiled. A
library holds the compiled code for one set of units, widths and dtypes. Every process of this machine loads it without
Dynamo. A library has no guards, so it serves any number of rows, and it does not depend on the user's own use of
`torch.compile`. A compiled unit is used only if its results equal those of the definition on test values.

Only this user can write to the folder of libraries. The name of a library has a hash of everything that its code
depends on, and a digest of its bytes, so that a damaged library is made again. Only one process of this user compiles
at a time; the others wait, and then load the library.
"""

import contextlib
import ctypes
import functools
import hashlib
import logging
import operator
import os
import platform
import shutil
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import inductor
from .inductor import Call, Unit

# Units are compiled for calls with at least COMPILED_VALUES values, in rows of COMPILED_ROW or more. With fewer values,
# compiled code saves less than 0.1 ms a call; with shorter rows, the overhead of a call exceeds its arithmetic.
COMPILED_VALUES, COMPILED_ROW = 1 << 16, 1 << 12
PATIENCE = 600.0  # seconds after which a process compiles beside one that comes to no end
QUIET = 2.0  # seconds that a process waits before it says so
# Fields of /proc/cpuinfo that identify a processor: libraries are compiled for the processor of this machine.
PROCESSOR = ("vendor_id", "model name", "flags", "CPU implementer", "CPU part", "Features", "isa", "cpu")

RunUnit = Callable[..., None]  # runs a unit: the first argument; the others are the unit's
Kind = tuple[Any, ...]
"""All that compiled code depends on, besides the number of arguments: constants, width and dtype of blocks."""
Key = tuple[Unit, Kind, int]

_log = logging.getLogger("baguakit")
_once = functools.cache(_log.warning)
_units: dict[Key, Unit] = {}
_lock = threading.Lock()


def plain(unit: Unit, *arguments: Any) -> None:
    """Run a unit uncompiled."""
    unit(*arguments)


def call(kind: Kind, unit: Unit, *arguments: Any) -> None:
    """Run a unit compiled. The first call compiles it, which takes seconds."""
    key = (unit, kind, len(arguments))
    if key not in _units:
        _compile({key: arguments})
    _units[key](*arguments)


def ready(kind: Kind, unit: Unit, *arguments: Any) -> None:
    """Run a unit compiled if calls for larger tensors have compiled it already, else uncompiled. Never compile it."""
    _units.get((unit, kind, len(arguments)), unit)(*arguments)


# The function that runs the units of a thread; with None, units run uncompiled.
how: ContextVar[Callable[..., None] | None] = ContextVar("baguakit units", default=call)


@contextlib.contextmanager
def eager(instead: Callable[..., None] | None = None) -> Iterator[None]:
    """In a `with` block, run this thread's units uncompiled, but those for large tensors by `instead`, if given."""
    token = how.set(instead)
    try:
        yield
    finally:
        how.reset(token)


@contextlib.contextmanager
def together() -> Iterator[None]:
    """Collect the units that run in a `with` block, and compile all of them at the end of the block."""
    noted: dict[Key, tuple[Any, ...]] = {}

    def note(kind: Kind, unit: Unit, *arguments: Any) -> None:
        noted.setdefault((unit, kind, len(arguments)), arguments)
        ready(kind, unit, *arguments)

    with eager(note):
        yield
    _compile(noted)


def runner(kind: Kind, rows: int, n: int) -> RunUnit:
    """Return the function that runs units of one kind on rows of `n` values on the CPU.

    A tensor of a unit is small, or it is contiguous with two dimensions: blocks (two or more), and their width.
    """
    chosen = how.get()
    if chosen is None:
        return plain
    torch.get_num_threads()  # a new thread takes the number that was set when it first asks
    if rows * n >= COMPILED_VALUES and n >= COMPILED_ROW:
        return partial(chosen, kind)
    return partial(ready, kind) if rows == 1 else plain  # `plain` takes all rows together


def _compile(noted: dict[Key, tuple[Any, ...]]) -> None:
    """Compile all units in `noted` to one library, for arguments like those in `noted`, unless all are compiled."""
    with _lock:
        if noted.keys() <= _units.keys():
            return
        # Hide torch's warnings during compilation: they do not concern the user, who may turn warnings into errors.
        with torch.inference_mode(False), torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            candidates: list[Unit | None] = [None] * len(noted)
            if compiler() is not None:
                try:
                    candidates = load([(unit, like) for (unit, *_), like in noted.items()])
                except Exception as error:  # whatever ails the compiler, the definition is right
                    reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
                    _log.warning("compression on the CPU runs as written, many times slower than compiled: %s", reason)
            for (key, like), candidate in zip(noted.items(), candidates, strict=True):
                if candidate is not None and not all(
                    _agree(key[0], candidate, inductor.examples(like, n)) for n in (2, 37)
                ):
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


def load(calls: list[Call]) -> list[Unit | None]:
    """Return the compiled unit for each pair (unit, example arguments); None if a unit could not be compiled."""
    names = [_described(*call) for call in calls]
    places = sorted(range(len(calls)), key=names.__getitem__)  # one library for a set, whatever its order
    library = _open([calls[i] for i in places])
    return [_caller(library, f"unit_{places.index(i)}", *call) for i, call in enumerate(calls)]


def compiler() -> str | None:
    """Return the path of the C++ compiler that Inductor uses. If there is none, warn once and return None."""
    names = [name for name in (os.environ.get("CXX"), "g++", "clang++") if name]
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        _once(f"no C++ compiler ({', '.join(names)}) was found: compression on the CPU will be many times slower")
    return found


def _described(unit: Unit, like: tuple[Any, ...]) -> str:
    parts = [f"{part.dtype}{tuple(part.shape[1:])}" if isinstance(part, Tensor) else repr(part) for part in like]
    return " ".join([unit.__module__, unit.__name__, *parts])


def _caller(library: ctypes.PyDLL, name: str, unit: Unit, like: tuple[Any, ...]) -> Unit | None:
    """Return the unit that the library has under `name`; warn once and return None if the library does not have it."""
    if (function := getattr(library, name, None)) is None:
        _once(f"{unit.__name__} runs as written, many times slower than compiled: Inductor could not write it")
        return None
    tensors = [i for i, part in enumerate(like) if isinstance(part, Tensor)]
    function.argtypes = [ctypes.c_void_p] * len(tensors) + [ctypes.c_int64]
    tensors_of = operator.itemgetter(*tensors)

    def run(*arguments: Any) -> None:
        if function(*map(Tensor.data_ptr, tensors_of(arguments)), arguments[0].shape[0]):
            raise MemoryError("a compiled unit found no memory for its temporaries")

    return run


def _open(calls: list[Call]) -> ctypes.PyDLL:
    """Return the library of these units, from the folder or newly compiled."""
    parts = [*_machine(), *(_described(*call) for call in calls)]  # all that the code of a library depends on
    name = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]
    try:
        with _folder() as folder:
            if (found := _kept(folder, name)) is not None:
                return found
            with _alone(folder):
                return _kept(folder, name) or _keep(folder, name, calls)
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home
        _once(f"the CPU codec is compiled by each process for itself, since no folder can keep it: {error}")
    with tempfile.TemporaryDirectory(prefix="baguakit-") as temporary:
        return ctypes.PyDLL(str(_make(calls, temporary)))


@functools.cache
def _machine() -> list[str]:
    """Return strings that identify torch, Python, the processor, the compiler and the source of `kernels`."""
    at = os.path.realpath(compiler() or "")
    seen = os.stat(at)
    source = b"".join(file.read_bytes() for file in sorted(Path(__file__).parents[1].rglob("*.py")))
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            lines = file.read(1 << 14).split("\n\n")[0].splitlines()
        processor = [line for line in lines if line.split(":")[0].strip() in PROCESSOR]
    except OSError:
        processor = [platform.processor(), platform.node()]  # such machines seldom share a home
    return [
        *(torch.__version__, str(torch.version.git_version), torch.backends.cpu.get_cpu_capability()),
        *(sys.implementation.cache_tag or sys.version, sys.platform, platform.machine(), *processor),
        *(at, str(seen.st_size), str(seen.st_mtime_ns)),
        hashlib.sha256(source).hexdigest(),
    ]


@contextlib.contextmanager
def _folder() -> Iterator[str]:
    """Yield the folder of libraries; raise an OSError unless this user owns it and nobody else has access to it."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    path = (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "baguakit" / "cpu"
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        seen = os.fstat(handle)
        if seen.st_uid != os.geteuid() or seen.st_mode & 0o077:
            raise PermissionError(f"{path} must be a folder of your own with mode 0700; chmod 700 it, or remove it")
        # The handle refers to the checked folder, even if its path is changed meanwhile.
        held = f"/proc/self/fd/{handle}"
        yield held if os.path.isdir(held) else str(path)
    finally:
        os.close(handle)


def _kept(folder: str, name: str) -> ctypes.PyDLL | None:
    """Return the library `name` from the folder; None if it is missing or damaged."""
    whole = (path for path in Path(folder).glob(f"{name}-*.so") if path.stem == f"{name}-{_digest(path)}")
    return next((ctypes.PyDLL(str(path)) for path in whole), None)


def _keep(folder: str, name: str, calls: list[Call]) -> ctypes.PyDLL:
    """Compile a library and move it into the folder in one atomic operation."""
    with tempfile.TemporaryDirectory(prefix="baguakit-") as build, tempfile.TemporaryDirectory(dir=folder) as beside:
        made = _make(calls, build)
        unfinished = shutil.copyfile(made, Path(beside, "unfinished"))
        for broken in Path(folder).glob(f"{name}-*.so"):
            broken.unlink()
        path = Path(folder, f"{name}-{_digest(made)}.so")
        os.replace(unfinished, path)
    return ctypes.PyDLL(str(path))


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:24]


def _make(calls: list[Call], folder: str) -> Path:
    # This is a warning, because users who wait should see the reason without setting up logging.
    _log.warning("baguakit compiles its CPU codec for this machine, which takes about 20 seconds the first time")
    return inductor.build(inductor.write(calls), folder)


@contextlib.contextmanager
def _alone(folder: str) -> Iterator[None]:
    """Hold the lock of compiling processes; wait for it at most PATIENCE seconds. A process that dies releases it."""
    import fcntl

    with open(Path(folder, "lock"), "w") as file:
        began, logged = time.monotonic(), False
        while (waited := time.monotonic() - began) < PATIENCE:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.05)
            except OSError:  # a file system without locks: several may compile, and what they make is the same
                break
            if waited > QUIET and not logged:
                logged = True
                _log.info("baguakit waits for another process, which compiles the CPU codec for this machine")
        yield
