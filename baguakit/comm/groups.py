"""Process groups: which of them can move what, and how to make some of one's own."""

from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import PrefixStore

INTER, INTRA = "inter", "intra"

_connections: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()  # by group


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


def own_group(like: Any, store: Any, name: str, timeout: timedelta, device: torch.device) -> Any:
    """A new process group of the ranks of `like`, made by its members only, under a name that they agree on.

    `dist.new_group` is not used: a sub-group made by its members shifts torch's group counter for the whole job, and
    with `use_local_synchronization` a group made, destroyed and made again finds the first one's addresses in the
    store and hangs. Here the store's prefix is the agreed, unique name, and nothing global is touched.
    """
    store, rank, size = PrefixStore(f"baguakit/{name}", store), like.rank(), like.size()
    backend: Any
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        backend, kind = dist.ProcessGroupNCCL(store, rank, size, options), dist.ProcessGroup.BackendType.NCCL
    else:
        backend, kind = dist.ProcessGroupGloo(store, rank, size, timeout), dist.ProcessGroup.BackendType.GLOO
    backend._set_sequence_number_for_group()
    group = dist.ProcessGroup(store, rank, size)
    group._set_default_backend(kind)
    group._register_backend(torch.device(device.type), kind, backend)
    return group


def check_mesh(mesh: DeviceMesh, group: Any) -> None:
    """Raise unless the mesh has the two dimensions, and the ranks of the group if there is one."""
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
