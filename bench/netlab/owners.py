"""The owner of a laboratory, and its removal when the owner ends.

Namespaces are called netlab.PID.START.NUMBER.WHAT after the process that made them; PID alone would be used again.
Whatever becomes of the owner, the laboratory goes: an undertaker, a shell in a session of its own, reads from a pipe
that only the owner holds open. The pipe ends when the owner closes it or dies in any way, and the undertaker then ends
all that lives in the namespaces and removes them. Should it die first, the next laboratory removes what is left.
"""

import itertools
import os
import subprocess
from pathlib import Path

FOLDER = Path("/run/netns")
_numbers = itertools.count()

# Processes may fork while they are being killed: hence the loop, and its end for one that cannot be killed.
_REMOVE = """
for path in /run/netns/"$0".*; do
    name=${path##*/}
    for try in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20; do
        pids=$(ip netns pids "$name" 2>/dev/null) && [ -n "$pids" ] || break
        kill -9 $pids 2>/dev/null
        sleep 0.02
    done
    ip netns delete "$name" 2>/dev/null
done
true
"""


def new_prefix() -> str:
    """Return the prefix of the names of a new laboratory's namespaces."""
    return f"netlab.{os.getpid()}.{started(os.getpid())}.{next(_numbers)}"


def undertaker(prefix: str) -> subprocess.Popen[bytes]:
    """A process that removes the namespaces called `prefix`.* as soon as its stdin ends."""
    return subprocess.Popen(
        ["sh", "-c", f"cat >/dev/null\n{_REMOVE}", prefix],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # ctrl-C is not meant for it
    )


def remove(prefix: str) -> None:
    """Remove the namespaces called `prefix`.* now, and end what lives in them."""
    subprocess.run(["sh", "-c", _REMOVE, prefix], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)


def sweep() -> list[str]:
    """Remove the laboratories of processes that live no more; return their prefixes."""
    prefixes = {".".join(path.name.split(".")[:4]) for path in FOLDER.glob("netlab.*.*.*.*")}
    left = sorted(prefix for prefix in prefixes if not _owner_lives(prefix))
    for prefix in left:
        remove(prefix)
    return left


def _owner_lives(prefix: str) -> bool:
    _, pid, start, _ = prefix.split(".")
    return started(int(pid)) == int(start)


def started(pid: int) -> int:
    """When a process began, in clock ticks since the machine did; -1 if it is none (a zombie is none)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return -1
    return -1 if fields[0] in "ZX" else int(fields[19])
