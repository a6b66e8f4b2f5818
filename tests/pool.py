"""Live ranks: processes that speak gloo to each other, kept from test to test."""

import os
import socket
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.multiprocessing as mp

try:
    import cloudpickle as pickle  # takes closures
except ImportError:
    import pickle  # takes what the ranks can import: functions at the top of test files

LIMIT = 120.0  # seconds that a call may take


class RankError(AssertionError):
    """A call failed on a rank; the message is its traceback."""


class Pool:
    """`size` ranks that wait for functions to run, each in a process of its own; with `cuda` they share a GPU.

    A function is called on every rank and may be a closure. The pool is used up when a call fails: what it left
    behind would disturb the next.
    """

    def __init__(self, size: int, cuda: bool = False) -> None:
        self.size = size
        context = ready_to_fork()
        port = free_port()
        self.pipes, self.processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(rank, size, port, theirs, cuda), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def run(
        self, function: Callable[..., Any], *args: Any, limit: float = LIMIT, lost: Sequence[int] = ()
    ) -> list[Any]:
        """What `function(*args)` returns on each rank; None for the ranks that are expected to be `lost`."""
        by_value(function, *args)
        work = pickle.dumps((function, args))
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
                ok, value = pickle.loads(pipe.recv_bytes())
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


def ready_to_fork() -> Any:
    """Ranks are forked from a server that has imported what all of them need: that takes seconds, and memory."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["numpy", "torch", "torch.distributed", "torch._dynamo"])
    return context


def serve(rank: int, size: int, port: int, pipe: Any, cuda: bool) -> None:
    """The life of a rank."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(size))
    if cuda:
        # NCCL refuses two ranks on one GPU unless each claims a host of its own; it then talks over its network code.
        os.environ.update(NCCL_HOSTID=str(rank), NCCL_SOCKET_IFNAME="lo", NCCL_ALGO="Ring", NCCL_PROTO="Simple")
        os.environ.update(NCCL_MAX_NCHANNELS="2", NCCL_MULTI_RANK_GPU_ENABLE="1", NCCL_MNNVL_ENABLE="0")
        torch.cuda.set_device(0)
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    dist.init_process_group(backend, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    while True:
        try:
            work = pipe.recv_bytes()
        except EOFError:
            os._exit(0)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                function, args = pickle.loads(work)
                answer = (True, function(*args))
        except BaseException:
            answer = (False, traceback.format_exc())
        pipe.send_bytes(pickle.dumps(answer))


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


_pools: dict[tuple[int, bool], Pool] = {}


def ranks(size: int, function: Callable[..., Any], *args: Any, limit: float = LIMIT, cuda: bool = False) -> list[Any]:
    """Run `function(*args)` on `size` live ranks and return what it returns, by rank."""
    kind = (size, cuda)
    if kind not in _pools or not _pools[kind].alive:
        _pools[kind] = Pool(size, cuda)
    return _pools[kind].run(function, *args, limit=limit)


def by_value(*functions: Any) -> None:
    """Have functions of test modules sent whole: the ranks cannot import those."""
    for function in functions:
        module = sys.modules.get(getattr(function, "__module__", None) or "")
        if module is not None and module.__name__.startswith("test_") and hasattr(pickle, "register_pickle_by_value"):
            pickle.register_pickle_by_value(module)


def close_all() -> None:
    while _pools:
        _pools.popitem()[1].close()
