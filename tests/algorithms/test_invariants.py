"""Invariants of every step: sums do not change, ranks may be renamed, nodes of one rank change nothing."""

import pytest
import torch
import torch.distributed as dist
from pool import ranks
from quadratics import curvatures, descend, optima, starts
from torch.distributed.device_mesh import init_device_mesh
from training import train

import baguakit as bk

N = 4


def together(run, *args):
    return torch.stack(ranks(N, run, *args))


def test_gossip_moves_the_mean_by_the_mean_direction():
    """mean(x⁺) = x̄ − α mean(d), for AWC and ATC on any doubly stochastic matrix."""

    def run(order, topology):
        return descend(
            lambda bk: bk.algorithms.decentralized(getattr(bk.topology, topology)(), order=order), steps=1, lr=0.3
        )

    gradients = curvatures(N) * (starts(N) - optima(N))
    expected = starts(N).mean(0) - 0.3 * gradients.mean(0)
    for topology in ("Ring", "Star", "Exponential", "OnePeerExponential"):
        for order in ("awc", "atc"):
            torch.testing.assert_close(together(run, order, topology).mean(0), expected, rtol=0, atol=1e-15)


@pytest.mark.parametrize("order", ["awc", "push_sum"])
def test_tracked_gradients_sum_to_the_gradients(order):
    """Σ_r q_r = Σ_r g_r in every step."""

    def run():
        graph = bk.topology.FromDigraph([(0, 1), (1, 2), (2, 3), (3, 0), (0, 2)])
        topology = graph if order == "push_sum" else bk.topology.OnePeerExact()

        def state(att, model):
            att._life.decisions.settle()
            s = att._life.runners[0].states[0]
            return torch.stack([s["q"], s["g"]])

        return torch.stack(descend(lambda bk: bk.algorithms.gradient_tracking(topology, order), 12, each=state))

    q, g = together(run).unbind(2)
    torch.testing.assert_close(q.sum(0), g.sum(0), rtol=0, atol=1e-13)
    assert (q - g).abs().max() > 0.1


def test_push_sum_keeps_the_sum_and_finds_the_mean():
    """At lr = 0: Σ p = n, Σ p z stays, and z tends to the mean, on graphs that change and are not regular."""
    rounds = [[(0, 1), (1, 2)], [(2, 3), (3, 0)], [(0, 3), (3, 1), (1, 0)]]

    def run():
        graph = bk.topology.FromDigraph(rounds)

        def state(att, model):
            att._life.decisions.settle()
            s = att._life.runners[0].states[0]
            return float(s["p"][att._life.runtime.channels[0].comm.rank]), s["z"].clone(), model.x.detach().clone()

        return descend(lambda bk: bk.algorithms.push_sum(graph), steps=150, lr=0.0, each=state)

    everyone = ranks(N, run)
    for step in range(150):
        p = torch.tensor([said[step][0] for said in everyone], dtype=torch.float64)
        z = torch.stack([said[step][1] for said in everyone])
        x = torch.stack([said[step][2] for said in everyone])
        assert abs(float(p.sum()) - N) < 1e-12 and (p > 0).all()
        torch.testing.assert_close(p @ z, starts(N).sum(0), rtol=0, atol=1e-12)
        assert torch.equal(x, z)
    torch.testing.assert_close(z, starts(N).mean(0).expand(N, -1), rtol=0, atol=1e-9)
    assert (p - 1).abs().max() > 0.1


def test_one_round_shrinks_the_distance_by_the_spectral_gap():
    """‖x − x̄‖ after a round is at most (1 − gap) of what it was."""
    topologies = ["Ring", "Star", "Grid2D", "Exponential", "SymmetricExponential"]

    def run():
        found = []
        for name in topologies:
            topology = getattr(bk.topology, name)()

            def apart(att, model):
                return att.consensus_distance()

            measured = descend(lambda bk, t=topology: bk.algorithms.decentralized(t, "atc"), 3, 0.0, each=apart)
            found.append((measured, topology.spectral_gap(N)))
        return found

    first = float((starts(N) - starts(N).mean(0)).square().sum(1).mean().sqrt())
    for measured, gap in ranks(N, run)[0]:
        for before, after in zip([first, *measured], measured, strict=False):
            assert after <= (1 - gap) * before + 1e-12


def test_ranks_may_be_renamed():
    """W → ΠWΠᵀ with the data renamed by Π gives the same weights, renamed."""
    names = [2, 0, 3, 1]  # rank r plays what rank names[r] plays in the first run

    def run(renamed):
        w = torch.tensor([[0.5, 0.5, 0, 0], [0.25, 0.25, 0.5, 0], [0.25, 0, 0.25, 0.5], [0, 0.25, 0.25, 0.5]])
        if renamed:
            w = w[names][:, names]
        topology = bk.topology.FromMatrix(w)
        played = names[dist.get_rank()] if renamed else dist.get_rank()
        x = starts(N)[played].clone()
        for round in range(5):
            x -= 0.1 * curvatures(N)[played] * (x - optima(N)[played])
            bk.primitives.neighbor_mean_(x, topology, bk.Comm().at(round))
        return x

    torch.testing.assert_close(together(run, True), together(run, False)[names], rtol=0, atol=1e-14)


def test_hierarchical_with_nodes_of_one_rank_is_flat():
    def run(nodes):
        rule = bk.algorithms.decentralized(bk.topology.Ring(), "atc")
        if not nodes:
            return train(lambda bk: [rule], 4, torch.float64)
        comm = bk.Comm(mesh=init_device_mesh("cpu", (3, 1), mesh_dim_names=("inter", "intra")))
        return train(lambda bk: [bk.hierarchical(rule)], 4, torch.float64, comm=comm)

    for a, b in zip(ranks(3, run, True), ranks(3, run, False), strict=True):
        assert torch.equal(a, b)


def test_hierarchical_gossip_is_the_product_of_its_matrices():
    """W = W_nodes ⊗ 11ᵀ/L."""

    def run():
        comm = bk.Comm(mesh=init_device_mesh("cpu", (3, 2), mesh_dim_names=("inter", "intra")))
        topology = bk.topology.FromMatrix([[0.5, 0.5, 0], [0.25, 0.25, 0.5], [0.25, 0.25, 0.5]])
        rule = bk.hierarchical(bk.algorithms.decentralized(topology, "atc"))
        return descend(lambda bk: rule, 2, 0.0, comm=comm)

    w = torch.tensor([[0.5, 0.5, 0], [0.25, 0.25, 0.5], [0.25, 0.25, 0.5]], dtype=torch.float64)
    whole = torch.kron(w, torch.full((2, 2), 0.5, dtype=torch.float64))
    expected = whole @ whole @ starts(6)
    torch.testing.assert_close(torch.stack(ranks(6, run)), expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("algorithm", ["gradient_tracking", "push_sum"])
def test_one_rank_is_the_plain_optimizer(algorithm):
    def run():
        return train(lambda _: [getattr(bk.algorithms, algorithm)(bk.topology.Ring())], 5), train(
            lambda _: [bk.algorithms.gradient_allreduce()], 5
        )

    ours, plain = ranks(1, run)[0]
    assert torch.equal(ours, plain)
