"""Functions that the CPU kernels share: compilation of a family's C file, its cache, and the number of threads.

A family of kernels is one C file beside its definition. The machine's C compiler translates it on first use, in a
second or two. The library is stored in a folder to which only this user can write, for all processes of this machine.
Its name has a hash of everything that its code depends on, and a digest of its bytes, so that a damaged library is made
again. Only one process of this user compiles a family at a time; the others wait, and then load the library. Without a
compiler the definitions run, which are many times slower, and a warning says so once.

Functions of a library take addresses and sizes, and run without the GIL. They must give the very bits of the
definitions, so a library is used only if its arithmetic is that of IEEE 754, operation by operation: see `exact` in
`common.h`.
"""

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

# Without errno and traps a compiler vectorises roots and conversions; no bit of a result changes.
FLAGS = ("-std=gnu11", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-shared")
NATIVE = ("-march=native",), ("-mcpu=native",), ()  # the first that the compiler takes
LIBRARIES = ("-pthread", "-lm")
COMMON = Path(__file__).with_name("common.h")
FILES = sorted(COMMON.parent.rglob("*.c"))
SOURCES = {path.stem if path.stem != "cpu" else path.parent.name: path for path in FILES}  # by the names of families
# Fields of /proc/cpuinfo that identify a processor: libraries are compiled for the processor of this machine.
PROCESSOR = ("vendor_id", "model name", "flags", "CPU implementer", "CPU part", "Features", "isa", "cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)  # in C a dtype is its place here
TAKEN = (*DTYPES, torch.uint8)  # also packed rows
FEW = 1 << 17  # values: for fewer, threads take longer to start than to help
PATIENCE = 60.0  # seconds after which a process compiles beside one that comes to no end

_log = logging.getLogger("baguakit")
_warn_once = functools.cache(_log.warning)
_defined: ContextVar[bool] = ContextVar("baguakit definitions", default=False)


def functions(family: str) -> ctypes.CDLL | None:
    """Return the functions of a family, which the first use compiles; None if the definitions must run instead."""
    return None if _defined.get() else _library(family)


def call(family: str, name: str, *arguments: Any) -> int:
    """Call a C function with addresses of tensors (None is NULL), whole numbers (int64) and objects of ctypes."""
    given = (ctypes.c_void_p(x.data_ptr()) if isinstance(x, Tensor) else x for x in arguments)
    result: int = getattr(functions(family), name)(*(ctypes.c_int64(x) if isinstance(x, int) else x for x in given))
    return result


@contextlib.contextmanager
def definitions() -> Iterator[None]:
    """In a `with` block, run the definitions instead of compiled kernels in this thread."""
    token = _defined.set(True)
    try:
        yield
    finally:
        _defined.reset(token)


def threads(values: int) -> int:
    """Return how many threads work on so many values: one, or as many as torch uses."""
    return 1 if values < FEW else torch.get_num_threads()


def compiler() -> str | None:
    """Return the path of the C compiler: that of the variable CC, cc, gcc or clang; None if there is none."""
    if os.name != "posix":  # the libraries need POSIX threads
        return None
    return next(filter(None, map(shutil.which, (os.environ.get("CC", ""), "cc", "gcc", "clang"))), None)


@functools.cache
def _library(family: str) -> ctypes.CDLL | None:
    source, found = SOURCES[family], compiler()
    if found is None:
        _warn_once("no C compiler (cc, gcc, clang) was found: kernels on the CPU run many times slower; install one")
        return None
    try:
        library = _open(family, found)
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        words = " ".join(str(error).split())[:300]
        _log.warning("%s cannot be compiled: its kernels on the CPU run many times slower: %s", source.name, words)
    else:
        if _exact(library):
            return library
        _log.warning("%s compiles %s inexactly: its kernels on the CPU run many times slower", found, source.name)
    return None


def _open(family: str, found: str) -> ctypes.CDLL:
    """Return the library of a family, from the folder or newly compiled."""
    source = SOURCES[family]
    name = f"{family}-{_hash(source.read_bytes() + COMMON.read_bytes() + _machine(found))}"
    with tempfile.TemporaryDirectory(prefix="baguakit-") as temporary:
        made = Path(temporary, "library.so")
        try:
            with folder() as home, contextlib.nullcontext() if _kept(home, name) else _alone(home, family):
                return ctypes.CDLL(str(_kept(home, name) or _keep(build(source, made, found), home, name)))
        except OSError as error:
            _warn_once(f"each process compiles kernels for the CPU for itself, since no folder can keep them: {error}")
        return ctypes.CDLL(str(build(source, made, found)))


def build(source: Path, out: Path, found: str, flags: tuple[str, ...] = FLAGS) -> Path:
    """Compile a C file with the compiler `found`; return `out`.

    Raises:
        RuntimeError: the compiler failed; the message is the compiler's.
    """
    for native in NATIVE:
        command = [found, *flags, *native, "-I", COMMON.parent, source, "-o", out, *LIBRARIES]
        run = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=300)
        if run.returncode == 0:
            return out
    raise RuntimeError(f"{found} failed: {run.stderr}")


@functools.cache
def _machine(found: str) -> bytes:
    """Return bytes that identify the compiler, its flags and the processor."""
    at = os.path.realpath(found)
    seen = os.stat(at)
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            lines = file.read(1 << 14).split("\n\n")[0].splitlines()
        processor = [line for line in lines if line.split(":")[0].strip() in PROCESSOR]
    except OSError:
        processor = [platform.processor(), platform.node()]  # such machines seldom share a home
    parts = [at, str(seen.st_size), str(seen.st_mtime_ns), platform.machine(), *processor, *FLAGS, *LIBRARIES]
    return "\0".join(parts).encode()


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    """Yield the folder of libraries; raise an OSError unless this user owns it and nobody else has access to it."""
    path = cache_folder()
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        seen = os.fstat(handle)
        if seen.st_uid != os.geteuid() or seen.st_mode & 0o077:
            raise PermissionError(f"{path} must be a folder of your own with mode 0700; chmod 700 it, or remove it")
        # The handle refers to the checked folder, even if its path is changed meanwhile.
        held = Path(f"/proc/self/fd/{handle}")
        yield held if held.is_dir() else path
    finally:
        os.close(handle)


def cache_folder() -> Path:
    """Return the path of the folder of libraries; raise an OSError if this user has no home."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "baguakit" / "cpu"
    except RuntimeError as error:
        raise OSError(str(error)) from None


def _kept(folder: Path, name: str) -> Path | None:
    """Return the path of the library `name` in the folder; None if it is missing or damaged."""
    return next((so for so in folder.glob(f"{name}-*.so") if so.stem == f"{name}-{_hash(so.read_bytes())}"), None)


def _keep(made: Path, folder: Path, name: str) -> Path:
    """Move a library into the folder in one atomic operation; return its path there."""
    unfinished = shutil.copyfile(made, folder / f"unfinished-{name}-{os.getpid()}")
    for broken in folder.glob(f"{name}-*.so"):
        broken.unlink()
    return unfinished.replace(folder / f"{name}-{_hash(unfinished.read_bytes())}.so")


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:24]


@contextlib.contextmanager
def _alone(folder: Path, family: str) -> Iterator[None]:
    """Hold the lock of a family; wait for it at most PATIENCE seconds. A process that dies releases it."""
    import fcntl

    with open(folder / f"{family}.lock", "w") as file:
        began = time.monotonic()
        while time.monotonic() - began < PATIENCE:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.01)
            except OSError:  # a file system without locks: several may compile, and what they make is the same
                break
        yield


def _exact(library: ctypes.CDLL) -> bool:
    """Return whether a library computes as IEEE 754 says: each operation rounded, subnormals kept, NaN unequal."""
    source = np.random.default_rng(0)
    a, b, c = (source.standard_normal((3, 64)) * 2.0 ** source.integers(-70, 60, (3, 64))).astype(np.float32)
    a[:2] = np.nan, -np.inf
    out = np.empty((6, 64), np.float32)
    library.exact(*(ctypes.c_void_p(x.ctypes.data) for x in (a, b, c, out)), ctypes.c_int64(64))
    with np.errstate(all="ignore"):
        expected = [a * b + c, (a + b) - b, a / b, np.sqrt(np.abs(a)), b * np.float32(2.0**-80), a == a]
    return np.array_equal(out, np.stack(expected).astype(np.float32), equal_nan=True)
