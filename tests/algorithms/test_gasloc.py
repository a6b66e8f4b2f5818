"""GASLoC, an example, against its matrix equation."""

import importlib.util
from pathlib import Path

import pytest
import torch
from pool import ranks
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
