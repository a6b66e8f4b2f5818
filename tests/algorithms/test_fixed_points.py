"""Fixed points of algorithms on heterogeneous quadratics: they solve the algorithms' own equations, to 1e-6 in fp64.

For A = diag(a), C the optima, W the mixing matrix and α the step:

    AWC                     (I − W + αA) X = αA C
    ATC                     (I − W (I − αA)) X = αW A C          with heavy-ball momentum β, that of α / (1 − β)
    push-sum                (I − W (I − αA D⁻¹)) U = αW A C,   X = D⁻¹ U,   D = diag of n · the stationary p
    gradient tracking       X = x*, the minimum of the mean
"""

import pytest
import torch
from pool import ranks
from quadratics import curvatures, descend, minimum, optima

import baguakit as bk
from baguakit import topology

# In `make test` one graph beside the directed ones; in `make test-all` all of them.
FEW = ["Star()"]
ALL = [pytest.param(n, None, marks=pytest.mark.slow) for n in (2, 3, 4, 5, 8)]
LONG = [pytest.param(*each.values, marks=[*each.marks, pytest.mark.release]) for each in ALL[2:]]  # some minutes each
STATIC = ["FullyConnected()", "Ring()", "Exponential()", "SymmetricExponential()", "Star()", "Grid2D()"]
CHANGING = ["OnePeerExact()", "OnePeerExponential()", "BaseK(1)", "BaseK(2)", "RandomMatching(1)"]


def graph(expression, n):
    return digraph(n) if expression == "digraph" else eval(expression, vars(topology))


def digraph(n):
    """A directed cycle with shortcuts: strongly connected, and not regular."""
    cycle = [(i, (i + 1) % n) for i in range(n)]
    return topology.FromDigraph(cycle + [(0, 2)] * (n > 2) + [(1, 4)] * (n > 4))


def fits(expression, n):
    try:
        graph(expression, n).check(n)
    except ValueError:
        return False
    return True


def ends(n, cases, limit=800):
    """Return the weights that each case ends with, (n, 3), for cases {name: (rule, steps, lr, momentum)}."""

    def run():
        return {name: descend(*case) for name, case in cases.items()}

    results = ranks(n, run, limit=limit)
    return {name: torch.stack([result[name] for result in results]) for name in cases}


def solve(w, n, alpha, order):
    a, c, eye = torch.diag(curvatures(n).flatten()), optima(n), torch.eye(n, dtype=torch.float64)
    if order == "awc":
        return torch.linalg.solve(eye - w + alpha * a, alpha * a @ c)
    return torch.linalg.solve(eye - w @ (eye - alpha * a), alpha * w @ a @ c)


def push_sum_ends(w, n, alpha):
    values, vectors = torch.linalg.eig(w)
    p = vectors[:, values.real.argmax()].real
    d = torch.diag(p / p.sum() * n)
    a, eye = torch.diag(curvatures(n).flatten()), torch.eye(n, dtype=torch.float64)
    u = torch.linalg.solve(eye - w @ (eye - alpha * a @ d.inverse()), alpha * w @ a @ optima(n))
    return d.inverse() @ u


@pytest.mark.timeout(900)
@pytest.mark.parametrize("n, graphs", [(3, FEW), *ALL])
def test_gossip_ends_where_its_equation_says(n, graphs):
    static = [*(graphs or [t for t in STATIC if fits(t, n)]), "Exponential()"]
    steps, lr = (60, 0.3) if graphs else (200, 0.1)  # the directed graph of 8 ranks mixes slowly
    cases = {}
    for t in static:
        for order in ("awc", "atc"):
            rule = lambda bk, t=t, order=order: bk.algorithms.decentralized(graph(t, n), order)  # noqa: E731
            cases[t, order] = (rule, steps, lr, 0.0)
    cases["Ring()", "momentum"] = (lambda bk: bk.algorithms.decentralized(bk.topology.Ring(), "atc"), 60, 0.1, 0.5)
    cases["digraph", "push_sum"] = (lambda bk: bk.algorithms.push_sum(digraph(n)), steps, lr, 0.0)
    cases["Exponential()", "push_sum"] = (lambda bk: bk.algorithms.push_sum(bk.topology.Exponential()), steps, lr, 0.0)
    found = ends(n, cases)
    for (t, order), x in found.items():
        w = torch.from_numpy(graph(t, n).matrix(n, 0))
        if order == "push_sum":
            expected = push_sum_ends(w, n, lr)
        elif order == "momentum":
            expected = solve(w, n, 0.1 / (1 - 0.5), "atc")
        else:
            expected = solve(w, n, lr, order)
        torch.testing.assert_close(x, expected, rtol=0, atol=1e-6, msg=lambda m, t=t, o=order: f"{t} {o}: {m}")
    regular = found["Exponential()", "push_sum"]
    torch.testing.assert_close(regular, found["Exponential()", "atc"], rtol=0, atol=1e-12)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("n, graphs", [pytest.param(3, ["OnePeerExact()"], marks=pytest.mark.slow), *ALL[:2], *LONG])
def test_gradient_tracking_ends_at_the_minimum_of_the_mean(n, graphs):
    steps, lr = (110, 0.15) if graphs else (300, 0.08)
    cases = {}
    for t in graphs or [t for t in STATIC + CHANGING if fits(t, n)]:
        for order in ("atc",) if graphs else ("awc", "atc"):
            rule = lambda bk, t=t, order=order: bk.algorithms.gradient_tracking(graph(t, n), order)  # noqa: E731
            cases[t, order] = (rule, steps, lr, 0.0)
    steps, lr = (500, 0.05) if n > 5 else (steps, lr)  # the directed graph of 8 ranks needs short steps
    cases["digraph", "push_sum"] = (lambda bk: bk.algorithms.gradient_tracking(digraph(n), "push_sum"), steps, lr, 0.0)
    for (t, order), x in ends(n, cases).items():
        torch.testing.assert_close(
            x, minimum(n).expand(n, -1), rtol=0, atol=1e-6, msg=lambda m, t=t, o=order: f"{t} {o}: {m}"
        )


@pytest.mark.slow  # the algorithm that the package has is tested in test_corrected_gossip.py
def test_the_example_of_one_s_own_algorithm_is_exact():
    import importlib.util
    from pathlib import Path

    path = Path(__file__).parents[2] / "examples" / "exact_diffusion.py"
    source = path.read_text()
    body = source[source.index("@dataclass") : source.index("def distance_from_minimum")]
    assert len([line for line in body.splitlines() if line.strip()]) < 30

    def run():
        spec = importlib.util.spec_from_file_location("exact_diffusion", path)
        example = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(example)
        with pytest.raises(ValueError, match="not symmetric for 4 ranks"):
            example.ExactDiffusion(bk.topology.Exponential()).check(bk.Comm())
        rule = example.exact_diffusion(bk.topology.Ring())
        assert repr(rule) == "after_step(ExactDiffusion(Ring()))"
        return example.distance_from_minimum(rule), descend(lambda _: rule, 100, 0.3)

    for distance, x in ranks(4, run):
        assert distance < 1e-9
        torch.testing.assert_close(x, minimum(4), rtol=0, atol=1e-9)
