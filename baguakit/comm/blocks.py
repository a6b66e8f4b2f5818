"""Blocks of memory that all ranks of a node can reach.

    on devices      memory of the GPUs, if each of them has access to all others. Of torch's symmetric memory, which is
                    alpha, this uses `_SymmetricMemory`: `get_backend`, `set_group_info`, `empty_strided_p2p`,
                    `rendezvous`, `rank` and `buffer_ptrs`; and its names of groups, `_register_process_group`.
    on the host     otherwise. The first rank makes a memfd, which has no name, and sends it to the others through an
                    abstract Unix socket, which is no file; each rank maps it and registers it with CUDA. So ranks that
                    are killed leave nothing behind.

All ranks make them together, and each learns of a failure on any other.
"""

import ctypes
import mmap
import os
import socket
import struct
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch._C import _distributed_c10d
from torch.distributed.distributed_c10d import PrefixStore

from ..kernels.operators import has_kernels
from .groups import host
from .sending import gather_objects

c10d: Any = _distributed_c10d  # its type stubs lack some names
PATIENCE = 60.0  # seconds in which all ranks come for the file
PORTABLE_AND_MAPPED = 3  # flags of cuMemHostRegister


class Facts(NamedTuple):
    rank: int  # in the whole Comm
    host: str
    number: int  # of its GPU in its process
    gpu: str  # the GPU's unique name
    problem: str  # why it has no such kernels, or ""


@dataclass(frozen=True)
class Block:
    """The addresses of all ranks' memory on the device of this one; bytes are 0. `held` keeps it until `release()`."""

    addresses: list[int]
    held: Any
    release: Callable[[], None]


Steps = Generator[Any, list[Any], Any]
"""Work of all ranks. What it yields is gathered and, unless a rank has failed, sent to it as a list by rank."""


class CannotReach(Exception):
    """A rank cannot reach the memory of all. The message names the rank."""


def together(group: Any, rank: int, steps: Steps) -> Any:
    """Return what `steps` return, which has `release()`. If they fail on a rank, undo them on all. Collective.

    Then all raise a CannotReach, in which this rank is called `rank`.
    """
    heard, said, made, done = None, None, None, False
    while not done:
        problem = ""
        try:
            said = steps.send(heard)  # type: ignore[arg-type]
        except StopIteration as end:
            made, done = end.value, True
        except Exception as error:
            shown = str(error) if isinstance(error, CannotReach) else f"failed: {type(error).__name__}: {error}"
            problem = f"rank {rank} {shown}"
        told = gather_objects((problem, said), group, False)
        if why := next((each for each, _ in reversed(told) if each), ""):  # the first may have waited for that one
            steps.close()
            if made is not None:
                made.release()
            raise CannotReach(why)
        heard = [each for _, each in told]
    return made


def on_devices(group: Any, name: str, device: torch.device, nbytes: int) -> Steps:
    """Make a Block of `nbytes` for each rank on the devices; `name` is unique."""
    memories = c10d._SymmetricMemory
    if hasattr(memories, "set_group_info"):  # the newest versions look up the name of a group instead
        store = PrefixStore(name, group.get_group_store())
        memories.set_group_info(name, group.rank(), group.size(), store)
    c10d._register_process_group(name, group)
    try:
        memory = memories.empty_strided_p2p((nbytes,), (1,), torch.uint8, device, name).zero_()
        settle(device)
        yield None  # all ranks have theirs: a rank without would not come to the rendezvous
        handle = memories.rendezvous(memory)
    finally:
        c10d._unregister_process_group(name)
    inside = memory.data_ptr() - handle.buffer_ptrs[handle.rank]  # where it begins in what was allocated
    return Block([each + inside for each in handle.buffer_ptrs], (memory, handle), lambda: None)


