"""Processes that share a GPU average in one kernel, and miss one of them.

Their memory is on the host, as `Comm(kernels=True)` makes it for them, or on the device, which they open in each other.
What they have is compared with the definition and with what NCCL brings. They take turns on the GPU, so that no time of
theirs means anything. One that is killed, late, or comes to fewer means must be named by the others soon after `LIMIT`.
"""

import json
import os
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

LIMIT = 2.0  # seconds that a kernel waits for a rank
SLACK = 3.0  # seconds that a rank may take longer: processes share the GPU in turns
CTAS = 4
KINDS = ("host", "device")
MISSED = ("killed", "late", "at fewer means")
MANY, FEW = 1 << 20, 1 << 10  # values: two hops, and one
BETWEEN = (("UInt4()", MANY), ("exact", MANY), ("UInt4()", FEW), ("exact", FEW))


def of_processes(size: int) -> dict[str, Any]:
    """Return, for each kind of memory, what all ranks of some processes find to be so."""
    from baguakit.ranks import Ranks

    facts = {}
    with Ranks(size, cuda=True, timeout=60) as ranks:
        for kind in KINDS:
            found = ranks.run(means_of_process, kind, limit=120.0)
            facts[f"memory on the {kind}"] = {name: all(each[name] for each in found) for name in found[0]}
    return facts


def drawn(ranks: int, length: int, device: str) -> torch.Tensor:
    """Return values of all ranks, the same on each."""
    return torch.randn(ranks, length, generator=torch.Generator().manual_seed(length)).to(device)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(*(each.contiguous().view(-1).view(torch.uint8) for each in (a, b)))


def means_of_process(kind: str) -> dict[str, bool]:
    """Return whether means of this rank have the bytes of the definition, and those that NCCL brings."""
    import baguakit as bk
    from bench.exchange.counting import CODECS
    from bench.exchange.node import separately

    plain, found = bk.Comm(), dict[str, bool]()
    in_kernel = bk.Comm(kernels=True) if kind == "host" else plain
    on_device = None if kind == "host" else OnDevice()
    for name, length in BETWEEN:
        codec, values = CODECS[name], drawn(plain.size, length, "cuda")
        case, x = f"{name}, {'one hop' if length == FEW else 'two hops'}", values[plain.rank].clone()
        lost = torch.zeros(plain.size, length, dtype=torch.float32, device="cuda")
        residual = None if codec is None else torch.zeros_like(x)
        for _ in range(3):  # both halves of the memory, and one again
            x.copy_(values[plain.rank])
            if on_device is not None:
                found[f"{case}, finite"] = on_device.mean_(x, codec, residual, length == FEW)
            elif codec is None:
                bk.primitives.mean_(x, in_kernel)
            else:
                bk.primitives.compressed_mean_(x, codec, in_kernel, residual)
        want = separately(codec, [*values], None if codec is None else [*lost], length == FEW)[0]
        found[case] = same(x, want)
        if residual is not None:
            found[f"{case}, residual"] = same(residual, lost[plain.rank])
        nccl = values[plain.rank].clone()
        if codec is not None:
            found[f"{case}, as over NCCL"] = same(bk.primitives.compressed_mean_(nccl, codec, plain), x)
        elif plain.size == 2:  # of more, NCCL adds in another order
            found[f"{case}, as over NCCL"] = same(bk.primitives.mean_(nccl, plain), x)
    if kind == "host":
        found["in one kernel"] = bool(in_kernel._node and in_kernel._node.spaces)
    torch.cuda.synchronize()
    plain.gather_objects(None)  # memory is freed when no rank uses it
    return found


class OnDevice:
    """Memory on the device of each process, which all have opened. Collective."""

    def __init__(self, half: int = 1 << 24) -> None:
        from torch.multiprocessing.reductions import reduce_tensor

        import baguakit as bk
        from baguakit.kernels.exchange.tiles_gpu import Memory

        comm = bk.Comm()
        own = torch.zeros(2 * half + 8 * comm.size * CTAS, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        opened = comm.gather_objects(reduce_tensor(own))
        self.whole = [own if rank == comm.rank else make(*how) for rank, (make, how) in enumerate(opened)]
        addresses = torch.tensor([each.data_ptr() for each in self.whole], dtype=torch.int64, device="cuda")
        counters = torch.zeros(CTAS, dtype=torch.int32, device="cuda")
        control = torch.zeros(1 + comm.size, dtype=torch.int32, pin_memory=True)
        self.memory = Memory(comm.rank, comm.size, addresses, counters, control, half, 60 * 10**9)

    def mean_(self, x: torch.Tensor, codec: Any, residual: torch.Tensor | None, one_hop: bool) -> bool:
        """Average, and return whether all values are finite and no rank was missed."""
        from baguakit.kernels.exchange.mean_gpu import mean_
        from bench.exchange.node import wire_of

        ok = mean_(self.memory, wire_of(codec), x, residual, one_hop)
        return bool(ok.all()) and not self.memory.control.any()


def of_missed(how: str) -> dict[str, Any]:
    """Return what the ranks say that miss rank 1."""
    from baguakit.ranks import RankError, Ranks

    size = 3
    with tempfile.TemporaryDirectory() as room:
        try:
            with Ranks(size, cuda=True, timeout=60) as ranks:
                ranks.run(misses, how, room, limit=60.0, lost=[1] if how == "killed" else [])
        except RankError as error:
            print(error)
        notes = {rank: Path(room) / str(rank) for rank in range(size) if rank != 1}
        return {
            f"rank {rank}": json.loads(path.read_text()) if path.exists() else False for rank, path in notes.items()
        }


def misses(how: str, room: str) -> None:
    """Take part in a mean, and then in one to which rank 1 does not come in time."""
    import baguakit as bk

    comm = bk.Comm(kernels=True)
    x = drawn(comm.size, 1 << 16, "cuda")[comm.rank].clone()
    bk.primitives.mean_(x, comm)
    torch.cuda.synchronize()
    before = bool(x.isfinite().all())
    for space in comm._node.spaces.values():  # a group with such a timeout might not even connect
        space.limit = round(LIMIT * 1e9)
    comm.gather_objects(None)
    if comm.rank == 1:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(LIMIT + SLACK + 1)
        if how == "late":
            bk.primitives.mean_(x, comm)
            torch.cuda.synchronize()
        return
    began = time.monotonic()
    bk.primitives.mean_(x, comm)
    torch.cuda.synchronize()
    seconds, sentence = time.monotonic() - began, ""
    try:
        bk.primitives.mean_(x.clone(), comm)
    except RuntimeError as error:
        sentence = str(error)
    found = {
        "the mean before is finite": before,
        "ends in time": seconds <= LIMIT + SLACK,
        "all values are NaN": bool(x.isnan().all()),
        "names rank 1": "rank 1 " in sentence,
        "sentence": sentence,
        "seconds": round(seconds, 3),
    }
    (Path(room) / str(comm.rank)).write_text(json.dumps(found))
    if how != "killed":
        time.sleep(LIMIT + 2 * SLACK)  # the memory of this rank is there until the late one is done
