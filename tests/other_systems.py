"""A program that pretends to run on Windows or macOS, imports the whole package, and trains.

    python tests/other_systems.py win32 RANK FILE

The two ranks meet through FILE. It prints {algorithm: digest of the weights} as JSON. What Python lacks on that system
is taken away before the package is imported; torch and NumPy, which come first, are still those of Linux, and so are
paths and sockets.
"""

import asyncio  # noqa: F401  # the standard library first: its own modules differ between systems
import concurrent.futures  # noqa: F401
import contextlib
import hashlib
import importlib
import json
import multiprocessing.connection  # noqa: F401
import os
import pkgutil
import platform
import signal
import socket
import subprocess  # noqa: F401
import sys
import tempfile  # noqa: F401
from functools import partial
from pathlib import Path

import torch._dynamo  # noqa: F401
import torch.distributed as dist

LINUX = {os: "memfd_create sched_getaffinity sched_setaffinity posix_fallocate posix_fadvise"}
POSIX = {
    os: "fork register_at_fork geteuid getuid getgid setsid killpg mkfifo chown fchmod getloadavg sysconf uname "
    "O_DIRECTORY O_CLOEXEC O_NONBLOCK",
    signal: "SIGUSR1 SIGUSR2 SIGKILL SIGCHLD SIGSTOP SIGCONT SIGHUP SIGALRM pthread_sigmask setitimer",
    socket: "AF_UNIX",
}
GONE = {"darwin": [LINUX], "win32": [LINUX, POSIX]}
MODULES = {"darwin": "triton", "win32": "triton fcntl resource termios pwd grp pty"}


class Missing:
    """A finder of modules that does not find some."""

    def __init__(self, names: set[str]) -> None:
        self.names = names

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name.partition(".")[0] in self.names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def pretend(system: str) -> None:
    """Take away what Python has on Linux only; on Windows also what it has on POSIX systems, and C compilers."""
    for names in GONE[system]:
        for module, listed in names.items():
            for name in listed.split():
                if hasattr(module, name):
                    delattr(module, name)
    missing = set(MODULES[system].split())
    for name in [name for name in sys.modules if name.partition(".")[0] in missing]:
        del sys.modules[name]
    sys.meta_path.insert(0, Missing(missing))  # type: ignore[arg-type]
    sys.platform = system
    platform.system = lambda: {"darwin": "Darwin", "win32": "Windows"}[system]
    if system == "win32":
        os.environ["PATH"] = ""


# They import transformers and Lightning, which ask Windows for modules that a stand-in does not have.
THEIRS = tuple(f"baguakit.interop.{name}" for name in ("callback", "lightning", "strategy", "transformers"))


def modules() -> list[str]:
    """Import every module of the package; return the names of those that need Triton."""
    import baguakit

    lacking = []
    for module in pkgutil.walk_packages(baguakit.__path__, "baguakit."):
        if not module.name.endswith("__main__") and (sys.platform == "linux" or module.name not in THEIRS):
            try:
                importlib.import_module(module.name)
            except ModuleNotFoundError as error:
                assert error.name and error.name.startswith("triton"), error
                lacking.append(module.name)
    return lacking


def digests() -> dict[str, str]:
    """Train with an algorithm of each kind whose result does not depend on time; return digests of the weights."""
    from everything import made, of_each_kind, runs_free
    from training import train

    return {
        each: hashlib.sha256(train(partial(lambda each, _: [made(each)], each), steps=4).numpy().tobytes()).hexdigest()
        for each in of_each_kind()
        if not runs_free(made(each))
    }


def main(system: str, rank: int, meeting: str) -> None:
    if system != "linux":
        pretend(system)
    lacking = modules()
    assert all("gpu" in name for name in lacking), lacking
    assert bool(lacking) == (system != "linux")
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    found = digests()
    dist.barrier()
    dist.destroy_process_group()
    with contextlib.suppress(BrokenPipeError):
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
