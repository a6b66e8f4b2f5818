"""hivemind's averager as a contender: weights are averaged after every few steps, by a group that it finds anew.

It speaks over its own daemons and not over `torch.distributed`; the interface counts what they send. It waits half a
second for peers to join a group, as it must be told to wait for something; a barrier lets them come at once, since with
one that computes slowly, or with eight on two cores, half a second is not always enough.
"""

import contextlib
import fcntl
import os
import socket
import struct
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

INSTALLED = find_spec("hivemind") is not None
GATHERING = 0.5  # seconds
PATIENCE = 600.0  # seconds
SIOCGIFADDR = 0x8915


@contextlib.contextmanager
def averaging(model: nn.Module, optimizer: torch.optim.Optimizer, every: int) -> Iterator[None]:
    """After every so many steps of the optimizer, the ranks' weights are their mean. Collective.

    Raises:
        RuntimeError: a step in which not all ranks were averaged.
    """
    import hivemind

    where = [f"/ip4/{address_of(os.environ['GLOO_SOCKET_IFNAME'])}/tcp/0"]
    peers: list[Any] = [None]
    if dist.get_rank() == 0:
        dht = hivemind.DHT(start=True, host_maddrs=where)
        peers = [[str(address) for address in dht.get_visible_maddrs()]]
    dist.broadcast_object_list(peers, 0)
    if dist.get_rank() > 0:
        dht = hivemind.DHT(start=True, initial_peers=peers[0], host_maddrs=where)
    params = [p.data for p in model.parameters() if p.requires_grad]
    averager = hivemind.averaging.DecentralizedAverager(
        [p.clone() for p in params],
        dht,
        prefix="baguakit",
        start=True,
        target_group_size=dist.get_world_size(),
        initial_group_bits="",
        min_matchmaking_time=GATHERING,
        request_timeout=0.8 * GATHERING,
        allow_state_sharing=False,
    )
    steps = 0

    def average(*_: object) -> None:
        nonlocal steps
        steps += 1
        if steps % every:
            return
        with averager.get_tensors() as held:
            torch._foreach_copy_(held, params)
        dist.barrier()
        met = averager.step(timeout=PATIENCE)
        if met is None or len(met) < dist.get_world_size():
            raise RuntimeError(f"hivemind averaged {len(met or ())} of {dist.get_world_size()} ranks at step {steps}")
        with averager.get_tensors() as held:
            torch._foreach_copy_(params, held)

    handle = optimizer.register_step_post_hook(average)
    try:
        yield
        dist.barrier()
    finally:
        handle.remove()
        averager.shutdown()
        dht.shutdown()


def address_of(interface: str) -> str:
    """The IPv4 address of a network interface."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        found = fcntl.ioctl(s.fileno(), SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
    return socket.inet_ntoa(found[20:24])