def on_host(rank: int, ranks: int, name: str, nbytes: int) -> Steps:
    """Make a Block of `nbytes`, a multiple of a page, for each rank on the host; `name` is unique."""
    with ExitStack() as opened:
        if rank == 0:
            file = os.memfd_create("baguakit")
            opened.callback(os.close, file)
            os.posix_fallocate(file, 0, ranks * nbytes)  # too little memory is an error here, and not a signal later
            door = opened.enter_context(socket.socket(socket.AF_UNIX))
            door.bind(f"\0{name}")
            door.listen(ranks)
        yield None
        if rank == 0:
            give(file, door, ranks - 1)
        else:
            file = taken(name)
            opened.callback(os.close, file)
        memory = torch.frombuffer(mmap.mmap(file, ranks * nbytes), dtype=torch.uint8)
    first = register(memory.data_ptr(), ranks * nbytes)
    addresses = [first + each * nbytes for each in range(ranks)]
    return Block(addresses, memory, partial(unregister, memory.data_ptr()))


def give(file: int, door: socket.socket, times: int) -> None:
    """Send an open file to other processes of this user, each of which comes once."""
    door.settimeout(PATIENCE)
    while times:
        visitor, _ = door.accept()
        with visitor:
            if user_of(visitor) == os.getuid():
                socket.send_fds(visitor, [b"m"], [file])
                times -= 1


def taken(name: str) -> int:
    """Return the open file that the first rank gives."""
    with socket.socket(socket.AF_UNIX) as there:
        there.settimeout(PATIENCE)
        there.connect(f"\0{name}")
        if user_of(there) != os.getuid():
            raise PermissionError("its socket is of another user")
        return int(socket.recv_fds(there, 1, 1)[1][0])


def user_of(connection: socket.socket) -> int:
    """Return the user of the process at the other end."""
    return int(struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1])


# The functions that ask the device.


def settle(device: torch.device) -> None:
    """Wait until the device has done all that it was given."""
    torch.cuda.synchronize(device)


def gpu_of(number: int) -> str:
    return str(torch.cuda.get_device_properties(number).uuid)


def facts_of(rank: int, device: torch.device) -> Facts:
    problem, capability = "", torch.cuda.get_device_capability(device)
    if sys.platform != "linux":
        problem = f"runs on {sys.platform}, and only Linux sends files"
    elif not has_kernels(device):
        problem = "has no Triton: pip install triton"
    elif capability < (7, 0):
        problem = f"has a GPU of compute capability {capability[0]}.{capability[1]}, and 7.0 is needed"
    return Facts(rank, host(), int(device.index), gpu_of(device.index), problem)


def reaches_all(device: torch.device, facts: Sequence[Facts]) -> bool:
    """Return whether the device has access to those of all ranks, and torch's symmetric memory can tell them apart."""
    if c10d._SymmetricMemory.get_backend(device) not in (None, "CUDA") or os.environ.get("NCCL_P2P_DISABLE") == "1":
        return False  # the user's choice for the whole process; with the second, access is broken
    numbers, mine = [each.number for each in facts], device.index
    seen = all(each.number < torch.cuda.device_count() and gpu_of(each.number) == each.gpu for each in facts)
    reached = seen and all(n == mine or torch.cuda.can_device_access_peer(mine, n) for n in numbers)
    return reached and len(set(numbers)) == len(numbers)


def ask(function: str, *arguments: Any) -> None:
    """Call CUDA's driver. An error of the runtime would stay behind, and the next launch would raise it."""
    cuda = ctypes.CDLL("libcuda.so.1")
    if error := getattr(cuda, function)(*arguments):
        name = ctypes.c_char_p()
        cuda.cuGetErrorName(error, ctypes.byref(name))
        raise RuntimeError(f"{function} returned {(name.value or b'an error').decode()}")


def register(address: int, nbytes: int) -> int:
    """Pin memory of this process for the current device, and return its address there."""
    at, there = ctypes.c_void_p(address), ctypes.c_uint64()
    ask("cuMemHostRegister_v2", at, ctypes.c_size_t(nbytes), ctypes.c_uint(PORTABLE_AND_MAPPED))
    try:
        ask("cuMemHostGetDevicePointer_v2", ctypes.byref(there), at, ctypes.c_uint(0))
    except RuntimeError:
        unregister(address)
        raise
    return there.value


def unregister(address: int) -> None:
    ask("cuMemHostUnregister", ctypes.c_void_p(address))
