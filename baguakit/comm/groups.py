"""Check process groups, and make new ones for attachments.

After an error, NCCL groups of this module only record it, and a monitor reports it. Other NCCL groups end the process.
"""

import os
import socket
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any, ClassVar, TypeVar
from weakref import WeakKeyDictionary, WeakMethod, WeakSet

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import PrefixStore, Store

from ..arguments import instance, one_of
from .sending import CPU, FLAT, INTER, INTRA, backend_of, is_staged

T = TypeVar("T")
GLOO = "gloo"
HOSTS = "hosts"
"""A value of `mesh`: each host that ranks run on is a node."""

# Up to this many ranks, gloo connects every pair of ranks at the start, because a connection that breaks shows that a
# rank is lost. Without a connection, a rank that waits for a message of a lost rank waits until the timeout.
CONNECTED = 32
BACKENDS = {"cpu": dist.ProcessGroup.BackendType.GLOO, "cuda": dist.ProcessGroup.BackendType.NCCL}

# The constructor of ProcessGroupNCCL reads these variables; its options have no fields for them.
#
# The first variable is the mode of the watchdog. In mode 0 the watchdog only records errors; the monitor then reads
# the error, names the failed rank, fails the flights, and aborts the groups. Modes 1 and 3 end the process. Mode 2
# aborts the group before the error is reported, so that kernels that wait for data end without these data.
#
# After an error, the first NCCL group of the process, which is the user's, still dumps torch's flight recorder. It ends
# the process TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC (480 s) later, unless the group has been destroyed by then.
SETTINGS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_DESYNC_DEBUG": "0",  # it changes mode 0 to mode 3
    "TORCH_NCCL_BLOCKING_WAIT": "0",  # it makes the host wait for each message
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",  # the watchdog sleeps for four times as long, and joining it waits
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # it ends the process if the watchdog is blocked
    "TORCH_NCCL_NAN_CHECK": "0",  # it ends the process at a NaN, which is sent on purpose: all ranks skip that step
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",  # the next CUDA call of Python raises the error of a failed kernel
}

_environment = threading.Lock()  # the environment belongs to the whole process
_c10d: Any = dist  # its type stubs lack some names

# The keys of these dictionaries are process groups.
_stores: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()  # the stores of groups made here, which need a reference
_connections: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()  # second connections to the stores
_names: WeakKeyDictionary[Any, Iterator[str]] = WeakKeyDictionary()  # names to give out
_inner: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()  # by group of `bk.backend`: its inner group
_members: WeakKeyDictionary[Any, list[int]] = WeakKeyDictionary()  # by inner group

lazy: WeakSet[Any] = WeakSet()
"""The groups in which two ranks connect with their first message."""


def check_device(group: Any, device: torch.device, flows: int = 1) -> None:
    """Raise a ValueError unless the group sends tensors on `device` by NCCL or, which `flows` need, by gloo."""
    if device.type == "meta":
        raise ValueError("tensors on meta hold no values; move them to a device first: model.to_empty(device=…)")
    by_gloo = device == CPU or is_staged(group, device)
    if flows > 1 and not by_gloo:
        raise ValueError(f"flows={flows} divide what travels over gloo, and these tensors travel by NCCL; use 1")
    if by_gloo and (found := backend_of(group, "cpu")) != "gloo":
        raise ValueError(
            f"tensors on {device} are sent from the memory of the host by gloo, and this group has {found} for CPU "
            "tensors; use init_process_group('gloo'), or, with NCCL for CUDA, 'cpu:gloo,cuda:nccl'"
        )


def store_of(group: Any, name: str) -> Any:
    """Return the key-value store through which the ranks of a group connected, with the key prefix `name`.

    The result uses a second connection, so that a wait on the first does not block it. Never block the second. It is
    made only once, because TCPStore looks up the name of each new client, which can block all clients for seconds.
    """
    if group not in _connections:
        store = group.get_group_store()
        _connections[group] = store.clone() if hasattr(store, "clone") else store
    return PrefixStore(f"baguakit/{name}", _connections[group])


