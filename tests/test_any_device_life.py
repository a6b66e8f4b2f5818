"""Checkpoints, nodes, flows, DDP, kills and stalls with tensors of the late device are as with those of the CPU."""

import io
import os
import signal
import time
import warnings
from functools import partial

import late_device
import pool
import pytest
import torch
import torch.distributed as dist
from everything import made
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._pytree import tree_map_only
from training import batch, flat, net, sgd

import baguakit as bk
from baguakit.comm import own

pytestmark = [
    pytest.mark.skipif(not late_device.supported(), reason="this torch has no devices in Python"),
    pytest.mark.slow,
]
ranks = partial(pool.ranks, late=True)
FEEDBACK = "bytegrad(MinMaxUInt8(block=64), error_feedback=True)"
KEPT = (
    FEEDBACK,
    "decentralized()",
    "low_precision_decentralized()",
    "diloco(every=4, fragments=3, delay=1)",
    "power_sgd(rank=2)",
    "gradient_allreduce(delay=1)",
    "qadam(3, compressor=MinMaxUInt8(block=64))",
)
TIMEOUT = 4.0


def run_steps(call, optimizer, device, steps, before=lambda step: None):
    for step in steps:
        before(step)
        x, y = (t.to(device) for t in batch(dist.get_rank(), step))
        optimizer.zero_grad()
        (call(x) - y).square().mean().backward()
        optimizer.step()


def on_host(values):
    return tree_map_only(torch.Tensor, lambda x: x.cpu(), values)


def halfway(device, entry):
    """Train three steps; return a checkpoint."""
    model = net().to(device)
    optimizer, file = sgd(model.parameters()), io.BytesIO()
    with bk.attach(model, optimizer, made(entry)) as att:
        run_steps(model, optimizer, device, range(3))
        torch.save(on_host([dict(model.state_dict()), optimizer.state_dict(), att.state_dict()]), file)
    return file.getvalue()


def resumed(device, entry, checkpoint):
    """Train three more steps; return the weights."""
    model = net().to(device)
    optimizer = sgd(model.parameters())
    with bk.attach(model, optimizer, made(entry)) as att:
        for part, state in zip((model, optimizer, att), torch.load(io.BytesIO(checkpoint)), strict=True):
            part.load_state_dict(state)
        run_steps(model, optimizer, device, range(3, 6))
    return flat(model).cpu()


def ways_on(entry):
    checkpoints = [halfway(device, entry) for device in ("cpu", "late")]
    return [resumed(device, entry, each) for device in ("cpu", "late") for each in checkpoints]


@pytest.mark.parametrize("entry", KEPT)
def test_a_checkpoint_goes_on_on_either_device(entry):
    for first, *others in ranks(2, ways_on, entry):
        assert all(torch.equal(first, other) for other in others)


def accumulated(device, entry, comm):
    """Train with two backwards a step; return the weights, their distance, and the distance after a merge."""
    model = net().to(device)
    optimizer = sgd(model.parameters())
    with bk.attach(model, optimizer, made(entry), comm=comm()) as att:

        def first_half(step):
            optimizer.zero_grad(set_to_none=False)
            with att.no_sync():
                model(batch(dist.get_rank(), step + 100)[0].to(device)).square().mean().backward()

        run_steps(model, optimizer, device, range(4), first_half)
        apart = att.consensus_distance()
        att.merge()
        return flat(model).cpu(), apart, att.consensus_distance()


def both(entry, comm, streams):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(own, "SMALLEST", 16)  # bytes, from which a message is divided into flows
        with late_device.flavour(streams):
            there = accumulated("late", entry, comm)
        return there, accumulated("cpu", entry, comm)


def in_nodes():
    return bk.Comm(mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("inter", "intra")))


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize(
    "size, entry, comm",
    [
        *((4, f"hierarchical({entry})", in_nodes) for entry in (FEEDBACK, "decentralized()")),
        *((2, entry, partial(bk.Comm, flows=2)) for entry in (FEEDBACK, "decentralized()", "power_sgd(rank=2)")),
    ],
)
def test_accumulation_over_nodes_and_flows_and_merges(size, entry, comm, streams):
    for there, here in ranks(size, both, entry, comm, streams):
        assert torch.equal(there[0], here[0]) and there[1:] == here[1:]


def in_ddp(stage, device, group):
    """Train in DDP with a stage in its hook; return the weights."""
    module = net().to(device)
    ddp = nn.parallel.DistributedDataParallel(module, init_sync=False, process_group=group, bucket_cap_mb=2e-4)
    optimizer, handle = sgd(module.parameters()), bk.interop.ddp(ddp, made(stage))
    run_steps(ddp, optimizer, device, range(5))
    handle.detach()
    return flat(module).cpu()


def in_ddp_on_both(stage):
    from torch._C._distributed_c10d import FakeProcessGroup

    warnings.simplefilter("ignore")
    # DDP itself sends the sizes of its buckets on the device, for which gloo has nothing; all ranks have the same.
    group, make = dist.new_group(backend="gloo"), getattr(FakeProcessGroup, "_create_internal", FakeProcessGroup)
    fake = make(dist.get_rank(), dist.get_world_size())
    group._register_backend(torch.device(late_device.NAME), dist.ProcessGroup.BackendType.CUSTOM, fake)
    found = []
    for streams in (True, False):
        with late_device.flavour(streams):
            found.append(in_ddp(stage, "late", group))
    return [torch.equal(each, in_ddp(stage, "cpu", group)) for each in found]


@pytest.mark.parametrize("stage", ["Mean()", "ErrorFeedback(CompressedMean(MinMaxUInt8(block=64)))"])
def test_stages_in_ddp(stage):
    assert ranks(2, in_ddp_on_both, stage) == [[True, True]] * 2


def killed():
    os.kill(os.getpid(), signal.SIGKILL)


def struck(entry, mishap):
    """Train; rank 1 meets a mishap at step 3. Return the error that was raised."""
    late_device.install()
    model = net().to("late")
    optimizer = sgd(model.parameters())
    try:
        with bk.attach(model, optimizer, made(entry), timeout=TIMEOUT):
            run_steps(
                model, optimizer, "late", range(6), lambda step: mishap() if (step, dist.get_rank()) == (3, 1) else None
            )
    except bk.PeerError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    "mishap, sentence",
    [
        (killed, "rank 1 is dead: no sign of it for"),
        (partial(time.sleep, TIMEOUT / 2), ""),
        (partial(time.sleep, 3 * TIMEOUT), "rank 1 is late: it has not launched"),
    ],
    ids=["killed", "stalled", "late"],
)
def test_mishaps_end_as_on_cpus(mishap, sentence):
    with pool.Pool(3) as three:
        said = three.run(struck, FEEDBACK, mishap, lost=(1,) if mishap is killed else ())
    for each in (said[0], said[2]):
        assert each.startswith(sentence) and bool(each) == bool(sentence), each
