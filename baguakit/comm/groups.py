"""Process groups: which of them can move what, and how to make some of one's own."""

import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import PrefixStore, Store

from ..arguments import instance, shown, whole
from .nccl import nccl_backend

FLAT, INTER, INTRA = "flat", "inter", "intra"

# torch 2.13 renamed these two and warns of the old names; older versions know only the old ones.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_stores: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()  # by group made here: it does not keep its store alive
_connections: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()  # by group
_named: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # how many names a group has been asked for
_lives: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # the number of a group among those made over one store
_warm: WeakKeyDictionary[Any, set[torch.device]] = WeakKeyDictionary()  # where a group has moved tensors, by group


def check_device(group: Any, device: torch.device) -> None:
    """Raise unless the group moves tensors of `device` in a way that this package knows."""
    wanted = {"cpu": "gloo", "cuda": "nccl"}.get(device.type)
    if wanted is None:
        raise ValueError(f"baguakit trains on CPU (gloo) and CUDA (NCCL); these parameters are on {device}")
    try:
        found = str(group._get_backend(torch.device(device.type)).name()).lower()
    except RuntimeError:
        found = "nothing"
    if found != wanted:
        raise ValueError(
            f"tensors on {device} travel by {wanted} and this group has {found} for them; "
            "init_process_group('cpu:gloo,cuda:nccl') has both"
        )


def store_of(group: Any, name: str) -> Any:
    """A part, named by its users, of the key-value store through which the ranks of a group found each other.

    Its users never wait in a call, and so share a connection, which is the group's second: somebody who waits on the
    first, for a key that is not there yet, holds nobody up. It is made once, since TCPStore looks up the name of
    whoever connects, and where a name server is slow that takes seconds for which all its clients stand still.
    """
    if group not in _connections:
        store = group.get_group_store()
        _connections[group] = store.clone() if hasattr(store, "clone") else store
    return PrefixStore(f"baguakit/{name}", _connections[group])


class PatientStore(Store):
    """A store whose users wait for keys as long as `wait_until` does, and no longer: a group's constructor takes long
    when a rank is missing, and cannot be ended from outside.

    Args:
        group: through whose store.
        wait_until: is given what is waited for, and returns once that is true, or raises.
    """

    def __init__(self, group: Any, wait_until: Callable[[Callable[[], bool]], None]) -> None:
        super().__init__()
        store_of(group, "")
        self._store = _connections[group]
        self._wait_until: Callable[[Callable[[], bool]], None] | None = wait_until

    def rest(self) -> None:
        """The groups are made: forget who waited for them, and wait as the store itself does."""
        self._wait_until = None

    def set(self, key: str, value: Any) -> None:
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._store.get(key)  # type: ignore[no-any-return]

    def add(self, key: str, amount: int) -> int:
        return int(self._store.add(key, amount))

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._store.check(keys))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        if self._wait_until is None:
            self._store.wait(list(keys))
        else:
            self._wait_until(lambda: self.check(keys))


def next_name(group: Any) -> str:
    """Return a name that no other call has returned, the same on all ranks: they call it equally often for a group.

    A group that was destroyed and made again over the same store gets other names: each rank adds 1 to a counter when
    it first asks, so that the sum tells how many groups have been there.
    """
    if group.size() == 1:
        return "0"
    if group not in _lives:
        _lives[group] = (store_of(group, "lives").add("asked", 1) - 1) // group.size()
    _named[group] = _named.get(group, 0) + 1
    return f"{_lives[group]}/{_named[group]}"


def own_group(like: Any, store: Any, name: str, timeout: timedelta, device: torch.device) -> Any:
    """A new process group of the ranks of `like`, made by its members only, under a name that they agree on.

    `dist.new_group` is not used: a sub-group made by its members shifts torch's group counter for the whole job, and
    with `use_local_synchronization` a group made, destroyed and made again finds the first one's addresses in the
    store and hangs. Here the store's prefix is the agreed, unique name, and nothing global is touched.
    """
    given, rank, size = store, like.rank(), like.size()
    store = PrefixStore(f"baguakit/{name}", given)
    backend: Any
    if device.type == "cuda":
        members = dist.get_process_group_ranks(like)
        backend = nccl_backend(store, rank, members, f"baguakit/{name}", timeout)
        kind = dist.ProcessGroup.BackendType.NCCL
    else:
        backend, kind = dist.ProcessGroupGloo(store, rank, size, timeout), dist.ProcessGroup.BackendType.GLOO
    backend._set_sequence_number_for_group()
    group = dist.ProcessGroup(store, rank, size)
    group._set_default_backend(kind)
    group._register_backend(torch.device(device.type), kind, backend)
    _stores[group] = given
    return group