class PatientStore(Store):
    """A group's store. It waits for keys by `wait_until`, which may raise: else nothing could stop a waiting group."""

    def __init__(self, group: Any, wait_until: Callable[[Callable[[], bool]], None]) -> None:
        super().__init__()
        store_of(group, "")
        self._store = _connections[group]
        self._wait_until = WeakMethod(wait_until)

    def set(self, key: str, value: Any) -> None:
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._store.get(key)  # type: ignore[no-any-return]

    def add(self, key: str, amount: int) -> int:
        return int(self._store.add(key, amount))

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._store.check(keys))

    def clone(self) -> Any:
        return self._store.clone()

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        if (wait_until := self._wait_until()) is None:
            raise RuntimeError("this group has a message to send after all that used it has ended")
        wait_until(lambda: self.check(keys))


def next_name(group: Any) -> str:
    """Return a new name, equal on all ranks, which call this equally often; the store counts the groups used before."""
    if group.size() == 1:
        return "0"
    if group not in _names:
        earlier = (store_of(group, "lives").add("asked", 1) - 1) // group.size()
        _names[group] = (f"{earlier}/{i}" for i in count(1))
    return next(_names[group])


def own_group(like: Any, store: Any, name: str, timeout: timedelta, device: torch.device) -> Any:
    """Return a new process group of the ranks of `like`. Only these ranks call this, all with one unique name.

    `dist.new_group` is not used: if only the members call it, torch's group counter changes on these ranks only. With
    `use_local_synchronization`, a second group of the same ranks finds the addresses of the first group and hangs.
    """
    kind = "cpu" if is_staged(like, device) else device.type
    return group_over(store, name, like.rank(), members_of(like), [kind], timeout)


