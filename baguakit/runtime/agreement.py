"""The agreement of ranks when they attach: they compare their setups, and take the model of rank 0."""

import hashlib
import json
import zlib
from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from ..buckets import local
from ..comm import Comm
from ..lanes import CpuLane
from ..monitor import Collective, Monitor
from .setup import AnySetup

Written = tuple[str | None, Sequence[str]]  # the error of a rank, or None, and the lines of its setup
ERROR = "error"  # in place of the digest of a rank that could not make its setup


def agree(monitor: Monitor, make: Callable[[], AnySetup], label: str = "attach()", verb: str = "attach") -> AnySetup:
    """Make this rank's setup and compare it with the others' through the store, which needs no group. Collective.

    `label` and `verb` say in errors what the ranks do.

    Raises:
        ValueError: two setups differ, or `make` has raised on another rank; on all ranks.
        Exception: raised by `make`.
        PeerError: a rank has not come within the timeout.
    """
    collective = Collective(label=label)
    key = f"agree/{monitor.launched(0, collective).number}"

    def compared(error: str | None, lines: Sequence[str]) -> str:
        return str(_asked(monitor, collective, lambda: _compared(monitor, key, (error, lines), verb)))

    try:
        setup = make()
    except Exception as error:
        if monitor.size > 1:
            compared(f"{type(error).__name__}: {error}", ())
        raise
    if monitor.size > 1 and (found := compared(None, setup.lines)):
        raise ValueError(found)
    return setup


def first_said(monitor: Monitor, label: str, text: str) -> str:
    """Return the text of the first rank that called this here, all in the same order. Waits for no rank."""
    if monitor.size == 1:
        return text
    collective = Collective(label=label)
    key = f"first/{monitor.launched(0, collective).number}"
    return str(_asked(monitor, collective, lambda: monitor.store.compare_set(key, "", text).decode()))


def _asked(monitor: Monitor, collective: Collective, ask: Callable[[], Any]) -> Any:
    """Return the answer of the store to a collective that has been launched."""
    lane = CpuLane("baguakit agree")  # a store that does not answer blocks the thread, which is not joined
    collective.flight = lane.run(ask, collective.label)
    lane.close(wait=False)
    return monitor.wait_for(collective)


def _compared(monitor: Monitor, key: str, written: Written, verb: str) -> str:
    """Write a digest of this rank's error or lines, and return the difference that rank 0 finds; "" for none.

    Only a rank that differs writes its error or lines. However many ranks there are, a rank makes four requests, and
    one each time that it asks whether the others are done.
    """
    store, mine, verdict, told = monitor.store, f"{key}/{monitor.rank}", f"{key}/verdict", f"{key}/told"
    text = json.dumps(written).encode()
    store.set(mine, ERROR if written[0] is not None else hashlib.sha256(text).hexdigest())
    store.add(f"{key}/came", 1)
    if monitor.rank == 0:
        monitor.wait_until(lambda: int(store.add(f"{key}/came", 0)) == monitor.size)
        digests = store.multi_get([f"{key}/{rank}" for rank in range(monitor.size)])
        store.set(verdict, str(odd_one(digests)))
    odd = int(_awaited(monitor, verdict))
    store.delete_key(mine)
    if odd < 0:
        return ""
    if monitor.rank == odd:
        store.set(told, zlib.compress(text))
    if monitor.rank == 0:
        theirs = json.loads(zlib.decompress(_awaited(monitor, told)))
        store.set(f"{key}/difference", difference(odd, written, theirs, verb))
    return _awaited(monitor, f"{key}/difference").decode()


def _awaited(monitor: Monitor, key: str) -> bytes:
    monitor.wait_until(lambda: bool(monitor.store.check([key])))
    return bytes(monitor.store.get(key))


def odd_one(digests: Sequence[bytes]) -> int:
    """Return the first rank that has an error, else the first with another digest than rank 0; -1 if there is none."""
    if (error := ERROR.encode()) in digests:
        return digests.index(error)
    return next((rank for rank, digest in enumerate(digests) if digest != digests[0]), -1)


def difference(rank: int, ours: Written, theirs: Written, verb: str) -> str:
    """Return a sentence about a rank that has an error, or other lines than rank 0, whose are `ours`."""
    if theirs[0] is not None:
        return f"rank {rank} could not {verb}: {theirs[0]}"
    pairs = zip_longest(ours[1], theirs[1], fillvalue="nothing more")
    a, b = next((a.strip(), b.strip()) for a, b in pairs if a != b)
    return f"ranks must {verb} the same: rank 0 has {a} where rank {rank} has {b}"


@torch.no_grad()
def broadcast_tensors(tensors: Iterable[Tensor], comm: Comm, device: torch.device, source: int = 0) -> None:
    """Overwrite tensors, such as parameters and buffers, with the same tensors of rank `source`. Collective."""
    for x in dict.fromkeys(tensors):
        broadcast_into(x, comm, device, source)


def broadcast_into(x: Tensor, comm: Comm, device: torch.device, source: int = 0) -> None:
    """Overwrite `x`, of any dtype, device and layout in memory, by that of rank `source`. Collective."""
    if x.layout is not torch.strided:  # its values and their places are tensors of other lengths on each rank
        there = comm.broadcast_object(x.cpu(), source)
        x.resize_as_sparse_(there).copy_(there)  # `x` itself: a detached one would have others
    elif (x := local(x)).numel():
        there = x.to(device).resolve_conj().resolve_neg().contiguous()
        comm.broadcast(there.view(-1).view(torch.uint8), source)
        if there.data_ptr() != x.data_ptr():
            x.copy_(there)
