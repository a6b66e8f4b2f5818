"""Memory that all ranks of a node can reach, without GPUs: on the host, with a stand-in for what registers it."""

import contextlib
import ctypes
import os
import signal
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from pool import Pool, ranks

import baguakit as bk
from baguakit.comm import blocks, symmetric
from baguakit.comm.symmetric import CTAS, LEAST, NodeMemory, Space

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs Linux")


@contextlib.contextmanager
def without_gpus(register=lambda address, nbytes: address, problems=(), hosts=("here",) * 9, pinned=None):
    """Within this block, memory of the host is registered by `register`; `pinned` gets the addresses that are."""
    pinned = set() if pinned is None else pinned

    def registered(address, nbytes):
        there = register(address, nbytes)
        pinned.add(address)
        return there

    def facts_of(rank, device):
        return blocks.Facts(rank, hosts[rank], 0, "a GPU", dict(problems).get(rank, ""))

    with (
        patch.object(blocks, "register", registered), patch.object(blocks, "unregister", pinned.remove),
        patch.object(symmetric, "facts_of", facts_of), patch.object(symmetric, "settle", lambda device: None),
        patch.object(symmetric, "reaches_all", lambda device, facts: False),
    ):  # fmt: skip
        yield pinned


def node():
    return NodeMemory(bk.Comm().group, "flat", dist.get_rank())


def bytes_at(address, length):
    return (ctypes.c_uint8 * length).from_address(address)


def left():
    """Return what this process has of such memory."""
    files = [os.readlink(each.path) for each in os.scandir("/proc/self/fd") if os.path.islink(each.path)]
    maps = Path("/proc/self/maps").read_text().splitlines()
    sockets = Path("/proc/net/unix").read_text().splitlines()
    return [each for each in (*files, *maps, *sockets) if "@baguakit/" in each or "memfd:baguakit" in each]


def test_one_writes_and_others_read():
    def run():
        memory, rank, size = node(), dist.get_rank(), dist.get_world_size()
        with without_gpus() as pinned:
            before, found = None, []
            for needed in (1, LEAST + 1):  # the second makes it anew, twice as large
                space = memory.grow(CPU, needed)
                nbytes = 2 * space.half_bytes + 8 * size * CTAS
                mine = bytes_at(space.addresses[rank].item(), nbytes)
                assert space.half_bytes == 2 * LEAST if before else LEAST
                assert not any(mine) and not space.counters.any() and not space.control.any()
                assert before is None or not before.release.alive
                dist.barrier()
                for peer in range(size):
                    bytes_at(space.addresses[peer].item() + nbytes - size + rank, 1)[0] = 1 + rank
                dist.barrier()
                found.append(list(mine[nbytes - size :]))
                before = space
            assert len(pinned) == 1 and len([each for each in left() if " rw-s " in each]) == 1
            assert (space.limit, space.names) == (symmetric_limit(), list(range(size)))
            memory.close()
            del mine
            return found, len(pinned), left()

    assert ranks(3, run) == [([[1, 2, 3]] * 2, 0, [])] * 3


def symmetric_limit():
    return round(1e9 * bk.Comm().group._get_backend(CPU).options._timeout.total_seconds())


def test_memory_that_nothing_refers_to_is_released():
    def run():
        with without_gpus() as pinned:
            memory = node()
            memory.grow(CPU, 1)
            assert len(pinned) == 1
            del memory
            return len(pinned), left()

    assert ranks(2, run) == [(0, [])] * 2


def refused(problem, **stands):
    """Return the warnings of a rank whose memory is refused, and what is left of it."""
    rank = dist.get_rank()
    with without_gpus(**stands) as pinned, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        memory = node()
        assert memory.grow(CPU, 1) is None and memory._most == {CPU: 0} and not pinned
        x = SimpleNamespace(is_cuda=True, device=CPU)
        with on_gpus():
            assert memory.memory(x, 1) is None  # nobody is asked again
        assert left() == []
        assert [str(each.message) for each in said] == [problem] * (rank == 0)


