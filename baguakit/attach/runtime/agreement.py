"""The agreement of ranks when they attach: they compare their setups, and take the model of rank 0."""

import hashlib
import json
import zlib
from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from ...buckets import local
from ...comm import Comm
from ...lanes import CpuLane
from ..monitor import Collective, Monitor
from ..setup.conflicts import is_divided, is_sharded
from ..setup.setup import AnySetup, AttachSetup

Written = tuple[str | None, Sequence[str]]
"""The error of a rank, or None, and the lines of its setup."""

ERROR = "error"  # in place of the digest of a rank that could not make its setup


def agree(monitor: Monitor, make: Callable[[], AnySetup], label: str = "attach()", verb: str = "attach") -> AnySetup:
    """Make this rank's setup and compare it with the others' through the store, which needs no group. Collective.

    Rank 0 reads a digest of every rank's setup, and writes the result. `label` and `verb` say in errors what the ranks
    do.

    Raises:
        ValueError: two setups differ, or `make` has raised on another rank; on all ranks.
        Exception: raised by `make`.
        PeerError: a rank has not come within the timeout.
    """
    setup, error, found = None, None, ""
    collective = Collective(label=label)
    launches = monitor.launched(0, collective)
    try:
        setup = make()
    except Exception as caught:
        error = caught
    if monitor.size > 1:
        mine = (f"{type(error).__name__}: {error}" if error is not None else None, () if setup is None else setup.lines)
        found = _asked(monitor, collective, lambda: _compared(monitor, f"agree/{launches.count}", mine, verb))
    if error is not None:
        raise error
    if found:
        raise ValueError(found)
    assert setup is not None
    return setup


def first_said(monitor: Monitor, label: str, text: str) -> str:
    """Return the text of the first rank that called this here, all in the same order. Waits for no rank.

    Raises:
        PeerError: the store does not answer within the timeout, or is gone.
    """
    if monitor.size == 1:
        return text
    collective = Collective(label=label)
    key = f"first/{monitor.launched(0, collective).count}"
    return str(_asked(monitor, collective, lambda: monitor.store.compare_set(key, "", text).decode()))


def _asked(monitor: Monitor, collective: Collective, ask: Callable[[], Any]) -> Any:
    """Return the answer of the store to a collective that has been launched."""
    lane = CpuLane("baguakit agree")  # a store that does not answer blocks the thread, which is not joined
    collective.flight = lane.run(ask, collective.label)
    lane.close(wait=False)
    return monitor.wait_for(collective)


def _compared(monitor: Monitor, key: str, written: Written, verb: str) -> str:
    """Write a digest of this rank's error or lines, and return the difference that rank 0 finds; "" for none.

    Rank 0 reads all digests in one request. Only a rank that differs writes its error or lines, for rank 0 to compare.
    However many ranks there are, a rank makes four requests, and one each time that it asks whether the others are
    done.
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
    """Return the value of a key once it is there."""
    monitor.wait_until(lambda: bool(monitor.store.check([key])))
    return bytes(monitor.store.get(key))


def odd_one(digests: Sequence[bytes]) -> int:
    """Return the first rank that has an error, else the first with another digest than rank 0; -1 if there is none."""
    errors = [rank for rank, digest in enumerate(digests) if digest == ERROR.encode()]
    others = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    return next(iter(errors or others), -1)


def difference(rank: int, ours: Written, theirs: Written, verb: str) -> str:
    """Return a sentence about a rank that has an error, or other lines than rank 0, whose are `ours`."""
    if theirs[0] is not None:
        return f"rank {rank} could not {verb}: {theirs[0]}"
    pairs = zip_longest(ours[1], theirs[1], fillvalue="nothing more")
    a, b = next((a.strip(), b.strip()) for a, b in pairs if a != b)
    return f"ranks must {verb} the same: rank 0 has {a} where rank {rank} has {b}"


def take_from(source: int, setup: AttachSetup, comm: Comm) -> None:
    """Overwrite weights, buffers and optimizer state by those of rank `source`. Collective."""
    if comm.size > 1:
        broadcast_tensors([*setup.model.parameters(), *setup.model.buffers()], comm, setup.device, source)
        broadcast_optimizers(setup.optimizers, comm, setup.device, source)


@torch.no_grad()
def broadcast_tensors(tensors: Iterable[Tensor], comm: Comm, device: torch.device, source: int = 0) -> None:
    """Overwrite tensors, such as parameters and buffers, by those of rank `source`. Collective."""
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


def broadcast_optimizers(optimizers: Iterable[Optimizer], comm: Comm, device: torch.device, source: int = 0) -> None:
    """Overwrite the state of every optimizer, tensors and options, by that of rank `source`. Collective.

    Where each rank has another part of the state, it stays.
    """
    for optimizer in optimizers:
        if is_divided(optimizer):
            continue
        tensors: list[Tensor] = []
        skeleton = _without_tensors(optimizer.state_dict(), tensors)
        mine = skeleton, [_shape(t) for t in tensors], any(map(is_sharded, tensors))
        skeleton, shapes, sharded = comm.broadcast_object(mine if comm.rank == source else None, source)
        if sharded and [_shape(t) for t in tensors] != shapes:
            raise ValueError(
                f"the optimizer state of a sharded model has other tensors on rank {comm.rank} than on rank {source}; "
                "attach before the first step, or load every rank's own checkpoint and pass broadcast=False"
            )
        if comm.rank != source and not sharded:
            tensors = [
                torch.empty(shape, dtype=dtype, device=device if kind == device.type else kind)
                for shape, dtype, kind in shapes
            ]
        for t in tensors:
            broadcast_into(t, comm, device, source)
        if comm.rank != source:
            optimizer.load_state_dict(_with_tensors(skeleton, tensors))


def _shape(t: Tensor) -> tuple[torch.Size, torch.dtype, str]:
    return local(t).shape, t.dtype, t.device.type


class _Place(int):
    """The number of a tensor that was taken out of a state."""


class _Parts(NamedTuple):
    """A tensor that is made of others, as quantized optimizer states are, with places for these."""

    kind: Any
    parts: dict[str, Any]
    context: Any
    shape: torch.Size
    stride: tuple[int, ...]


def _without_tensors(state: Any, tensors: list[Tensor]) -> Any:
    """Return a state with a place for each tensor, which is moved to `tensors`."""

    def placed(tensor: Any) -> _Place | _Parts:
        if hasattr(tensor, "__tensor_flatten__") and not is_sharded(tensor):
            names, context = tensor.__tensor_flatten__()
            parts = {name: placed(getattr(tensor, name)) for name in names}
            return _Parts(type(tensor), parts, context, tensor.size(), tensor.stride())
        tensors.append(tensor.detach())
        return _Place(len(tensors) - 1)

    return _replaced(state, Tensor, placed)


def _with_tensors(skeleton: Any, tensors: Sequence[Tensor]) -> Any:
    """Return the state of `_without_tensors`, with other tensors."""

    def restored(place: Any) -> Any:
        if isinstance(place, _Place):
            return tensors[place]
        parts = {name: restored(each) for name, each in place.parts.items()}
        return place.kind.__tensor_unflatten__(parts, place.context, place.shape, place.stride)

    return _replaced(skeleton, (_Place, _Parts), restored)


def _replaced(value: Any, kind: type | tuple[type, ...], function: Callable[[Any], Any]) -> Any:
    """Return nested dicts, lists and tuples with `function` of every value of a kind in its place."""
    if isinstance(value, kind):
        return function(value)
    if isinstance(value, dict):
        return {key: _replaced(each, kind, function) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_replaced(each, kind, function) for each in value)
    return value
