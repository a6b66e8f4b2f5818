"""Exact diffusion and quasi-global momentum against their published recursions, in fp64 on unlike quadratics."""

import pytest
import torch
import torch.distributed as dist
from pool import ranks
from quadratics import Point, curvatures, descend, minimum, optima, starts

import baguakit as bk

GAMMA = 0.1


def gradients(x):
    return curvatures(len(x)) * (x - optima(len(x)))


def found(rule, n, steps, lr=GAMMA):
    return torch.stack(ranks(n, descend, rule, steps, lr))


def close(x, expected, atol=1e-13):
    torch.testing.assert_close(x, expected.expand_as(x), rtol=0, atol=atol)


# Exact diffusion


def test_it_is_the_published_recursion():
    """X ← A (2X − X before − γ (g − g before)), the first step being X ← A (X − γ g)."""
    n = 4
    w = torch.from_numpy(bk.topology.Ring().matrix(n, 0))
    a = (torch.eye(n, dtype=torch.float64) + w) / 2
    before, x = starts(n), a @ (starts(n) - GAMMA * gradients(starts(n)))
    for _ in range(11):
        x, before = a @ (2 * x - before - GAMMA * (gradients(x) - gradients(before))), x
    close(found(lambda bk: bk.algorithms.exact_diffusion(), n, 12), x)


@pytest.mark.parametrize("n", [4, pytest.param(5, marks=pytest.mark.slow)])
def test_it_ends_at_the_minimum_of_the_mean(n):
    close(found(lambda bk: bk.algorithms.exact_diffusion(), n, 150, 0.3), minimum(n), atol=1e-9)


def test_the_learning_rate_may_change():
    """The mean over ranks steps by the mean of the gradients under any schedule, and all still end at the minimum."""
    n = 4
    rates = [0.3, 0.03, 0.3, 0.15] + [0.3] * 150

    def run():
        r, seen = dist.get_rank(), []
        model = Point(starts(n)[r])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        with bk.attach(model, optimizer, bk.algorithms.exact_diffusion(), broadcast=False):
            for lr in rates:
                seen.append(model.x.detach().clone())
                optimizer.param_groups[0]["lr"] = lr
                optimizer.zero_grad()
                model(float(curvatures(n)[r]), optima(n)[r]).backward()
                optimizer.step()
        return torch.stack(seen)

    x = torch.stack(ranks(n, run), 1)  # (step, rank, 3)
    for step, lr in enumerate(rates[:-1]):
        close(x[step + 1].mean(0), (x[step] - lr * gradients(x[step])).mean(0), atol=1e-14)
    close(x[-1], minimum(n), atol=1e-9)


def test_graphs_on_which_it_would_not_converge_are_refused():
    def run():
        t, a = bk.topology, bk.algorithms
        model = Point(torch.zeros(3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for rule, words in [
            (a.exact_diffusion(t.OnePeerExponential()), r"must be static, symmetric .* not for 4 ranks: use Ring\(\)"),
            (a.exact_diffusion(t.Exponential()), "must be static, symmetric"),
        ]:
            with pytest.raises(ValueError, match=words):
                bk.attach(model, optimizer, rule)

    ranks(4, run)


# Quasi-global momentum


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("graph", ["Ring()", "OnePeerExact()"])
def test_quasi_global_momentum_is_the_published_recursion(graph, nesterov):
    """X⁺ ← W (X − γ (g + β m));  m ← ν m + (1 − ν) (X − X⁺) / γ;  with Nesterov g + β (β m + g)."""
    n, beta, nu, topology = 5, 0.8, 0.7, eval(graph, vars(bk.topology))
    x, m = starts(n), 0.0
    for round in range(12):
        w = torch.from_numpy(topology.matrix(n, round % topology.period(n)))
        g = gradients(x)
        after = w @ (x - GAMMA * (g + beta * (beta * m + g if nesterov else m)))
        x, m = after, nu * m + (1 - nu) * (x - after) / GAMMA
    close(found(lambda bk: bk.algorithms.quasi_global_momentum(topology, beta, nu, nesterov), n, 12), x)


def test_quasi_global_momentum_refuses():
    with pytest.raises(ValueError, match="momentum is a finite number, 0 or more and less than 1"):
        bk.algorithms.quasi_global_momentum(momentum=1.0)

    def run():
        model = Point(torch.zeros(3))
        one_way = bk.topology.FromDigraph([(0, 1), (1, 2), (2, 0), (0, 2)])
        with pytest.raises(ValueError, match="not doubly stochastic for 3 ranks"):
            bk.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), bk.algorithms.quasi_global_momentum(one_way))

    ranks(3, run)


def test_weights_in_bf16_do_not_lose_what_is_remembered_of_them():
    """The state is fp32: a model that was given it rounded, and did not move, is given the mean of the exact ones."""

    def run():
        stage, comm = bk.algorithms.quasi_global_momentum(momentum=0.0).stage, bk.Comm()
        exact = torch.linspace(0.1, 1 + dist.get_rank(), 64)
        x = exact.to(torch.bfloat16)
        state = stage.init(bk.Bucket([x.clone()]), comm)
        name = stage.follows[0]
        state[name].copy_(exact)
        for round in range(3):
            x = stage(x, state, comm.at(round))
        return x, state[name]

    mean = torch.linspace(0.1, 1, 64) / 2 + torch.linspace(0.1, 2, 64) / 2
    for x, held in ranks(2, run):
        torch.testing.assert_close(held, mean, rtol=0, atol=1e-6)
        assert torch.equal(x, held.to(torch.bfloat16))