def test_where_one_rank_cannot_all_hear_of_it_and_nothing_is_left():
    def run():
        def register(address, nbytes):
            if dist.get_rank() == 1:
                raise RuntimeError("cuMemHostRegister_v2 returned CUDA_ERROR_OUT_OF_MEMORY")
            return address

        says = "kernels=True: rank {}; NCCL sends instead"
        why = "1 failed: RuntimeError: cuMemHostRegister_v2 returned CUDA_ERROR_OUT_OF_MEMORY"
        refused(says.format(why), register=register)
        refused(says.format("2 has no Triton: pip install triton"), problems={2: "has no Triton: pip install triton"})
        refused(says.format("1 runs on another host than rank 0"), hosts=("here", "there", "here"))
        with patch.object(blocks, "PATIENCE", 0.1), patch.object(blocks, "taken", missing):
            refused(says.format("1 failed: OSError: too many open files"))
        with patch.object(os, "memfd_create", missing):
            refused(says.format("0 failed: OSError: too many open files"))

    def missing(name):
        if dist.get_rank() < 2:
            raise OSError("too many open files")
        return taken(name)

    taken = blocks.taken

    ranks(3, run)


def test_larger_memory_that_cannot_be_made_leaves_the_smaller():
    def run():
        def register(address, nbytes):
            if nbytes > 8 * LEAST:
                raise MemoryError("no more")
            return address

        with without_gpus(register) as pinned, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            memory = node()
            first = memory.grow(CPU, 1)
            assert memory.grow(CPU, 4 * LEAST) is None
            assert memory.spaces == {CPU: first} and first.release.alive and memory._most == {CPU: LEAST}
            memory.close()
            return len(pinned)

    assert ranks(2, run) == [0, 0]


def test_nothing_is_left_of_ranks_that_are_killed():
    shared = set(os.listdir("/dev/shm"))

    def run():
        with without_gpus():
            memory = node()
            memory.grow(CPU, 1)
            os.kill(os.getpid(), signal.SIGKILL)

    pool = Pool(2)
    try:
        pool.run(run, lost=(0, 1))
    finally:
        pool.close()
    assert left() == [] and not [each for each in set(os.listdir("/dev/shm")) - shared if "baguakit" in each]


def test_strangers_get_nothing():
    """Another user, or one who comes to a door of another user, gets no file."""
    with patch.object(blocks, "user_of", lambda connection: os.getuid() + 1), patch.object(blocks, "PATIENCE", 0.1):
        steps = blocks.on_host(0, 2, "baguakit/door", 4096)
        next(steps)
        with pytest.raises(PermissionError, match="another user"):
            blocks.taken("baguakit/door")
        with pytest.raises(TimeoutError):
            steps.send([None, None])
    assert left() == []


class Words:
    """A space without memory."""

    def __new__(cls, **given):
        words = [torch.zeros(n, dtype=torch.int32) for n in (2, CTAS, 3)]
        return Space(1, *words, LEAST, 5 * 10**9, [4, 6], **given)


def test_a_mean_without_the_values_of_a_rank_names_it():
    space = Words()
    space.check()
    space.control[2] = 1
    with pytest.raises(RuntimeError, match="rank 6 has not come to an exchange in one kernel within 5 s; its values"):
        space.check()
    space.stop()
    with pytest.raises(RuntimeError, match="aborted or closed"):
        space.check()
    assert space.control.tolist() == [1, 0, 1]


class Stream:
    def __init__(self, capturing=False):
        self.capturing, self.waited = capturing, []

    def wait_stream(self, other):
        self.waited.append(other)


def test_means_on_two_streams_run_one_after_another():
    """One that is captured waits for no other: a graph could not."""
    here = [None]

    @contextlib.contextmanager
    def on(stream):
        here[0], before = stream, here[0]
        yield
        here[0] = before

    with (
        patch.object(torch.cuda, "stream", on),
        patch.object(torch.cuda, "is_current_stream_capturing", lambda: here[0].capturing),
    ):
        space, (a, b), (c, d) = Words(), (Stream(), Stream()), (Stream(True), Stream(True))
        for stream in (a, a, b, a, c, d, a):
            space.follow(stream, stream.capturing)
            assert space.captured == bool(c.waited or d.waited or stream is c or space.captured)
    assert (a.waited, b.waited, c.waited, d.waited) == ([b], [a], [], [c]) and space.captured


