"""A `repr` at a prompt tells what a thing is and where it stands."""

import torch
from pool import ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import baguakit as bk


def test_a_bucket_tells_its_size_dtype_and_device():
    params = [torch.zeros(3, 4, dtype=torch.bfloat16), torch.zeros(1200, dtype=torch.bfloat16)]
    assert repr(bk.Bucket(params)) == "<Bucket of 2 parameters: 1,212 values, bfloat16 on cpu>"
    assert repr(bk.Bucket(params[:1])) == "<Bucket of 1 parameter: 12 values, bfloat16 on cpu>"
    padded = "<Bucket of 2 parameters: 1,216 values, 4 of them padding, bfloat16 on cpu>"
    assert repr(bk.Bucket(params, multiple_of=64)) == padded


def told():
    """Return the `repr` of comms, of an attachment before and after it is detached, and of a handle."""
    comm, model = bk.Comm(), torch.nn.Linear(4, 3)
    nodes = bk.Comm(mesh=init_device_mesh("cpu", (1, 2), mesh_dim_names=("inter", "intra")))
    comms = [repr(each) for each in (comm, comm.at(3, 4), bk.Comm(flows=2), nodes, nodes.intra, nodes.inter)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with bk.attach(model, optimizer, bk.algorithms.gradient_tracking()) as att:
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        attached = repr(att)
    with bk.interop.ddp(DistributedDataParallel(model), bk.stages.Mean()) as handle:
        handled = repr(handle)
    return comms, attached, repr(att), handled, repr(handle)


def test_comms_attachments_and_handles_tell_their_rank_and_how_far_they_have_come():
    for rank, (comms, *others) in enumerate(ranks(2, told)):
        assert comms == [
            f"<Comm: rank {rank} of 2, gloo>",
            f"<Comm: rank {rank} of 2, gloo, round 3, step 4>",
            f"<Comm: rank {rank} of 2, gloo, 2 flows>",
            f"<Comm: rank {rank} of 2, gloo, 1 node of 2>",
            f"<Comm: rank {rank} of 2 within the node, gloo>",
            "<Comm: rank 0 of 1 between nodes, gloo>",
        ]
        rules = "during_backward(TrackedGradient(OnePeerExact())), between_steps(NeighborMean(OnePeerExact()))"
        assert others == [
            f"<Attachment: {rules}, step 1, buckets: 1 + 1, rank {rank} of 2>",
            f"<Attachment: {rules}, step 1, buckets: 1 + 1, rank {rank} of 2, detached>",
            f"<Handle: during_backward(Mean()), step 0, buckets: 0, rank {rank} of 2>",
            f"<Handle: during_backward(Mean()), step 0, buckets: 0, rank {rank} of 2, detached>",
        ]
