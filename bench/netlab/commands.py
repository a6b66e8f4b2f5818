"""Running `ip` and `tc`, whose own words are the error when they fail; and entering the namespaces that they make."""

import ctypes
import os
import subprocess
from pathlib import Path

CLONE_NEWNET = 0x40000000


def run(*command: str, input: str | None = None) -> str:
    """Run a command and return what it prints.

    Raises:
        RuntimeError: it failed; with what it said.
    """
    done = subprocess.run(command, input=input, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {done.stderr.strip() or f'status {done.returncode}'}")
    return done.stdout


def batch(tool: str, namespace: str, lines: list[str]) -> None:
    """Run several commands of `ip` or `tc` in a namespace, in one process."""
    try:
        run(tool, "-n", namespace, "-batch", "-", input="\n".join(lines) + "\n")
    except RuntimeError as error:
        raise RuntimeError(f"{error}; while running {tool} in {namespace}: {'; '.join(lines)}") from None


def enter(namespace: Path) -> None:
    """Let this thread, and the threads and processes that it starts, use the interfaces of a host.

    Raises:
        OSError: the namespace is gone, or this process may not enter it.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    with open(namespace) as file:
        if libc.setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(namespace))
