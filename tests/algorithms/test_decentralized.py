"""Decentralized SGD against its matrix equation, simulated in one process in fp64."""

import pytest
import torch
import torch.distributed as dist
from pool import ranks
from tiers import slow_after
from torch import nn
from training import simulate, train

import baguakit as bk

TOPOLOGIES = ["FullyConnected()", "Ring()", "ShiftOne()", "Exponential()", "OnePeerExponential()"]
TOPOLOGIES += ["BaseK(1)", "OnePeerExact()", "Star()", "Grid2D()", "RandomMatching(3)"]


def made(expression):
    return eval(expression, vars(bk.topology))


def fits(topology, n):
    try:
        made(topology).check(n)
    except ValueError:
        return False
    return True


STEPS = {1: 5, 2: 5, 3: 7, 4: 9}  # by `every`: two exchanges or more, and for every step a period and more


def expected(topology, n, order, every, steps):
    def exchange(step, x, move):
        if (step + 1) % every:
            return x - move
        w = torch.from_numpy(made(topology).matrix(n, (step + 1) // every - 1))
        return w @ x - move if order == "awc" else w @ (x - move)

    return simulate(n, exchange, steps)


@pytest.mark.parametrize("order", ["awc", "atc"])
@pytest.mark.parametrize("n", slow_after(1, [4, 2, 3]))
@pytest.mark.parametrize("everies", slow_after(1, [[2], [1, 3, 4]]))
def test_it_is_its_equation(n, order, everies):
    cases = [(topology, every) for topology in TOPOLOGIES if fits(topology, n) for every in everies]

    def run():
        def weights(topology, every):
            def algorithms(bk):
                return [bk.algorithms.decentralized(made(topology), order=order, every=every)]

            return train(algorithms, STEPS[every], torch.float64, bucket_bytes=300)

        return [weights(*case) for case in cases]

    for (topology, every), *found in zip(cases, *ranks(n, run), strict=True):
        wanted = expected(topology, n, order, every, STEPS[every])
        named = lambda m, topology=topology, every=every: f"{topology}, {every=}: {m}"  # noqa: E731
        torch.testing.assert_close(torch.stack(found), wanted, rtol=0, atol=1e-11, msg=named)


FEW = ["Ring()", "OnePeerExponential()", "BaseK(1)"]


@pytest.mark.timeout(420)  # eight ranks on two cores take their time
@pytest.mark.parametrize("order", ["awc", "atc"])
@pytest.mark.parametrize(
    "n, topologies",
    [(3, FEW), *(pytest.param(n, TOPOLOGIES, marks=pytest.mark.slow) for n in range(2, 9))],
)
def test_weights_do_not_depend_on_every(n, topologies, order):
    """At lr = 0 the weights after m exchanges are the same bits, however many steps lie between two of them."""

    def run():
        seen = {}
        for topology in (t for t in topologies if fits(t, n)):
            for every in (1, 2, 3, 4, 8):
                model = nn.Linear(5, 3)
                optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
                rule = bk.algorithms.decentralized(made(topology), order=order, every=every)
                torch.manual_seed(dist.get_rank())
                for p in model.parameters():
                    nn.init.normal_(p)
                with bk.attach(model, optimizer, rule, broadcast=False):
                    for _ in range(5 * every):
                        model(torch.ones(1, 5)).sum().backward()
                        optimizer.step()
                seen.setdefault(topology, []).append(torch.cat([p.detach().flatten() for p in model.parameters()]))
        return seen

    for seen in ranks(n, run, limit=400):
        for weights in seen.values():
            assert all(torch.equal(weights[0], other) for other in weights)


@pytest.mark.parametrize("every", [1, 3])
def test_local_sgd_is_the_mean_after_every_few_steps(every):
    def exchange(step, x, move):
        x = x - move
        return x.mean(0).expand_as(x) if (step + 1) % every == 0 else x

    def run():
        return train(lambda bk: [bk.algorithms.local_sgd(every)], steps=7, dtype=torch.float64)

    torch.testing.assert_close(torch.stack(ranks(3, run)), simulate(3, exchange, 7), rtol=0, atol=1e-11)