def lazy_group(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """Return a process group of `size` ranks over a store. Two ranks connect with their first message."""
    kinds = ["cpu", *["cuda"] * (torch.cuda.is_available() and dist.is_nccl_available())]
    return group_over(store, "elastic", rank, list(range(size)), kinds, timeout, lazily=True)


def group_over(
    store: Any, name: str, rank: int, members: list[int], kinds: Iterable[str], timeout: timedelta, lazily: bool = False
) -> Any:
    """Return a new process group for tensors on these kinds of devices. Ranks connect through `store`, under `name`.

    `members` has each member's rank in the default group. Over gloo, more than `CONNECTED` ranks connect `lazily`, too.
    """
    part, lazily = PrefixStore(f"baguakit/{name}", store), lazily or len(members) > CONNECTED
    group = dist.ProcessGroup(part, rank, len(members))
    for kind in kinds:
        own = PrefixStore(kind, part)
        if kind == "cuda":
            backend = nccl_backend(own, rank, members, f"baguakit/{name}", timeout)
        else:
            backend = gloo_backend(own, rank, len(members), timeout, lazily)
            lazy.update([group] * lazily)
        _send_by(group, kind, backend)
        group._set_default_backend(BACKENDS[kind])
    _stores[group] = store
    return group


def gloo_backend(store: Any, rank: int, size: int, timeout: timedelta, lazily: bool) -> Any:
    """Return a gloo backend. With `lazily`, two ranks connect with their first message; no rank reads all addresses."""
    if not lazily:
        return _c10d.ProcessGroupGloo(store, rank, size, timeout)
    options, make = _c10d.ProcessGroupGloo._Options(), _c10d.ProcessGroupGloo.create_device
    # If gloo is given options, it ignores GLOO_SOCKET_IFNAME, which is therefore read here.
    names = list(filter(None, os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")))
    devices = [make(interface=name, lazy_init=True) for name in names]
    options._devices = devices or [_c10d.ProcessGroupGloo.create_default_device(lazy_init=True)]
    options._timeout = timeout
    return _c10d.ProcessGroupGloo(store, rank, size, options)


def nccl_backend(store: Any, rank: int, members: list[int], name: str, timeout: timedelta) -> Any:
    """Return a new NCCL backend that only records errors."""
    options = _c10d.ProcessGroupNCCL.Options()
    options._timeout = timeout
    options.group_name, options.global_ranks_in_group = name, members
    with _environment:
        before, level = {key: os.environ[key] for key in SETTINGS if key in os.environ}, _c10d.get_debug_level()
        os.environ.update(SETTINGS)
        if level == _c10d.DebugLevel.DETAIL:  # it turns desync debugging on
            _c10d.set_debug_level(_c10d.DebugLevel.INFO)
        try:
            return _c10d.ProcessGroupNCCL(store, rank, len(members), options)
        finally:
            _c10d.set_debug_level(level)
            for key in SETTINGS.keys() - before:
                del os.environ[key]
            os.environ.update(before)


def error_in(groups: Iterable[Any]) -> str:
    """Return the first error that the watchdogs of groups have recorded, such as "COMM_ERROR"; "" for none."""
    backends = [each._get_backend(device) for each in groups for device in each._device_types if device.type == "cuda"]
    errors = [str(backend.get_error().name) for backend in backends if hasattr(backend, "get_error")]
    return next((error for error in errors if error != "SUCCESS"), "")


def _send_by(group: Any, kind: str, backend: Any) -> None:
    backend._set_sequence_number_for_group()
    group._register_backend(torch.device(kind), BACKENDS[kind], backend)


def check_mesh(mesh: DeviceMesh, group: Any) -> None:
    instance("mesh", mesh, DeviceMesh, f'"hosts", or a DeviceMesh with the dimensions ("{INTER}", "{INTRA}")')
    names = mesh.mesh_dim_names or ()
    if set(names) != {INTER, INTRA}:
        raise ValueError(f'a mesh for Comm has the dimensions ("inter", "intra"), nodes and their ranks, not {names}')
    if group is not None:
        covered, ranks = sorted(mesh.mesh.flatten().tolist()), sorted(dist.get_process_group_ranks(group))
        if ranks != covered:
            raise ValueError(f"the mesh covers the ranks {covered} and the group {ranks}; they must be the same")


def flat_group(mesh: DeviceMesh | None) -> Any:
    """Return the group of all ranks of a mesh; the default group without a mesh."""
    world: Any = dist.group.WORLD
    if mesh is None or mesh.size() == dist.get_world_size():
        return world
    # After `init_process_group(device_id=…)` torch would split the communicator of all ranks, and wait for ranks that
    # do not make this group.
    bound, world.bound_device_id = world.bound_device_id, None
    try:
        return dist.new_group(mesh.mesh.flatten().tolist(), use_local_synchronization=True)
    finally:
        world.bound_device_id = bound


def stand_for(group: Any, inner: Any, members: Sequence[int]) -> None:
    """Let `Comm(group)` send over `inner`, with the same ranks. `members` has their ranks in the default group."""
    _inner[group], _members[inner] = inner, list(members) or list(range(group.size()))


def inner_of(group: Any) -> Any:
    """Return the group over which `Comm(group)` sends: `group`, or its inner group if `bk.backend` made `group`."""
    return _inner.get(group, group)


def add_nccl(group: Any, store: Any, name: str, timeout: timedelta) -> None:
    """Let a gloo group also send CUDA tensors, over NCCL. NCCL connects the ranks with the first message."""
    name = f"baguakit/{name}"
    backend = nccl_backend(PrefixStore(name, store), group.rank(), members_of(group), name, timeout)
    _send_by(group, "cuda", backend)


def members_of(group: Any) -> list[int]:
    """Return the members' ranks in the default group; if torch does not know `group`, 0 to size − 1."""
    try:
        return _members.get(group) or dist.get_process_group_ranks(group)
    except KeyError:
        return list(range(group.size()))


def host() -> str:
    """Return a name of this host, from boot id and network namespace. A container with its own namespace is a host."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}/{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:  # not Linux
        return f"{socket.gethostname()}/{uuid.getnode()}"


def ranks_by_host(hosts: Sequence[str]) -> list[list[int]]:
    found: dict[str, list[int]] = {}
    for rank, each in enumerate(hosts):
        found.setdefault(each, []).append(rank)
    return list(found.values())


def on_all(comm: Any, make: Callable[[], T], doing: str) -> T:
    """Return `make()`. If it fails on one rank, the other ranks raise a ValueError that names `doing`. Collective."""
    error = None
    try:
        made = make()
    except Exception as caught:
        error = caught
    errors = [] if comm is None else comm.gather_objects(error and f"{type(error).__name__}: {error}")
    if error is not None:
        raise error
    for rank, each in enumerate(errors):
        if each is not None:
            raise ValueError(f"rank {rank} could not {doing}: {each}")
    return made


def node_groups(comm: Any) -> tuple[Any, Any]:
    nodes = ranks_by_host(comm.gather_objects(host()))
    if odd := next((ranks for ranks in nodes if len(ranks) != len(nodes[0])), None):
        raise ValueError(
            f'mesh="{HOSTS}" needs the same number of ranks on every host: that of rank 0 has {len(nodes[0])}, and '
            f"that of rank {odd[0]} has {len(odd)}; give each as many, or pass a DeviceMesh"
        )
    name, rank, world = comm.broadcast_object(uuid.uuid4().hex), comm.rank, members_of(comm.group)
    node = next(i for i, ranks in enumerate(nodes) if rank in ranks)
    place = nodes[node].index(rank)
    kinds = [kind for kind, backend in BACKENDS.items() if backend_of(comm.group, kind) == backend.name.lower()]

    def made(part: str, ranks: Sequence[int]) -> Any:
        store, members = comm.group.get_group_store(), [world[r] for r in ranks]
        return group_over(store, f"{name}/{part}", ranks.index(rank), members, kinds, default_pg_timeout)

    return made(f"{INTRA}{node}", nodes[node]), made(f"{INTER}{place}", [ranks[place] for ranks in nodes])


def kinds_of(group: Any) -> set[str]:
    return {device.type for device in group._device_types}


def gloo_between(comm: Any) -> tuple[Any, Any]:
    """Return a flat group and (intra, inter) groups for `between="gloo"`: only intra sends by NCCL. Collective."""
    one_of("between", comm.between, (GLOO,))
    if comm._parts is None:
        raise ValueError(f'between="{GLOO}" needs mesh="{HOSTS}" or a DeviceMesh, which tell the ranks within a node')
    (intra, inter), cuda = comm._parts, torch.device("cuda")
    if cuda.type not in kinds_of(comm.group) or is_staged(comm.group, cuda):
        return comm.group, comm._parts  # gloo sends everything
    check_device(comm.group, CPU)
    name, store, limit = comm.broadcast_object(uuid.uuid4().hex), comm.group.get_group_store(), default_pg_timeout
    between = own_group(inter, store, f"{name}/{INTER}{intra.rank()}", limit, CPU)
    return own_group(comm.group, store, f"{name}/{FLAT}", limit, CPU), (intra, between)


def facts_of(comm: Any) -> list[str]:
    part = {INTRA: " within the node", INTER: " between nodes"}.get(comm._part, "")
    names = sorted({backend_of(comm.group, device.type) for device in comm.group._device_types})
    said = [f"rank {comm.rank} of {comm.size}{part}", " and ".join(names)]
    if comm._parts is not None:
        nodes, each = comm._parts[1].size(), comm._parts[0].size()
        said.append(f"{nodes} node{'s' * (nodes != 1)} of {each}")
    if comm.between is not None and comm._part == FLAT:
        said.append(f"{comm.between} between nodes")
    if comm.kernels:
        said.append("means in one kernel")
    if comm.flows > 1:
        said.append(f"{comm.flows} flows")
    return said + [f"{name} {at}" for name, at in (("round", comm._round), ("step", comm._step)) if at is not None]


class Membership:
    """The members of a group, as an attachment sees them. In this class they never change; in `bk.elastic` they do."""

    changes: ClassVar[bool] = False  # ranks come and go, so that the group of the `Comm` changes
    bodies = 0  # the number of `recoverable()` blocks that have ended

    def watch(self, monitor: Any) -> None:
        """From now on, tell the monitor of an attachment or a hook when a rank is lost."""

    def start(self, engine: Any) -> None:
        """Start the engine of an attachment. Collective."""
        engine.start(engine.take_from_rank_0, engine.begin)

    def ended(self, engine: Any) -> None:
        """Note that an attachment has ended."""

    def elastic(self, call: str) -> Any:
        """Return this membership; raise a ValueError that names `call` if the ranks of the group do not come and go."""
        raise ValueError(f"{call} needs a group whose ranks come and go: comm=bk.elastic.join(…)")