def test_memory_that_a_graph_uses_stays():
    def run():
        with without_gpus() as pinned:
            memory = node()
            memory.grow(CPU, 1).captured = True
            memory.grow(CPU, 2 * LEAST)
            held = len(pinned)
            memory.close()
            return held, len(pinned)

    assert ranks(2, run) == [(2, 0)] * 2


def on_gpus(capturing=False, stream=Stream()):  # noqa: B008 the same in all calls
    cuda = SimpleNamespace(device=contextlib.nullcontext, current_stream=lambda device: stream)
    cuda.is_current_stream_capturing = lambda: capturing
    return patch.object(symmetric, "torch", SimpleNamespace(**vars(torch) | {"cuda": cuda}))


def test_memory_is_made_when_it_is_needed_and_never_in_a_capture():
    memory, x = NodeMemory(None, "flat", 0), SimpleNamespace(is_cuda=True, device=CPU, numel=lambda: 5000)
    made = []
    memory.grow = lambda device, needed: made.append(needed) or memory.spaces.setdefault(device, Words())
    with on_gpus(capturing=True), pytest.raises(RuntimeError, match=r"5,000 values .* CUDA graph is captured"):
        memory.memory(x, 100)
    with on_gpus():
        space = memory.memory(x, 100)
        assert memory.memory(x, LEAST) is space and made == [100]
        assert memory.memory(x, symmetric.MOST + 1) is None is memory.memory(torch.zeros(3), 100)
    with on_gpus(capturing=True):
        assert memory.memory(x, 100).captured


def test_rows_that_differ_by_rank_have_room_for_twice_the_longest_of_the_first_exchange():
    def run():
        memory, rank = node(), dist.get_rank()
        x = SimpleNamespace(is_cuda=True, device=CPU, numel=lambda: 5000)
        with without_gpus(), on_gpus():
            first = memory.memory(x, (1 + rank) * LEAST, True)
            return first.half_bytes, memory.memory(x, (9 - rank) * LEAST, True) is first

    assert ranks(3, run) == [(8 * LEAST, True)] * 3  # a power of two


def test_neighbours_have_other_memory_which_ends_with_the_first():
    def run():
        memory = node()
        with without_gpus() as pinned:
            spaces = [each.grow(CPU, 1) for each in (memory, memory.for_neighbors)]
            assert memory.all() == spaces and spaces[0].addresses.tolist() != spaces[1].addresses.tolist()
            spaces[1].control[1] = 1
            with pytest.raises(RuntimeError, match="rank 0 has not come"):
                memory.check()
            held = len(pinned)
            memory.close()
            return held, len(pinned), [int(each.control[0]) for each in spaces], left()

    assert ranks(2, run) == [(2, 0, [1, 1], [])] * 2


USED = ["set_group_info", "_register_process_group", "empty_strided_p2p", "rendezvous", "_unregister_process_group"]


class SymmetricMemory:
    """As much of torch's as is used: its names and arguments are torch's own."""

    calls: ClassVar[list] = []
    rank = 1

    @classmethod
    def noting(cls, name, result):
        return lambda *arguments: cls.calls.append((name, arguments)) or result


