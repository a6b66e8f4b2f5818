"""Compile C files of this package by the machine's compiler, and keep the libraries for all processes of a user.

A library is kept in a folder to which only this user can write. Its name has a hash of all that its code depends on,
and a digest of its bytes: a damaged one is made again. One process of this user makes it at a time; others wait.
"""

import contextlib
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

COMPILERS = ("cc", "gcc", "clang")
# Fields of /proc/cpuinfo that identify a processor: libraries are compiled for the processor of this machine.
PROCESSOR = ("vendor_id", "model name", "flags", "CPU implementer", "CPU part", "Features", "isa", "cpu")
PATIENCE = 60.0  # seconds after which a process compiles beside one that comes to no end


def first_of(commands: Sequence[str]) -> str | None:
    """Return the path of the first of these commands that this machine has; None if there is none."""
    return next(filter(None, map(shutil.which, commands)), None)


def compile_to(out: Path, source: Path, commands: Sequence[Sequence[str]], libraries: Sequence[str] = ()) -> None:
    """Compile a C file by the first command that does not fail; raise a RuntimeError with the output of the last."""
    for command in commands:
        line = [*command, str(source), "-o", str(out), *libraries]
        run = subprocess.run(line, capture_output=True, text=True, errors="replace", timeout=300)
        if run.returncode == 0:
            return
    raise RuntimeError(f"{line[0]} could not compile {source.name}:\n{run.stderr}\nby {' '.join(line)}")


@contextlib.contextmanager
def kept(path: Path, depends: Sequence[bytes], make: Callable[[Path], object]) -> Iterator[Path]:
    """Yield the library of a folder that has the stem of `path` and depends on these bytes; `make` it if it is missing.

    The path is valid in this process and this `with` block only. Raise an OSError if the folder is not private.
    """
    name = f"{path.stem}-{_hash(b''.join(depends))}"
    with private(path.parent) as folder, contextlib.nullcontext() if _find(folder, name) else _alone(folder, path.stem):
        yield _find(folder, name) or _add(folder, name, make)


@functools.cache
def machine(compiler: str) -> bytes:
    """Return bytes that identify a compiler and the processor."""
    at = os.path.realpath(compiler)
    seen = os.stat(at)
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            lines = file.read(1 << 14).split("\n\n")[0].splitlines()
        processor = [line for line in lines if line.split(":")[0].strip() in PROCESSOR]
    except OSError:
        processor = [platform.processor(), platform.node()]  # such machines seldom share a home
    return "\0".join([at, str(seen.st_size), str(seen.st_mtime_ns), platform.machine(), *processor, ""]).encode()


@contextlib.contextmanager
def private(path: Path) -> Iterator[Path]:
    """Yield a folder, made if it is missing; raise an OSError unless this user owns it and nobody else has access."""
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


def cache(*parts: str) -> Path:
    """Return the path of a file or folder in this user's cache; raise an OSError if this user has no home."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        return (Path(base) if os.path.isabs(base) else Path.home() / ".cache").joinpath("baguakit", *parts)
    except RuntimeError as error:
        raise OSError(str(error)) from None


def _find(folder: Path, name: str) -> Path | None:
    """Return the path of the library `name` in the folder; None if it is missing or damaged."""
    return next((so for so in folder.glob(f"{name}-*.so") if so.stem == f"{name}-{_hash(so.read_bytes())}"), None)


def _add(folder: Path, name: str, make: Callable[[Path], object]) -> Path:
    unfinished = made_in(folder, make)
    for broken in folder.glob(f"{name}-*.so"):
        broken.unlink()
    return unfinished.replace(folder / f"{name}-{_hash(unfinished.read_bytes())}.so")


def made_in(folder: Path, make: Callable[[Path], object]) -> Path:
    """Make a file; return its path in the folder, from which it can be moved in one atomic operation."""
    with tempfile.TemporaryDirectory(prefix="baguakit-") as temporary:
        made = Path(temporary, "library.so")
        make(made)
        return Path(shutil.copyfile(made, folder / f"unfinished-{uuid.uuid4().hex}"))


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:24]


@contextlib.contextmanager
def _alone(folder: Path, name: str) -> Iterator[None]:
    """Hold the lock of a library; wait for it at most PATIENCE seconds. A process that dies releases it."""
    import fcntl

    with open(folder / f"{name}.lock", "w") as file:
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
