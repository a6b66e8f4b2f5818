"""A stage that remembers tensors of its own only, and declares nothing, remembers them as any other."""

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from hooking import SMALL
from pool import ranks
from torch import nn
from training import loss, net, net_and_sgd, sgd

import baguakit as bk


def scaled():
    @dataclass(frozen=True, repr=False)
    class Scaled(bk.stages.Stage):
        """Divide by a running norm, then average."""

        def init(self, bucket, comm):
            return {"norm": {"now": torch.ones(1)}}

        def __call__(self, x, state, comm):
            now = state["norm"]["now"]
            now.mul_(0.9).add_(x.norm(), alpha=0.1)
            return bk.primitives.mean_(x / now, comm)

    return Scaled()


def norms(how):
    """The norms after each of some backward passes, the fourth of which overflows in one bucket of rank 1."""
    model = net()
    optimizer = sgd(model.parameters())
    if how == "attach":
        handle, wrapped = bk.attach(model, optimizer, bk.during_backward(scaled()), bucket_bytes=200), model
    elif how == "ddp":
        wrapped = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=SMALL)
        handle = bk.interop.ddp(wrapped, scaled())
    else:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("inter", "intra"))
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh["intra"])
        handle, wrapped = bk.interop.fsdp(model, scaled(), comm=bk.Comm(mesh.get_group("inter"))), model
    found = []
    with handle:
        for step in range(6):
            optimizer.zero_grad()
            last = list(model.parameters())[-1]
            bad = torch.inf if step == 3 and dist.get_rank() == 1 else 1.0
            hook = last.register_hook(lambda grad, bad=bad: grad * bad)  # of FSDP's parameters torch calls none
            (loss(wrapped, dist.get_rank(), step) * (bad if how == "fsdp" else 1)).backward()
            hook.remove()
            if step != 3:
                optimizer.step()
            (rule,) = handle.state_dict()["rules"].values()
            found.append(torch.cat(list(rule["own"].values())))
        again = handle.state_dict()
        handle.load_state_dict(again)
        (rule,) = handle.state_dict()["rules"].values()
        found.append(torch.cat(list(rule["own"].values())))
    return found


@pytest.mark.parametrize("how", ["attach", "ddp", "fsdp"])
def test_what_is_not_finite_is_never_kept(how):
    for found in ranks(2, norms, how):
        assert all(torch.isfinite(each).all() for each in found) and len(found[3]) > 1
        assert torch.equal(found[2], found[3])  # by no bucket of that backward
        assert not torch.equal(found[3], found[4]) and torch.equal(found[5], found[6])


def test_no_free_running_rule_takes_it():
    def run():
        model, optimizer = net_and_sgd()
        stage = scaled()
        object.__setattr__(stage, "same_on_all_ranks", True)
        with pytest.raises(ValueError, match="remembers something; a free-running rule takes a stage without state"):
            bk.attach(model, optimizer, bk.free_running(stage))

    ranks(2, run)
