"""Averages with peers that each rank names call by call, and what neighbours hold."""

import pytest
import torch
import torch.distributed as dist
from pool import ranks

import baguakit as bk


def test_weights_of_one_s_own_are_the_rows_of_a_matrix():
    """x_r ← self x_r + Σ_j src_r[j] · dst_j[r] · x_j, for a directed graph in which every entry is its own."""
    n = 4
    draw = torch.Generator().manual_seed(0)
    edges = {(i, j) for i in range(n) for j in range(n) if i != j and (i + 2 * j) % 3}  # i hears j
    src = {(i, j): float(torch.rand((), generator=draw)) for i, j in sorted(edges)}
    dst = {(i, j): float(torch.rand((), generator=draw)) for i, j in sorted(edges)}

    def run(dtype):
        r, comm = dist.get_rank(), bk.Comm()
        x = [torch.arange(6, dtype=dtype).view(2, 3) + r, torch.full((2,), 2.0**r, dtype=dtype)]
        bk.primitives.neighbor_mean_(
            x,
            comm=comm,
            self_weight=0.5 + r,
            src_weights={j: src[r, j] for j in range(n) if (r, j) in edges},
            dst_weights={i: dst[i, r] for i in range(n) if (i, r) in edges},
            check=r >= 0,
        )
        return x

    w = torch.zeros(n, n, dtype=torch.float64)
    for i, j in edges:
        w[i, j] = src[i, j] * dst[i, j]
    w += torch.diag(torch.arange(n) + 0.5)
    first = torch.stack([torch.arange(6, dtype=torch.float64) + r for r in range(n)])
    second = torch.stack([torch.full((2,), 2.0**r, dtype=torch.float64) for r in range(n)])
    for r, (a, b) in enumerate(ranks(n, run, torch.float64)):
        torch.testing.assert_close(a.flatten(), (w @ first)[r], rtol=1e-14, atol=1e-14)
        torch.testing.assert_close(b, (w @ second)[r], rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("check", [False, True])
def test_the_weights_of_a_topology_given_by_hand_are_the_topology(check):
    def run():
        comm, x = bk.Comm(), torch.randn(1000, generator=torch.Generator().manual_seed(dist.get_rank()))
        same = []
        for topology in (bk.topology.Ring(), bk.topology.Star(), bk.topology.OnePeerExponential()):
            for round in range(3):
                row = topology.weights(comm.rank, comm.size, round)
                others = {peer: w for peer, w in row.items() if peer != comm.rank}
                targets = topology.targets(comm.rank, comm.size, round)
                by_topology = bk.primitives.neighbor_mean_(x.clone(), topology, comm.at(round))
                by_hand = bk.primitives.neighbor_mean_(
                    x.clone(),
                    comm=comm,
                    self_weight=row[comm.rank],
                    src_weights=others,
                    dst_weights=targets if not check else None,
                    check=check,
                )
                rest = bk.primitives.neighbor_mean_(x.clone(), comm=comm, src_weights=others)
                same += [torch.equal(by_topology, by_hand), torch.allclose(rest, by_hand)]
        return same

    assert all(all(same) for same in ranks(4, run))


def test_ranks_that_disagree_are_named_on_every_rank():
    cases = [
        ({0: {1}, 1: {0}, 2: set()}, {0: {1}, 1: set(), 2: set()}, "rank 0 hears rank 1, which does not send to it"),
        ({0: set(), 1: {0}, 2: set()}, {0: {1, 2}, 1: set(), 2: set()}, "rank 0 sends to rank 2, which does not hear"),
    ]

    def run(hears, sends, words):
        r, x = dist.get_rank(), torch.ones(3)
        with pytest.raises(ValueError, match=words):
            bk.primitives.neighbor_mean_(
                x, comm=bk.Comm(), src_weights=dict.fromkeys(hears[r], 0.5), dst_weights=sends[r]
            )
        graph = bk.topology.Chosen()
        graph.choose(src_weights=dict.fromkeys(hears[r], 0.5), dst_weights=sends[r])
        with pytest.raises(ValueError, match=words):
            bk.primitives.neighbor_gather(x, graph, bk.Comm())
        return torch.equal(x, torch.ones(3))

    for hears, sends, words in cases:
        assert ranks(3, run, hears, sends, words) == [True] * 3


@pytest.mark.parametrize("peer", [-1, 3, 7, "1", True])
def test_a_peer_that_cannot_be_is_an_error_on_every_rank(peer):
    def run():
        sources = {peer: 0.5} if dist.get_rank() == 1 else {}
        if peer is True and dist.get_rank() == 1:
            words = "not True"
        else:
            words = f"not {peer!r}" if dist.get_rank() == 1 else "rank 1 named peers that cannot be"
        with pytest.raises(ValueError, match=words):
            bk.primitives.neighbor_mean_(torch.ones(3), comm=bk.Comm(), src_weights=sources, dst_weights=[])

    ranks(3, run)


def test_one_way_of_saying_it_at_a_time():
    def run():
        comm, ring, x = bk.Comm(), bk.topology.Ring(), torch.ones(2)
        with pytest.raises(TypeError, match="leave out either it or self_weight"):
            bk.primitives.neighbor_mean_(x, ring, comm, self_weight=0.5)
        with pytest.raises(TypeError, match="takes a topology or src_weights"):
            bk.primitives.neighbor_mean_(x, comm=comm)
        with pytest.raises(TypeError, match="told its group"):
            bk.primitives.neighbor_mean_(x, ring)
        with pytest.raises(ValueError, match=r"name those it sends to \(dst_weights=\)"):
            bk.primitives.neighbor_mean_(x, comm=comm, src_weights={}, check=False)

    ranks(3, run)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_what_neighbors_hold(dtype):
    def run():
        r, comm = dist.get_rank(), bk.Comm()
        x = torch.full((2, 3), r % 2 if dtype is torch.bool else r, dtype=dtype)
        ring = bk.primitives.neighbor_gather(x.t(), bk.topology.Ring(), comm)
        rounds = [
            list(bk.primitives.neighbor_gather(x, bk.topology.OnePeerExponential(), comm.at(t))) for t in range(2)
        ]
        graph = bk.topology.Chosen()
        graph.choose(src_weights=dict.fromkeys([(r + 2) % 4, (r + 1) % 4], 0.5))
        named = bk.primitives.neighbor_gather(x, graph, comm)
        shapes = {tuple(theirs.shape) for theirs in ring.values()}
        values = {peer: theirs.unique().tolist() for peer, theirs in {**ring, **named}.items()}
        return list(ring), rounds, list(named), shapes, values

    for r, (ring, rounds, named, shapes, values) in enumerate(ranks(4, run)):
        assert ring == sorted({(r - 1) % 4, (r + 1) % 4}) and shapes == {(3, 2)}
        assert rounds == [[(r - 1) % 4], [(r - 2) % 4]] and named == sorted({(r + 1) % 4, (r + 2) % 4})
        assert all(values[p] == [bool(p % 2) if dtype is torch.bool else p] for p in values)


def test_one_rank_hears_nobody():
    def run():
        comm, x = bk.Comm(), torch.arange(3.0)
        assert bk.primitives.neighbor_gather(x, bk.topology.Ring(), comm) == {}
        return bk.primitives.neighbor_mean_(x, comm=comm, src_weights={}).tolist()

    assert ranks(1, run) == [[0.0, 1.0, 2.0]]
