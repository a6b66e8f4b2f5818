"""Functions that the CPU kernels share: compilation of a family's C file, calls, and the number of threads.

A family of kernels is one C file beside its definition, which `compiling.py` compiles on first use, in a second or two.
Without a compiler the definitions run, which are many times slower, and a warning says so once.

Functions of a library run without the GIL. They must give the very bits of the definitions, so a library is used only
if its arithmetic is that of IEEE 754, operation by operation: see `exact` in `common.h`.
"""

import ctypes
import functools
import logging
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import compiling

FLAGS = (
    *("-std=gnu11", "-ffp-contract=off", "-fPIC", "-shared"),
    *("-fno-math-errno", "-fno-trapping-math"),  # roots and conversions are vectorised; no bit of a result changes
    # So gcc's -O2 is as fast as its -O3, which compiles for twice as long; clang's -O2 needs none of the others.
    *("-O2", "-ftree-vectorize", "-fvect-cost-model", "-funswitch-loops"),
)
NATIVE = ("-march=native",), ("-mcpu=native",), ()  # the first that the compiler takes
LIBRARIES = ("-pthread", "-lm")
COMMON = Path(__file__).with_name("common.h")
HEADERS = sorted(COMMON.parent.rglob("*.h"))
FILES = sorted(COMMON.parent.rglob("*.c"))
SOURCES = {path.stem if path.stem != "cpu" else path.parent.name: path for path in FILES}  # by the names of families
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)  # in C a dtype is its place here
TAKEN = (*DTYPES, torch.uint8)  # also packed rows
FEW = 1 << 17  # values: for fewer, threads take longer to start than to help

_log = logging.getLogger("baguakit")
_warn_once = functools.cache(_log.warning)


def call(family: str, name: str, *arguments: Tensor | ctypes.Array[Any] | ctypes.Structure | int | None) -> None:
    """Call a C function with the address of its arguments, which it reads as a struct of pointers and int64.

    Tensors and objects of ctypes are passed by address; None is NULL. The last argument is the number of threads.
    """
    getattr(functions(family), name)((ctypes.c_int64 * len(arguments))(*map(_word, arguments)))


def _word(x: Tensor | ctypes.Array[Any] | ctypes.Structure | int | None) -> int:
    if isinstance(x, Tensor):
        return x.data_ptr()
    return x or 0 if isinstance(x, int | None) else ctypes.addressof(x)


def threads(values: int) -> int:
    """Return how many threads work on so many values: one, or as many as torch uses."""
    return 1 if values < FEW else torch.get_num_threads()


def compiler() -> str | None:
    """Return the path of the C compiler: that of the variable CC, cc, gcc or clang; None if there is none."""
    # The libraries need POSIX threads.
    return compiling.first_of([os.environ.get("CC", ""), *compiling.COMPILERS]) if os.name == "posix" else None


@functools.cache
def functions(family: str) -> ctypes.CDLL | None:
    """Return the functions of a family, which the first use compiles; None if the definitions must run instead."""
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
    """Return the library of a family, kept or newly compiled."""
    source = SOURCES[family]
    commands = [(found, *FLAGS, *native, "-I", str(COMMON.parent)) for native in NATIVE]
    make = functools.partial(compiling.compile_to, source=source, commands=commands, libraries=LIBRARIES)
    parts = (source, *HEADERS)
    text = *(path.read_bytes() for path in parts), " ".join([*FLAGS, *LIBRARIES]).encode()
    try:
        with compiling.kept(compiling.cache("cpu", family), [*text, compiling.machine(found)], make) as path:
            return ctypes.CDLL(str(path))
    except OSError as error:
        _warn_once(f"each process compiles kernels for the CPU for itself, since no folder can keep them: {error}")
    with tempfile.TemporaryDirectory(prefix="baguakit-") as temporary:
        path = Path(temporary, "library.so")
        make(path)
        return ctypes.CDLL(str(path))


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
