"""When the monitor has given up, gradients in the hooks of other trainers land with NaN, as those of attachments do."""

import pytest
from pool import ranks
from sharding import line, sharded
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from training import loss, net

import baguakit as bk
from baguakit.buckets import local
from baguakit.monitor.monitor import Fault


def wrapped(kind):
    """The toy net in a trainer, and the handle of a stage in its hooks."""
    if kind == "ddp":
        model = nn.parallel.DistributedDataParallel(net())
        return model, bk.interop.ddp(model, bk.stages.Mean())
    if kind == "within":
        model = sharded(line())
        return model, bk.interop.fsdp(model, bk.stages.Mean())
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("inter", "intra"))
    model = sharded(mesh["intra"])
    return model, bk.interop.fsdp(model, bk.stages.Mean(), bk.Comm(mesh.get_group("inter")))


@pytest.mark.parametrize("kind", ["ddp", "across", "within"])
def test_gradients_are_nan_after_a_flight_that_an_abort_has_ended(kind):
    """As on a GPU: the fault is set, and the host has passed what would raise."""

    def run():
        model, handle = wrapped(kind)
        found, handle._life.channel.monitor.fault = [], Fault()
        with handle:
            for given_up in (False, True):
                if given_up:
                    handle._life.channel.monitor.fault.set()
                model.zero_grad()
                loss(model, 0, 0).backward()
                grads = [local(p.grad) for p in model.parameters()]
                found.append({grad.isnan().all().item() for grad in grads if grad.numel()})
        return found

    assert ranks(2, run) == [[{False}, {True}]] * 2
