"""Many small jobs of three ranks each, some at a time, forked from a process that has imported all they need.

    python cells.py FOLDER AT_ONCE < cells.json

Ranks end as programs do, through the interpreter's own end, and write what they have to say to FOLDER/number/rank.json.
The store is held by rank 0, or by a process beside the ranks, as torchrun's is.
"""

import ctypes
import faulthandler
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE)]

import faults  # noqa: E402
import lives  # noqa: E402
from lives import ALGORITHMS, TIMEOUT  # noqa: E402

HOST = "127.0.0.1"
AT_ONCE = 5
LONG = 60.0  # seconds that a cell may take until its victim dies
SIZE = 3
MORE = 30.0  # seconds after that and the limit, when whoever is still there hangs


@dataclass(frozen=True)
class Cell:
    """One job: what it trains with, where which rank is struck by what, who holds the store, and attach()'s limit."""

    algorithm: str
    point: str
    victim: int
    holder: str  # "rank 0" or "parent"
    mishap: str = "killed"
    timeout: float = TIMEOUT


def run(cells: Sequence[Cell], at_once: int = AT_ONCE) -> list[dict[str, Any]]:
    """Run them, and return for each when its victim died, and what became of each survivor."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [sys.executable, str(HERE / "cells.py"), folder, str(at_once)],
            input=json.dumps([asdict(cell) for cell in cells]),
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": "lo",
                "PYTHONPATH": os.pathsep.join(sys.path),
            },
            text=True,
            check=True,
        )
        return [outcome(Path(folder) / str(i), cell) for i, cell in enumerate(cells)]


def outcome(folder: Path, cell: Cell) -> dict[str, Any]:
    """Return the outcome of a cell: when its victim was struck, and the words and exit status of each rank."""
    struck = folder / "struck"
    ended = json.loads((folder / "ended.json").read_text())
    said = {}
    for rank in range(SIZE):
        told, out = folder / f"{rank}.json", folder / f"{rank}.txt"
        what = json.loads(told.read_text()) if told.exists() else {}
        said[rank] = {"status": ended[str(rank)], "stderr": out.read_text(errors="replace"), **what}
    return {"struck": float(struck.read_text()) if struck.exists() else None, "ranks": said}


# The server


@dataclass
class Job:
    """A cell under way."""

    number: int
    folder: Path
    cell: Cell
    pids: dict[int, int]
    holder: int | None
    began: float = field(default_factory=time.monotonic)
    ended: dict[int, str | int] = field(default_factory=dict)

    def limit(self) -> float:
        """Return the time until which it may run."""
        struck = self.folder / "struck"
        if not struck.exists():
            return self.began + LONG
        if self.pids.keys() - self.ended.keys() == {self.cell.victim}:
            return 0.0  # it may be asleep
        return float(struck.read_text()) + 1.25 * self.cell.timeout + MORE


def serve(folder: Path, cells: Sequence[Cell], at_once: int) -> None:
    """Run all cells."""
    for name in ("numpy", "torch", "torch.distributed", "torch._dynamo", "baguakit"):
        importlib.import_module(name)
    warm_up()
    gc.collect()
    gc.freeze()  # else the ends of all ranks would each touch all of this memory
    waiting, jobs = list(enumerate(cells)), []
    while waiting or jobs:
        while waiting and len(jobs) < at_once:
            number, cell = waiting.pop(0)
            jobs.append(begin(number, cell, folder / str(number)))
        time.sleep(0.02)
        jobs = [job for job in jobs if not over(job)]


def warm_up() -> None:
    """Have torch import and make what it does in the first step."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())


def forked(act: Callable[[], None]) -> int:
    """The id of a new process that does this, and ends as programs do, or when this one does."""
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
    act()
    sys.exit()


def hold_a_store(folder: Path) -> Any:
    """A store, in this process, whose port the others find in the folder. It listens where no name is looked up."""
    listener = socket.create_server((HOST, 0))
    port = listener.getsockname()[1]
    told = {"is_master": True, "wait_for_workers": False, "master_listen_fd": listener.detach()}
    store = dist.TCPStore(HOST, port, timeout=timedelta(seconds=LONG), **told)
    (folder / "port.new").write_text(str(port))
    (folder / "port.new").rename(folder / "port")
    return store