def test_memory_of_devices_is_torchs(monkeypatch):
    from torch._C import _distributed_c10d as c10d

    real = c10d._SymmetricMemory
    group = SimpleNamespace(rank=lambda: 1, size=lambda: 2, get_group_store=dist.HashStore)
    real.set_group_info("baguakit/test", 1, 2, dist.HashStore())  # takes these arguments
    c10d._register_process_group("baguakit/test", dist.ProcessGroup(dist.HashStore(), 1, 2))
    c10d._unregister_process_group("baguakit/test")
    assert isinstance(real.rank, property)
    assert real.get_backend(torch.device("cuda", 0)) in (None, "CUDA") and isinstance(real.buffer_ptrs, property)
    memory = torch.empty(4096, dtype=torch.uint8)
    for name, result in (
        ("set_group_info", None), ("empty_strided_p2p", memory), ("rendezvous", SymmetricMemory()),
    ):  # fmt: skip
        assert hasattr(real, name)
        monkeypatch.setattr(SymmetricMemory, name, SymmetricMemory.noting(name, result), raising=False)
    for name in ("_register_process_group", "_unregister_process_group"):
        monkeypatch.setattr(c10d, name, SymmetricMemory.noting(name, None))
    SymmetricMemory.buffer_ptrs = (4096, memory.data_ptr() - 256)
    monkeypatch.setattr(c10d, "_SymmetricMemory", SymmetricMemory)
    monkeypatch.setattr(blocks, "settle", lambda device: None)
    steps = blocks.on_devices(group, "a name", CPU, 4096)
    next(steps)
    assert [name for name, _ in SymmetricMemory.calls] == USED[:3]
    with pytest.raises(StopIteration) as end:
        steps.send([None, None])
    assert end.value.value.addresses == [4096 + 256, memory.data_ptr()] and not memory.any()
    assert [name for name, _ in SymmetricMemory.calls] == USED
    given = dict(SymmetricMemory.calls)
    assert given["empty_strided_p2p"] == ((4096,), (1,), torch.uint8, CPU, "a name")
    assert given["rendezvous"] == (memory,) and given["_register_process_group"] == ("a name", group)


class Driver:
    """CUDA's driver, which knows memory at 4096 by another address, and refuses to tell it where `fails`."""

    def __init__(self, fails=False):
        self.fails, self.pinned = fails, []

    def cuMemHostRegister_v2(self, at, nbytes, flags):
        self.pinned.append((at.value, nbytes.value, flags.value))

    def cuMemHostGetDevicePointer_v2(self, there, at, flags):
        there._obj.value = (1 << 40) + at.value
        return 701 if self.fails else 0

    def cuMemHostUnregister(self, at):
        self.pinned = [each for each in self.pinned if each[0] != at.value]

    def cuGetErrorName(self, error, name):
        name._obj.value = f"CUDA_ERROR_{error}".encode()


def test_the_driver_registers_memory_and_says_why_it_does_not(monkeypatch):
    good, bad = Driver(), Driver(fails=True)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: good if name == "libcuda.so.1" else None)
    assert blocks.register(4096, 8192) == (1 << 40) + 4096 and good.pinned == [(4096, 8192, 1 | 2)]
    blocks.unregister(4096)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: bad)
    with pytest.raises(RuntimeError, match="cuMemHostGetDevicePointer_v2 returned CUDA_ERROR_701"):
        blocks.register(4096, 8192)
    assert good.pinned == bad.pinned == []


def test_devices_are_used_where_each_reaches_all():
    facts = [blocks.Facts(rank, "here", rank, f"GPU-{rank}", "") for rank in range(2)]
    cuda = SimpleNamespace(device_count=lambda: 2, can_device_access_peer=lambda a, b: (a, b) == (0, 1))
    with (
        patch.object(blocks, "torch", SimpleNamespace(cuda=cuda)),
        patch.object(blocks, "gpu_of", lambda number: f"GPU-{number}"),
    ):
        here, there = torch.device("cuda", 0), torch.device("cuda", 1)
        assert blocks.reaches_all(here, facts) and not blocks.reaches_all(there, facts)
        with patch.dict(os.environ, {"NCCL_P2P_DISABLE": "1"}):
            assert not blocks.reaches_all(here, facts)
        assert not blocks.reaches_all(here, [facts[0], facts[1]._replace(number=0, gpu="GPU-0")])  # they share one
        assert not blocks.reaches_all(here, [facts[0], facts[1]._replace(gpu="GPU-9")])  # each sees one
        assert not blocks.reaches_all(here, [facts[0], facts[1]._replace(number=2)])
