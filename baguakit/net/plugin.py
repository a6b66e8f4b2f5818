"""Compile the NCCL network plugin with the C compiler of this machine."""

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ..arguments import checked, text

SOURCE = Path(__file__).with_name("baguanet.c")
LIBRARY = "libnccl-net-baguanet.so"
COMPILERS = ("cc", "gcc", "clang")
FLAGS = ("-std=c11", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-pthread")
WARNINGS = ("-Wall", "-Wextra", "-Wformat=2", "-Werror=format-security", "-Wshadow", "-Wvla", "-Wstrict-prototypes")
# These flags add protection, because the library parses data from the network.
HARDENING = (
    *("-fstack-protector-strong", "-fstack-clash-protection", "-U_FORTIFY_SOURCE", "-D_FORTIFY_SOURCE=2"),
    *("-Wl,-z,relro", "-Wl,-z,now", "-Wl,-z,noexecstack"),
)


@checked
def build(out: str | os.PathLike[str] | None = None, *, compiler: str | None = None, flags: Sequence[str] = ()) -> Path:
    """Compile the plugin and return the absolute path of `libnccl-net-baguanet.so`, for `NCCL_NET_PLUGIN`.

    Several processes may build at the same time.

    Args:
        out: the directory of the library, created if it is missing; None for a directory in `~/.cache/baguakit` whose
            name is a hash of the source, the compiler and the flags. A library in that directory is not compiled again.
        compiler: a command; None for the first of cc, gcc and clang.
        flags: further flags of the compiler.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: there is no compiler, or the system is not Linux.
        RuntimeError: the compiler failed; the message has the compiler's output.
    """
    if compiler is not None:
        text("compiler", compiler)
    if platform.system() != "Linux":
        raise ValueError(f"the NCCL plugin is for Linux, and this is {platform.system()}")
    names = COMPILERS if compiler is None else (compiler,)
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        raise ValueError(f"no C compiler: {' or '.join(names)} is not on the PATH; install one, or pass compiler=")
    command = [found, *FLAGS, *WARNINGS, *HARDENING, *flags]
    key = "\0".join([platform.machine(), *platform.libc_ver(), *command]).encode() + SOURCE.read_bytes()
    kept = Path.home() / ".cache" / "baguakit" / hashlib.sha256(key).hexdigest()[:16]
    library = (kept if out is None else Path(out)).absolute() / LIBRARY
    if out is not None or not library.exists():
        _compile(command, library)
    return library


def _compile(command: list[str], library: Path) -> None:
    library.parent.mkdir(parents=True, exist_ok=True)
    # Replace the file atomically, since another process may be loading the library.
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        unfinished = Path(folder) / LIBRARY
        result = subprocess.run(
            [*command, "-o", str(unfinished), str(SOURCE)], capture_output=True, text=True, check=False
        )
        if result.returncode:
            raise RuntimeError(f"{' '.join(command)} could not compile {SOURCE.name}:\n{result.stderr}")
        unfinished.replace(library)
