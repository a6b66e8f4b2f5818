"""Means of whole tensors, of neighbours, and of the largest values, against their equations."""

import pytest
import torch
import torch.distributed as dist
from drawn import FLOATS, draw
from pool import ranks

import baguakit as bk


def test_mean_takes_any_tensor_and_lists():
    def run():
        r, comm = float(dist.get_rank()), bk.Comm()
        transposed = torch.full((3, 2), r).T
        mixed = [torch.full((2, 2), r), torch.full((3,), r, dtype=torch.float64), torch.tensor(r), torch.empty(0)]
        for x in (transposed, mixed, [], torch.empty(0)):
            assert bk.primitives.mean_(x, comm) is x
        for bad in (torch.ones(2, dtype=torch.int64), [torch.ones(2), 3.0], torch.ones(2).to_sparse()):
            with pytest.raises(TypeError):
                bk.primitives.mean_(bad, comm)
        return all(bool((x == 1).all()) for x in [transposed, *mixed])

    assert ranks(3, run) == [True] * 3


@pytest.mark.parametrize("dtype", FLOATS)
def test_neighbors_are_summed_in_fp32(dtype):
    def run():
        comm = bk.Comm()
        x = draw(dist.get_rank(), 500, dtype)
        rows = comm.gather_objects(x.clone())
        r, wide = dist.get_rank(), torch.float64 if dtype == torch.float64 else torch.float32
        expected = rows[r].to(wide) * (1 / 3)
        for peer in sorted({(r - 1) % 4, (r + 1) % 4}):
            expected = expected + rows[peer].to(wide) * (1 / 3)
        bk.primitives.neighbor_mean_(x, bk.topology.Ring(), comm)
        error = (x.double() - expected.to(dtype).double()).abs().max()
        return float(error), float(torch.finfo(dtype).eps) * 4

    for error, allowed in ranks(4, run):
        assert error <= allowed


def test_a_periodic_topology_wants_a_round():
    def run():
        with pytest.raises(ValueError, match="has no round"):
            bk.primitives.neighbor_mean_(torch.ones(3), bk.topology.OnePeerExponential(), bk.Comm())
        bk.primitives.neighbor_mean_(torch.ones(3), bk.topology.Ring(), bk.Comm())

    ranks(3, run)


@pytest.mark.parametrize("ratio", [0.01, 0.3, 1.0])
@pytest.mark.parametrize("dtype", FLOATS)
def test_sparse_mean_is_the_mean_of_what_is_kept(ratio, dtype):
    """result = (1/n) Σ_r (x_r − residual_r), replicas are bitwise equal, and with ratio 1 nothing is lost."""

    def run():
        comm = bk.Comm()
        x, residual = draw(dist.get_rank(), 700, dtype), torch.full((700,), float("nan"))
        result = bk.primitives.sparse_mean_(x.clone(), bk.compressors.TopK(ratio), comm, residual=residual)
        kept = comm.all_reduce(x.double() - residual.double()) / comm.size
        everyone = comm.gather_objects(result)
        assert all(torch.equal(everyone[0], other) for other in everyone)
        return float((result.double() - kept).abs().max()), int((residual == 0).sum())

    for error, sent in ranks(3, run):
        assert error <= 2 * torch.finfo(dtype).eps + 1e-6 and sent >= round(ratio * 700)


def test_top_k_keeps_the_largest_and_what_is_not_finite():
    from baguakit.compressors import TopK

    x = torch.tensor([[1.0, -5.0, float("nan"), 0.5, 4.0, -0.1], [0.0, 0.0, 0.0, 0.0, 0.0, 3.0]])
    topk, residual = TopK(0.5), torch.empty(2, 6)
    packed = topk.compress(x, residual)
    assert packed.shape == (2, topk.row_bytes(6)) == (2, 28)
    out = topk.decompress(packed, 6)
    assert out[0].nan_to_num(9).tolist() == [0.0, -5.0, 9.0, 0.0, 4.0, 0.0] and out[1, 5] == 3.0
    assert residual[0].nan_to_num(9).tolist()[:2] == [1.0, 0.0] and residual[0, 3:4].tolist() == [0.5]
    with pytest.raises(TypeError, match="SparseMean"):
        topk.reduce(packed, 6)
    for n in (0, 1, 7):
        assert topk.decompress(topk.compress(torch.randn(3, n)), n).shape == (3, n)
