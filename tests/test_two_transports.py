"""`Comm(mesh=…, between="gloo")`: NCCL within nodes, gloo between them. Which groups are made is seen without a GPU."""

import pytest
from pool import ranks

import baguakit as bk


def run(case):
    import torch
    from torch.distributed.device_mesh import init_device_mesh

    from baguakit.comm import groups, sending

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("inter", "intra"))
    if case == "refused":
        with pytest.raises(ValueError, match="needs mesh"):
            bk.Comm(between="gloo")
        with pytest.raises(ValueError, match="mpi"):
            bk.Comm(mesh=mesh, between="mpi")
        return
    plain = bk.Comm(mesh=mesh)
    if case == "gloo alone":
        comm = bk.Comm(mesh=mesh, between="gloo")
        assert comm.groups() == plain.groups()
        assert repr(comm).endswith("gloo, 2 nodes of 2, gloo between nodes>")
        return
    flows = 2 if case == "both, and flows" else 1
    cuda, ours, known = torch.device("cuda"), plain.groups(), sending.backend_of

    def backend_of(group, kind):
        return "nccl" if kind == "cuda" and any(group is each for each in ours) else known(group, kind)

    with pytest.MonkeyPatch.context() as patch:  # torch's groups have NCCL, as far as anything asks
        for module in (groups, sending):
            patch.setattr(module, "backend_of", backend_of)
        patch.setattr(sending, "_staged", type(sending._staged)())
        patch.setattr(groups, "kinds_of", lambda group: {"cpu", "cuda"})
        comm = bk.Comm(mesh=mesh, between="gloo", flows=flows)
        assert comm.intra.group is plain.intra.group and comm.inter.group is not plain.inter.group
        assert [part._by_nccl(cuda) for part in (comm, comm.intra, comm.inter)] == [False, True, False]
        assert comm._by_host(cuda)
    if flows > 1:  # only between nodes, the first over the new group
        assert list(comm._flows) == ["inter"] and comm._flows["inter"].groups[0] is comm.inter.group
        assert not {id(group) for group in comm._flows["inter"].groups} & {id(group) for group in plain.groups()}
    x = torch.full((1 << 16,), float(comm.rank))  # 256 KiB, which are divided
    assert comm.all_reduce(x.clone()).unique().tolist() == [6.0]
    assert comm.inter.all_reduce(x).unique().tolist() == [2.0 * comm.intra.rank + 2]
    assert comm.at(3).groups() == comm.groups()


@pytest.mark.parametrize("case", ["refused", "gloo alone", "both", "both, and flows"])
def test_messages_between_nodes_go_by_gloo(case):
    ranks(4, run, case)
