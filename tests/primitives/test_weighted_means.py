"""Means with weights of ranks: Σ_r w_r x_r / Σ_r w_r, by every primitive and stage that averages."""

import math

import pytest
import torch
import torch.distributed as dist
from drawn import draw
from pool import ranks

import baguakit as bk
from baguakit import topology

WEIGHTS = [5.0, 0.25, 1.75]


def weighted_mean(values, weights):
    total = math.fsum(weights)
    return sum(x.double().nan_to_num() * (w / total) for x, w in zip(values, weights, strict=True))


@pytest.mark.parametrize("length", [1000, 40_000])  # in one hop, in two
def test_means_are_weighted(length):
    def run():
        rank = dist.get_rank()
        comm = bk.Comm().weighted(WEIGHTS[rank])
        found = {}
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            x = draw(rank, length, dtype)
            lost = torch.empty(length, dtype=torch.float32)
            found[dtype] = {
                "x": x,
                "exact": bk.primitives.mean_(x.clone(), comm),
                "8 bits": bk.primitives.compressed_mean_(x.clone(), bk.compressors.MinMaxUInt8(), comm, residual=lost),
                "residual": lost,
                "all of it": bk.primitives.sparse_mean_(x.clone(), bk.compressors.TopK(1.0), comm),
                "top": bk.primitives.sparse_mean_(x.clone(), bk.compressors.TopK(0.1), comm),
                "share": comm.share,
            }
        return found

    there = ranks(3, run)
    for dtype, precision in ((torch.float64, 1e-15), (torch.float32, 2e-7), (torch.bfloat16, 2e-2)):
        by_rank = [found[dtype] for found in there]
        mean = weighted_mean([each["x"] for each in by_rank], WEIGHTS)
        contributions = torch.stack([each["x"].double() * each["share"] for each in by_rank])
        assert sum(each["share"] for each in by_rank) == pytest.approx(3)
        for each in by_rank:
            torch.testing.assert_close(each["exact"].double(), mean, rtol=0, atol=8 * precision)
            whole = each["all of it"].double()
            torch.testing.assert_close(whole, mean, rtol=0, atol=8 * max(precision, 2e-7))
            steps = (contributions.amax(1) - contributions.amin(1)).mean() + (mean.max() - mean.min())
            assert (each["8 bits"].double() - mean).abs().max() <= steps / 510 * 1.001 + 8 * max(precision, 2e-7)
            assert torch.equal(each["8 bits"], by_rank[0]["8 bits"]) and torch.equal(each["top"], by_rank[0]["top"])
        if dtype != torch.bfloat16:  # whose result is rounded once more
            lost = sum(each["residual"].double() for each in by_rank)
            result = by_rank[0]["8 bits"].double()
            torch.testing.assert_close(lost, contributions.sum(0) - 3 * result, rtol=0, atol=1e-5)


def test_stages_are_weighted_and_feed_back_what_they_lose():
    """All that error feedback sends, with other weights in each flight, adds up to the sum of the means."""

    def run():
        rank, flights = dist.get_rank(), 24
        stage = bk.stages.ErrorFeedback(bk.stages.CompressedMean(bk.compressors.UInt4(block=64)))
        plain = bk.Comm()
        x = draw(rank, 2000, torch.float32)
        state = stage.init(bk.Bucket.of(x.clone()), plain)
        sent, expected = torch.zeros(2000, dtype=torch.float64), torch.zeros(2000, dtype=torch.float64)
        for flight in range(flights):
            weights = [WEIGHTS[(rank + flight) % 3] for rank in range(3)]
            x = draw(10 * rank + flight, 2000, torch.float32)
            sent += stage(x.clone(), state, plain.weighted(weights[rank]).at(flight)).double()
            expected += weighted_mean(plain.gather_objects(x), weights)
        left = sum(each.double() for each in plain.gather_objects(state["residual"])) / 3
        matrix = torch.nn.Parameter(draw(rank, 12, torch.float64).view(4, 3))
        bucket = bk.Bucket([matrix])
        low = bk.algorithms.power_sgd(rank=3).rules[0].stage.inner
        memory = low.init(bucket, plain)
        full = low(bucket.load("data").clone(), memory, plain.weighted(WEIGHTS[rank]))
        exact = weighted_mean(plain.gather_objects(matrix.detach().flatten()), WEIGHTS)
        return (sent + left - expected).abs().max(), (full - exact).abs().max()

    for error, low_rank in ranks(3, run):
        assert error < 1e-4 and low_rank < 1e-6


