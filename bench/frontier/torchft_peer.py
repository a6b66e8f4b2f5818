"""torchft's DiLoCo as a contender, where it is installed.

Each rank is a replica group of its own. They meet at a lighthouse that rank 0 serves, and exchange over torchft's gloo,
on the interface that GLOO_SOCKET_IFNAME names.
"""

import contextlib
import os
from collections.abc import Iterator
from datetime import timedelta
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from bench.network.hivemind_peer import address_of

INSTALLED = find_spec("torchft") is not None
PATIENCE = timedelta(seconds=600)


@contextlib.contextmanager
def diloco(model: nn.Module, optimizer: torch.optim.Optimizer, every: int) -> Iterator[None]:
    """Take an outer step of SGD(lr=0.7, momentum=0.9, nesterov=True) after every so many steps. Collective."""
    from torchft import Manager, ProcessGroupGloo
    from torchft.coordination import LighthouseServer
    from torchft.local_sgd import DiLoCo

    rank, ranks = dist.get_rank(), dist.get_world_size()
    host = address_of(os.environ.get("GLOO_SOCKET_IFNAME", "lo"))
    lighthouse = LighthouseServer(f"{host}:0", ranks, join_timeout_ms=60_000) if rank == 0 else None
    # It names itself by the machine's host name, which other hosts of a laboratory cannot resolve.
    address: list[Any] = [f"http://{host}:{lighthouse.address().rpartition(':')[2]}" if lighthouse else None]
    dist.broadcast_object_list(address, 0)
    store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        ProcessGroupGloo(timeout=PATIENCE),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=ranks,
        use_async_quorum=False,
        timeout=PATIENCE,
        quorum_timeout=PATIENCE,
        rank=0,
        world_size=1,
        store_addr=host,
        store_port=store.port,
        lighthouse_addr=address[0],
        replica_id=f"rank{rank}",
        hostname=host,
        init_sync=False,
    )
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    try:
        with DiLoCo(manager, [model], optimizer, outer, sync_every=every, backup_device=None):
            yield
            dist.barrier()
    finally:
        manager.shutdown(wait=False)
        if lighthouse is not None:
            lighthouse.shutdown()
