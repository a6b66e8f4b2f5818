"""Invariants of every step: sums do not change."""

import pytest
import torch
from pool import ranks
from quadratics import descend, starts
from torch.distributed.device_mesh import init_device_mesh

import baguakit as bk

N = 4


def together(run, *args):
    return torch.stack(ranks(N, run, *args))


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
