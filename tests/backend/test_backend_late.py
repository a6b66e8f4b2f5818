"""The backend sends tensors of a device for which gloo has nothing: they have the values that they have on CPUs."""

from functools import partial

import late_device
import pool
import pytest
import torch
import torch.distributed as dist
from bagua import group
from everything import made
from torch import nn
from training import batch, flat, net

import baguakit as bk
from baguakit.comm import sending

pytestmark = [
    pytest.mark.skipif(not late_device.supported(), reason="this torch has no devices in Python"),
    pytest.mark.slow,
]
ranks = partial(pool.ranks, late=True)
POLICIES = [bk.backend.Policy(None), bk.backend.Policy(least=0)]
N = 512


def collectives(g, device):
    """Return what all collectives and messages leave on this rank, in the memory of the host."""
    n, rank, found = g.size(), g.rank(), []
    mine = torch.randn(n * N, generator=torch.Generator().manual_seed(rank)).to(device)
    out, row, all_rows = torch.zeros(n * N, device=device), torch.zeros(N, device=device), list(mine.clone().view(n, N))
    for call in (
        lambda: dist.all_reduce(out.copy_(mine), group=g),
        lambda: dist.all_reduce(out, dist.ReduceOp.MAX, group=g),
        lambda: sending.reduce_scatter_single(row, mine, group=g),
        lambda: sending.all_gather_single(out, row, group=g),
        lambda: dist.all_gather(all_rows, row * 2, group=g),
        lambda: dist.all_to_all_single(out, mine, group=g),
        lambda: dist.broadcast(row, 1, group=g),
        lambda: dist.gather(row * rank, all_rows if rank == 0 else None, 0, group=g),
        lambda: dist.scatter(row, all_rows if rank == 0 else None, 0, group=g),
        lambda: dist.send(row, 1, g) if rank == 0 else dist.recv(row, 0, g) if rank == 1 else None,
        lambda: dist.all_reduce(out.view(-1)[3:9], group=g, async_op=True).get_future().wait(),
        lambda: dist.barrier(g),
    ):
        call()
        found.append(torch.cat([out, row, *all_rows]).cpu())
    return found


def on_both(policy):
    same = []
    for streams in (True, False):
        with group(policy) as g, late_device.flavour(streams):
            same += [
                torch.equal(*pair) for pair in zip(*(collectives(g, kind) for kind in ("cpu", "late")), strict=True)
            ]
    return same


@pytest.mark.parametrize("policy", POLICIES, ids=["exact", "8 bits"])
def test_collectives_and_messages(policy):
    for same in ranks(3, on_both, policy):
        assert all(same) and len(same) == 24, same


def in_ddp(g, device, stage):
    """Train in DDP over the backend, with a stage in its hook or without; return the weights."""
    module = net().to(device)
    ddp = nn.parallel.DistributedDataParallel(module, process_group=g, bucket_cap_mb=2e-4)
    handle = None if stage is None else bk.interop.ddp(ddp, made(stage))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, foreach=False)
    for step in range(5):
        x, y = (each.to(device) for each in batch(g.rank(), step))
        optimizer.zero_grad()
        (ddp(x) - y).square().mean().backward()
        optimizer.step()
    if handle is not None:
        handle.detach()
    return flat(module).cpu()


def ddp_on_both(policy, stage):
    found = []
    for streams in (True, False):
        with group(policy) as g, late_device.flavour(streams):
            found.append(torch.equal(in_ddp(g, "cpu", stage), in_ddp(g, "late", stage)))
    return found


@pytest.mark.parametrize("stage", [None, "ErrorFeedback(CompressedMean(MinMaxUInt8(block=64)))"])
@pytest.mark.parametrize("policy", POLICIES, ids=["exact", "8 bits"])
def test_ddp(policy, stage):
    """DDP itself has nothing for this device in a group of gloo alone; here its constructor, too, broadcasts."""
    assert ranks(2, ddp_on_both, policy, stage) == [[True, True]] * 2


def refused():
    late_device.install()
    model = nn.parallel.DistributedDataParallel(net().to("late"), init_sync=False)
    with pytest.raises(ValueError, match=r"no backend for them; use bk\.attach without DDP, or"):
        bk.interop.ddp(model, bk.stages.Mean())


def test_a_hook_is_refused_where_ddp_could_not_send():
    ranks(2, refused)
