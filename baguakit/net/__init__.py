"""A network plugin that lets NCCL use several TCP flows per connection.

Clouds limit the bandwidth of one TCP flow, and one core cannot saturate a fast NIC, so NCCL needs several flows. The
plugin sends less over slow flows. The comment in `baguanet.c` explains its settings; flows are called streams there.

    baguakit net build                     # with this machine's C compiler; prints the variables to export

NCCL's own sockets can use several flows, too: `baguakit probe` between the machines prints the variables to export.

This package sets no environment variables. Export the printed variables before NCCL starts, because it reads them then.
"""

import os
import platform
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from ..arguments import checked, text
from ..compiling import COMPILERS, cache, compile_to, first_of, kept, machine, made_in
from ..expressions import show_public

__all__ = ["build"]

SOURCE = Path(__file__).with_name("baguanet.c")
LIBRARY = "libnccl-net-baguanet.so"
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
        out: the directory of the library, created if it is missing. With None, the library is in `~/.cache/baguakit`,
            and its name has a hash of the source, the compiler and the flags; it is not compiled again.
        compiler: a command; None for the first of cc, gcc and clang.
        flags: further flags of the compiler.

    Raises:
        ValueError: there is no compiler, or the system is not Linux.
        RuntimeError: the compiler failed; the message has the compiler's output.
        OSError: the directory cannot be written, or `out` is None and others have access to the directory of the cache.
    """
    if compiler is not None:
        text("compiler", compiler)
    if platform.system() != "Linux":
        raise ValueError(f"the NCCL plugin is for Linux, and this is {platform.system()}")
    names = COMPILERS if compiler is None else (compiler,)
    found = first_of(names)
    if found is None:
        raise ValueError(f"no C compiler: {' or '.join(names)} is not on the PATH; install one, or pass compiler=")
    command = [found, *FLAGS, *WARNINGS, *HARDENING, *flags]
    make = partial(compile_to, source=SOURCE, commands=[command])
    if out is not None:
        folder = Path(out).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        return made_in(folder, make).replace(folder / LIBRARY)
    at, words = cache("net", LIBRARY), "\0".join([*command, *platform.libc_ver()]).encode()
    with kept(at, [SOURCE.read_bytes(), words, machine(found)], make) as path:
        return at.with_name(path.name)


show_public(__name__)