def test_weights_of_0_and_huge_ones_and_equal_ones():
    def run():
        rank, plain, c = dist.get_rank(), bk.Comm(), bk.compressors
        x = draw(rank, 3000, torch.float32)
        bad = torch.full_like(x, [math.nan, math.inf][rank % 2]) if rank else x
        only_first = plain.weighted([2, 0, 0][rank])
        for result in (
            bk.primitives.mean_(bad.clone(), only_first),
            bk.primitives.sparse_mean_(bad.clone(), c.TopK(1.0), only_first),
            bk.primitives.mean_(bad.clone(), plain.weighted([1e308, 0.0, 0][rank])),
        ):
            torch.testing.assert_close(result, draw(0, 3000, torch.float32))
        assert bk.primitives.compressed_mean_(bad.clone(), c.MinMaxUInt8(), only_first).isfinite().all()
        huge = plain.weighted([1e308, 1e308, 1e-300][rank])
        expected = (draw(0, 3000, torch.float32) + draw(1, 3000, torch.float32)) / 2
        torch.testing.assert_close(bk.primitives.mean_(x.clone(), huge), expected)
        for equal in (plain.weighted(0.1), plain.weighted(0), plain.weighted(3), plain.weighted(1e308)):
            assert equal.share == 1
            for average in (lambda x, comm: bk.primitives.compressed_mean_(x, c.UInt4(), comm), bk.primitives.mean_):
                assert torch.equal(average(x.clone(), equal), average(x.clone(), plain))
        said = []
        for odd in (math.nan, math.inf, -1.0, 10**400):
            with pytest.raises(ValueError, match="the weight of rank 1 is a finite number, 0 or more, not") as raised:
                plain.weighted(odd if rank == 1 else 1.0)
            said.append(str(raised.value))
        with pytest.raises(TypeError, match="weight is a number"):
            plain.weighted("2")
        return said

    first, *others = ranks(3, run)
    assert others == [first, first]


GRAPHS = ["Ring()", "Star()", "Grid2D()", "FullyConnected()", "Exponential()", "OnePeerExponential()", "BaseK(1)"]


def test_mixing_matrices_keep_the_weighted_sum():
    """v W = v, rows sum to 1, and ranks hear only those that they hear without weights; row r is the mean of unit r."""
    weights = [3.0, 1.0, 0.5, 2.0]

    def run():
        rank, plain, unit = dist.get_rank(), bk.Comm(), torch.zeros(4, dtype=torch.float64)
        unit[rank] = 1
        found = {}
        for name in GRAPHS:
            graph = eval(name, vars(topology))
            for round in range(graph.period(4)):
                comm = plain.weighted(weights[rank]).at(round)
                found[name, round] = bk.primitives.neighbor_mean_(unit.clone(), graph, comm)
        found["a rank of weight 0"] = bk.primitives.neighbor_mean_(unit, topology.Ring(), plain.weighted(rank % 3))
        comm = plain.weighted(1 + rank)
        for graph in (topology.Chosen(), None):
            with pytest.raises(ValueError, match="each rank chooses the weights of this mean, and comm has others"):
                bk.primitives.neighbor_mean_(unit, graph, comm, src_weights=None if graph else {})
        directed = topology.FromDigraph([(0, 1), (1, 2), (2, 3), (3, 0), (0, 2)])
        with pytest.raises(ValueError, match="it can keep no weighted mean"):
            bk.primitives.neighbor_mean_(unit, directed, comm)
        with pytest.raises(ValueError, match=r"rank 1 has the weight 0, with which no ranks mix over Exponential\(\)"):
            bk.stages.NeighborMean(topology.Exponential()).check(plain.weighted(float(rank != 1)))
        return found

    there = ranks(4, run)
    for key in there[0]:
        w = torch.stack([found[key] for found in there])
        v = torch.tensor([0, 1, 2, 0] if isinstance(key, str) else weights, dtype=torch.float64)
        torch.testing.assert_close(v @ w, v, rtol=0, atol=1e-15)
        torch.testing.assert_close(w.sum(1), torch.ones(4, dtype=torch.float64), rtol=0, atol=1e-15)
        if not isinstance(key, str):
            before = torch.from_numpy(eval(key[0], vars(topology)).matrix(4, key[1]))
            assert bool((w >= 0).all()) and bool(((w > 0) <= (before > 0) | torch.eye(4, dtype=torch.bool)).all())


def test_hierarchical_means_are_weighted_within_and_between_nodes():
    weights = [3.0, 1.0, 0.0, 2.0]

    def run():
        from torch.distributed.device_mesh import init_device_mesh

        s, rank = bk.stages, dist.get_rank()
        comm = bk.Comm(mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("inter", "intra")))
        x = draw(rank, 1001, torch.float64)
        weighted = comm.weighted(weights[rank]).at(0)
        assert (weighted.intra.share, weighted.inter.share) == (
            [1.5, 0.5, 0, 2][rank],
            [8 / 6, 8 / 6, 4 / 6, 4 / 6][rank],
        )
        found = []
        for stage in (
            s.Mean(),
            s.NeighborMean(topology.Ring()),
            s.ErrorFeedback(s.SparseMean(bk.compressors.TopK(1.0))),
        ):
            whole = s.Hierarchical(stage)
            found.append(whole(x.clone(), whole.init(bk.Bucket.of(x.clone()), comm), weighted))
        rows = draw(rank, 1000, torch.float64)
        kept = rows.clone()
        shard = bk.primitives.compressed_reduce_scatter(rows, None, weighted, average=True)
        assert torch.equal(rows, kept)
        found.append(comm.all_gather(shard))
        return x, rows, found

    there = ranks(4, run)
    mean = weighted_mean([x for x, _, _ in there], weights)
    rows = weighted_mean([x for _, x, _ in there], weights)
    for _, _, found in there:
        for each, precision in zip(found[:3], (1e-15, 1e-15, 1e-6), strict=True):
            torch.testing.assert_close(each.double(), mean, rtol=0, atol=8 * precision)
        torch.testing.assert_close(found[3], rows, rtol=0, atol=1e-15 * 8)
