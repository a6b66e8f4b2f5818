"""Live ranks: processes that speak gloo to each other, kept from test to test."""

import os
import socket
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import cloudpickle
import torch.multiprocessing as mp

LIMIT = 120.0  # seconds that a call may take


class RankError(AssertionError):
    """A call failed on a rank; the message is its traceback."""


class Pool:
    """`size` ranks that wait for functions to run, each in a process of its own.

    A function is called on every rank and may be a closure. The pool is used up when a call fails: what it left
    behind would disturb the next.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        context = mp.get_context("spawn")
        port = free_port()
        self.pipes, self.processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(rank, size, port, theirs), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def run(
        self, function: Callable[..., Any], *args: Any, limit: float = LIMIT, lost: Sequence[int] = ()
    ) -> list[Any]:
        """What `function(*args)` returns on each rank; None for the ranks that are expected to be `lost`."""
        by_value(function, *args)
        work = cloudpickle.dumps((function, args))
        for pipe in self.pipes:
            pipe.send_bytes(work)
        results, failures = [], []
        for rank, pipe in enumerate(self.pipes):
            if rank in lost:
                results.append(None)
                continue
            try:
                if not pipe.poll(2.0 if failures else limit):
                    failures.append(f"rank {rank} did not return within {limit:g} s")
                    continue
                ok, value = cloudpickle.loads(pipe.recv_bytes())
            except (EOFError, ConnectionError) as error:
                ok, value = False, f"the process is gone ({error!r})"
            results.append(value)
            if not ok:
                failures.append(f"rank {rank}:\n{value}")
        if failures:
            self.close()
            raise RankError("\n".join(failures))
        return results

    @property
    def alive(self) -> bool:
        return all(process.is_alive() for process in self.processes)

    def close(self) -> None:
        """End the processes."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()


def serve(rank: int, size: int, port: int, pipe: Any) -> None:
    """The life of a rank."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(size))
    dist.init_process_group("gloo", rank=rank, world_size=size, timeout=timedelta(seconds=60))
    while True:
        try:
            work = pipe.recv_bytes()
        except EOFError:
            os._exit(0)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                function, args = cloudpickle.loads(work)
                answer = (True, function(*args))
        except BaseException:
            answer = (False, traceback.format_exc())
        pipe.send_bytes(cloudpickle.dumps(answer))


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


_pools: dict[int, Pool] = {}


def ranks(size: int, function: Callable[..., Any], *args: Any, limit: float = LIMIT) -> list[Any]:
    """Run `function(*args)` on `size` live ranks and return what it returns, by rank."""
    if size not in _pools or not _pools[size].alive:
        _pools[size] = Pool(size)
    return _pools[size].run(function, *args, limit=limit)


def by_value(*functions: Any) -> None:
    """Have functions of test modules sent whole: the ranks cannot import those."""
    for function in functions:
        module = sys.modules.get(getattr(function, "__module__", None) or "")
        if module is not None and module.__name__.startswith("test_"):
            cloudpickle.register_pickle_by_value(module)


def close_all() -> None:
    while _pools:
        _pools.popitem()[1].close()
