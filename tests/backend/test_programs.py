"""Programs of torch over the backend: exact, they train as over gloo, bit for bit; compressed, they train."""

import pytest
import torch
import torch.distributed as dist
from bagua import flown, group
from pool import Pool, ranks
from sharding import full, sharded
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from training import flat, net, net_and_sgd, run_steps

import baguakit as bk

EXACT = bk.backend.Policy(None, least=0, flows=2)
UINT8 = bk.backend.Policy(least=0)
STEPS = 5


def trained(model):
    """Train on this rank's data."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    run_steps(model, optimizer, range(STEPS))


def same_or_near(policy, ours, theirs):
    """Check the weights of two runs: equal if the policy is exact, else near."""
    if policy.compressor is None:
        assert torch.equal(ours, theirs)
    else:
        assert 0 < (ours - theirs).abs().max() < 0.05


@pytest.mark.parametrize("policy", [EXACT, UINT8], ids=["exact", "8 bits"])
def test_data_parallel(policy):
    def run(policy):
        def train(g):
            model = net()
            trained(torch.nn.parallel.DistributedDataParallel(model, process_group=g))
            return flat(model)

        with group(policy) as g:
            ours, flew = flown(lambda: train(g))
            same_or_near(policy, ours, train(dist.group.WORLD))
        asked = "exact" if policy.compressor is None else repr(policy.compressor)
        assert sum(calls for (name, flew_as, _), calls in flew.items() if (name, flew_as) == ("all_reduce", asked)) == 5
        return ours

    first, *others = ranks(3, run, policy)
    assert all(torch.equal(first, other) for other in others)


def meshes():
    """Return meshes of four ranks and of 2 × 2, over groups that stay, since DTensor caches meshes."""
    rank, found = dist.get_rank(), {}
    for backend in ("bagua", "gloo"):
        line = dist.new_group(backend=backend)
        pairs = [dist.new_group([2 * i, 2 * i + 1], backend=backend) for i in range(2)]
        across = [dist.new_group([i, i + 2], backend=backend) for i in range(2)]
        both = [across[rank % 2], pairs[rank // 2]]
        # DTensor's caches take meshes of the same names and ranks for the same.
        grid = {"mesh": [[0, 1], [2, 3]], "mesh_dim_names": (f"inter {backend}", f"intra {backend}")}
        found[backend] = (
            DeviceMesh.from_group(line, "cpu", mesh_dim_names=(backend,)),
            DeviceMesh.from_group(both, "cpu", **grid),
        )
        found[backend, "groups"] = [line, *both]
    return found


@pytest.mark.slow
def test_sharded_and_tensor_parallel():
    def shard(mesh):
        model = sharded(mesh)
        trained(model)
        return full(model)

    def split(mesh):
        torch.manual_seed(0)
        block = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 64))
        parallelize_module(block, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        optimizer = torch.optim.SGD(block.parameters(), lr=0.05)
        for step in range(STEPS):
            x = torch.randn(32, 64, generator=torch.Generator().manual_seed(step))  # the same on all ranks
            optimizer.zero_grad()
            (block(x) - x).square().mean().backward()
            optimizer.step()
        return full(block)

    def run():
        bk.backend.register(EXACT)
        found = meshes()
        told = {}
        for policy in (EXACT, UINT8):
            for g in found["bagua", "groups"]:
                g.policy = policy
            (ours, our_grid), (theirs, their_grid) = found["bagua"], found["gloo"]
            for name, train, mine, other in (
                ("FSDP2", shard, ours, theirs),
                ("FSDP2, 2 × 2", shard, our_grid, their_grid),
                ("tensor parallel", split, ours, theirs),
            ):
                weights, flew = flown(lambda train=train, mine=mine: train(mine))
                same_or_near(policy, weights, train(other))
                told[name, policy.compressor is None] = {operation for operation, *_ in flew}
        return told

    with Pool(4) as pool:
        for told in pool.run(run):
            for exact in (True, False):
                assert told["FSDP2", exact] == {"reduce_scatter", "all_gather"}
                assert told["FSDP2, 2 × 2", exact] == {"reduce_scatter", "all_gather", "all_reduce"}
                assert "all_reduce" in told["tensor parallel", exact]


def test_attach_and_comm_use_the_inner_group():
    def run():
        def train(comm):
            model, optimizer = net_and_sgd()
            with bk.attach(model, optimizer, bk.algorithms.bytegrad(error_feedback=True), comm=comm):
                run_steps(model, optimizer, range(STEPS))
            return flat(model)

        with group(UINT8) as g:

            def work():
                x = torch.rand(5000)
                assert torch.equal(bk.Comm(g).all_reduce(x.clone()), bk.Comm().all_reduce(x.clone()))
                assert torch.equal(train(bk.Comm(g)), train(bk.Comm()))
                ddp = torch.nn.parallel.DistributedDataParallel(net(), process_group=g)
                with bk.interop.ddp(ddp, bk.stages.ErrorFeedback(bk.stages.CompressedMean())):
                    trained(ddp)

            return {operation for operation, *_ in flown(work)[1]}

    assert ranks(2, run) == [{"all_gather", "broadcast"}] * 2  # of DDP: the shapes and values of parameters