def hold(folder: Path) -> None:
    """Hold a store until this process is ended, as torchrun does."""
    store = hold_a_store(folder)
    signal.pause()
    del store


def begin(number: int, cell: Cell, folder: Path) -> Job:
    folder.mkdir()
    holder = forked(lambda: hold(folder)) if cell.holder == "parent" else None
    pids = {rank: forked(lambda rank=rank: live(rank, cell, folder)) for rank in range(SIZE)}
    return Job(number, folder, cell, pids, holder)


def over(job: Job) -> bool:
    """Return whether all of its ranks have ended; end those that hang, by a signal that no rank ends with itself."""
    for rank, pid in job.pids.items():
        if rank not in job.ended:
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                job.ended[rank] = os.waitstatus_to_exitcode(status)
    if len(job.ended) < len(job.pids) and time.monotonic() > job.limit():
        for rank, pid in job.pids.items():
            if rank not in job.ended:
                os.kill(pid, signal.SIGUSR1)  # it writes where it stands
        time.sleep(0.2)
        for rank, pid in job.pids.items():
            if rank not in job.ended:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                job.ended[rank] = "a hang"
    if len(job.ended) < len(job.pids):
        return False
    if job.holder is not None:
        os.kill(job.holder, signal.SIGKILL)
        os.waitpid(job.holder, 0)
    (job.folder / "ended.json").write_text(json.dumps(job.ended))
    return True


# A rank


def live(rank: int, cell: Cell, folder: Path) -> None:
    """A rank's life: it meets the others, trains, and writes down what was raised, and when it was where."""
    file = os.open(folder / f"{rank}.txt", os.O_CREAT | os.O_WRONLY)
    os.dup2(file, 1)
    os.dup2(file, 2)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    warnings.simplefilter("ignore")
    meet(rank, cell, folder)
    if rank == cell.victim:
        faults.arm(faults.POINTS[cell.point], faults.mishap(cell.mishap, folder / "struck"))
    parts: list[tuple[float, int]] = []  # when this rank came to a part of its life, 1, and when it left it, -1
    for part in lives.PARTS:
        faults.wrap(
            f"lives:{part}",
            lambda: parts.append((time.monotonic(), 1)),
            lambda: parts.append((time.monotonic(), -1)),
        )
    told: dict[str, Any] = {"error": "", "trace": ""}
    try:
        lives.program(rank, cell.algorithm, cell.timeout)
    except Exception as error:
        trace = "".join(traceback.format_exception(error))
        told = {"error": f"{type(error).__name__}: {error}", "trace": trace}
    told |= {"parts": parts, "at": time.monotonic()}
    (folder / f"{rank}.json").write_text(json.dumps(told))


def meet(rank: int, cell: Cell, folder: Path) -> None:
    """Make the default group, over a store that rank 0 holds, or a process beside it."""
    if rank == 0 and cell.holder == "rank 0":
        store = hold_a_store(folder)
    else:
        until(lambda: (folder / "port").exists())
        port = int((folder / "port").read_text())
        store = dist.TCPStore(HOST, port, is_master=False, timeout=timedelta(seconds=LONG))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=SIZE, timeout=timedelta(seconds=LONG))
    (folder / f"{rank}.here").touch()
    until(lambda: len(list(folder.glob("*.here"))) == SIZE)  # nobody dies before all have their group


def until(true: Callable[[], bool]) -> None:
    """Wait for something that another process does."""
    while not true():
        time.sleep(0.005)


def all_cells(
    algorithms: Iterable[str] = tuple(ALGORITHMS), points: Iterable[str] = tuple(faults.POINTS)
) -> list[Cell]:
    """Every point that each algorithm comes to; victims and holders of the store take turns."""
    cells = []
    for a in algorithms:
        for p in points:
            if faults.reaches(p, a):
                turn = 5 * list(ALGORITHMS).index(a) + list(faults.POINTS).index(p)
                only = faults.POINTS[p].victim
                cells.append(Cell(a, p, turn % SIZE if only is None else only, ("rank 0", "parent")[turn // 3 % 2]))
    return cells


if __name__ == "__main__":
    serve(Path(sys.argv[1]), [Cell(**each) for each in json.load(sys.stdin)], int(sys.argv[2]))
