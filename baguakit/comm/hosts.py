"""The hosts that ranks run on, and the groups of nodes that follow from them."""

import contextlib
import os
import socket
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.constants import default_pg_timeout
from torch.distributed.distributed_c10d import PrefixStore

from .groups import INTER, INTRA, check_device, connected, group_over, members_of

HOSTS = "hosts"
"""In place of a mesh: nodes are the hosts that the ranks run on."""


def host() -> str:
    """Return a name of this host, other than those of all other hosts: of its kernel and its network namespace.

    Containers with a network of their own count as hosts of their own.
    """
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}/{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:  # not Linux
        return f"{socket.gethostname()}/{uuid.getnode()}"


def ranks_by_host(hosts: Sequence[str]) -> list[list[int]]:
    """Return the ranks of each host, in order, from the host of every rank."""
    found: dict[str, list[int]] = {}
    for rank, each in enumerate(hosts):
        found.setdefault(each, []).append(rank)
    return list(found.values())


def node_groups(comm: Any) -> tuple[Any, Any]:
    """Return the intra and inter groups of this rank, of the hosts that the ranks of a Comm run on. Collective.

    Raises:
        ValueError: hosts have different numbers of ranks.
    """
    nodes = ranks_by_host(comm.gather_objects(host()))
    odd = next((ranks for ranks in nodes if len(ranks) != len(nodes[0])), None)
    if odd is not None:
        raise ValueError(
            f'mesh="{HOSTS}" needs the same number of ranks on every host: that of rank 0 has {len(nodes[0])}, and '
            f"that of rank {odd[0]} has {len(odd)}; give each as many, or pass a DeviceMesh"
        )
    name = comm.broadcast_object(uuid.uuid4().hex)
    node = next(i for i, ranks in enumerate(nodes) if comm.rank in ranks)
    place = nodes[node].index(comm.rank)
    across = [ranks[place] for ranks in nodes]
    return _group(comm, f"{name}/{INTRA}{node}", nodes[node]), _group(comm, f"{name}/{INTER}{place}", across)


def _group(comm: Any, name: str, ranks: Sequence[int]) -> Any:
    """Return a new group of some ranks of a Comm, for tensors on the devices that the Comm is for."""
    store, world = comm.group.get_group_store(), members_of(comm.group)
    part, rank, members = PrefixStore(f"baguakit/{name}", store), ranks.index(comm.rank), [world[r] for r in ranks]
    backends = {}
    for kind in ("cpu", "cuda"):
        with contextlib.suppress(ValueError):  # that group does not send these tensors
            check_device(comm.group, torch.device(kind))
            own = PrefixStore(kind, part)
            backends[kind] = connected(kind, own, rank, members, f"baguakit/{name}", default_pg_timeout)
    return group_over(store, part, rank, len(ranks), backends)