def warm(group: Any, device: torch.device) -> None:
    """Send one byte to everybody, if this group has never moved tensors of `device`. Collective.

    NCCL makes a communicator in the first call, and waits there for all ranks: also for those that would send nothing.
    """
    if group.size() > 1 and device not in _warm.setdefault(group, set()):
        dist.all_reduce(torch.zeros(1, dtype=torch.uint8, device=device), group=group)
        _warm[group].add(device)


def gather_pickled(value: Any, group: Any) -> list[Any]:
    """Return the picklable `value` of every rank. Collective.

    `dist.all_gather_object` is not used: with TORCH_DISTRIBUTED_DEBUG=DETAIL it looks a group up among those that torch
    has made.
    """
    kinds = {each.type for each in group._device_types}
    there = torch.device("cpu") if "cpu" in kinds else torch.device("cuda", torch.cuda.current_device())
    mine = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    sizes = torch.empty(group.size(), dtype=torch.int64, device=there)
    all_gather_single(sizes, torch.tensor([mine.numel()], device=there), group=group)
    counts = sizes.tolist()
    padded = torch.zeros(max(counts), dtype=torch.uint8)
    padded[: mine.numel()] = mine
    landed = torch.empty(len(counts) * len(padded), dtype=torch.uint8, device=there)
    all_gather_single(landed, padded.to(there), group=group)
    rows = landed.cpu().view(len(counts), -1)
    return [pickle.loads(row[:count].numpy().tobytes()) for row, count in zip(rows, counts, strict=True)]


def check_group(group: Any) -> None:
    """Raise a TypeError unless `group` is a process group that this rank is in, or None."""
    if group is not None:
        instance(
            "group", group, dist.ProcessGroup, "a ProcessGroup of which this rank is a member, or None for all ranks"
        )


def check_mesh(mesh: DeviceMesh, group: Any) -> None:
    """Raise unless the mesh has the two dimensions, and the ranks of the group if there is one."""
    instance("mesh", mesh, DeviceMesh, f'a DeviceMesh with the dimensions ("{INTER}", "{INTRA}")')
    names = mesh.mesh_dim_names or ()
    if set(names) != {INTER, INTRA}:
        raise ValueError(
            'a mesh for Comm has the dimensions ("inter", "intra"), nodes and ranks within a node; '
            f"this one has {tuple(names)}"
        )
    if group is not None:
        ranks = sorted(dist.get_process_group_ranks(group))
        if ranks != sorted(mesh.mesh.flatten().tolist()):
            raise ValueError(
                f"the mesh covers the ranks {sorted(mesh.mesh.flatten().tolist())} and the group {ranks}; "
                "they must be the same"
            )


def flat_group(mesh: DeviceMesh | None) -> Any:
    """The group of all ranks of a mesh; the default group without one."""
    world = dist.group.WORLD
    if mesh is None or mesh.size() == dist.get_world_size():
        return world
    return dist.new_group(mesh.mesh.flatten().tolist(), use_local_synchronization=True)


def rotated(peers: Iterable[int], rank: int) -> list[int]:
    """`peers` in order from `rank` on, so that ranks that send at once do not all send to the same one."""
    peers = sorted(peers)
    return [p for p in peers if p > rank] + [p for p in peers if p <= rank]


def check_peer(peer: int, group: Any) -> None:
    """Raise unless `peer` is another rank of the group."""
    if whole("peer", peer, 0, group.size() - 1) == group.rank():
        raise ValueError(f"peer is another rank of the group, 0 to {group.size() - 1}, not {peer}, which is this one")


def check_gathered(out: Tensor, x: Tensor, size: int, name: str = "x") -> None:
    """Raise a ValueError unless `out` has room for as many tensors like `x`, which is called `name`."""
    if out.numel() != size * x.numel() or out.dtype != x.dtype:
        raise ValueError(f"out has room for {size} tensors like {name}; out is {shown(out)}, and {name} is {shown(x)}")


def exchange_together(
    group: Any, outgoing: Mapping[int, Tensor], incoming: dict[int, Tensor], device: torch.device
) -> dict[int, Tensor]:
    """Send and receive at once: NCCL pairs sends with receives only within one call of the whole group."""
    warm(group, device)
    if not (outgoing or incoming):
        return incoming
    group._start_coalescing(device)
    for peer, x in outgoing.items():
        group.send([x], peer, 0)
    for peer, buffer in incoming.items():
        group.recv([buffer], peer, 0)
    group._end_coalescing(device).wait()
    return incoming
