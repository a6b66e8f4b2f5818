"""GASLoC, an example, against its matrix equation, DiLoCo and decentralized local SGD."""

import importlib.util
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from pool import ranks
from quadratics import Point
from training import flat, net, simulate, train

import baguakit as bk

H, LR, MU = 3, 0.7, 0.5


def gasloc(*args, **options):
    """Return the rule of the example."""
    path = Path(__file__).parents[2] / "examples" / "gasloc.py"
    spec = importlib.util.spec_from_file_location("gasloc", path)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    return example.gasloc(*args, **options)


@pytest.mark.parametrize("graph", ["Ring()", "RandomMatching(3)"])
def test_it_is_its_equation(graph):
    """y ← θ + η (x − θ);  θ ← W (y + μ (y − y before)), in rows by rank."""
    n, topology = 4, eval(graph, vars(bk.topology))
    theta = before = flat(net(torch.float64)).expand(n, -1)

    def exchange(step, x, move):
        nonlocal theta, before
        x = x - move
        if (step + 1) % H:
            return x
        w = torch.from_numpy(topology.matrix(n, (step + 1) // H - 1))
        y = theta + LR * (x - theta)
        theta, before = w @ (y + MU * (y - before)), y
        return theta

    def run():
        return train(lambda bk: [gasloc(topology, H, LR, MU)], 12, torch.float64)

    found = torch.stack(ranks(n, run))
    torch.testing.assert_close(found, simulate(n, exchange, 12), rtol=0, atol=1e-11)
    assert not torch.equal(found[0], found[1])


def everywhere_dyadic(rule, steps=8):
    """Descend unlike quadratics: every number is a fraction with a power of two below, and has less than 53 bits."""
    r = dist.get_rank()
    model = Point(torch.tensor([1.0, -3.0], dtype=torch.float64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    with bk.attach(model, optimizer, rule):
        for _ in range(steps):
            optimizer.zero_grad()
            model((r + 1) / 2, torch.tensor([r, 2.0 - r], dtype=torch.float64)).backward()
            optimizer.step()
    return model.x.detach().clone()


@pytest.mark.parametrize("n", [2, 4])
def test_on_the_complete_graph_it_is_diloco_to_the_bit(n):
    """W = 11ᵀ/n: all ranks agree, and equal DiLoCo with Nesterov's momentum.

    The two round in different orders, so numbers are chosen that no operation rounds.
    """

    def run():
        a = bk.algorithms
        ours = everywhere_dyadic(gasloc(bk.topology.FullyConnected(), every=2, lr=0.5, momentum=0.5))
        theirs = everywhere_dyadic(a.diloco(every=2, lr=0.5, momentum=0.5, nesterov=True))
        heavy = everywhere_dyadic(a.diloco(every=2, lr=0.5, momentum=0.5))
        return ours, theirs, heavy

    results = ranks(n, run)
    assert all(torch.equal(ours, results[0][1]) and torch.equal(theirs, ours) for ours, theirs, _ in results)
    assert not torch.equal(results[0][0], results[0][2])


def test_without_momentum_it_is_decentralized_local_sgd_to_the_bit():
    """μ = 0 and η = 1:  x ← W x after every H-th step."""

    def run():
        ring = bk.topology.Ring()
        ours = train(lambda bk: [gasloc(ring, H, lr=1.0, momentum=0.0)], 8)
        return torch.equal(ours, train(lambda bk: [bk.algorithms.decentralized(ring, "atc", every=H)], 8))

    assert ranks(4, run) == [True] * 4
