"""With weights v of ranks, algorithms on heterogeneous quadratics rest at the minimum of Σ_r v_r f_r, or as near as
their equations say, to 1e-6 in fp64. For A = diag(a), C the optima, α the step, and P the matrix of Metropolis and
Hastings on the graph, p_rj = w_rj min(v_r, v_j) / v_r, in which v P = v, or of the exact mean, p_rj = v_j / Σ v:

    AWC, DCD                (I − P + αA) X = αA C
    ATC                     (I − P (I − αA)) X = αP A C          with heavy-ball momentum β, that of α / (1 − β)
    CHOCO                   ATC with I + γ (P − I)
    push-sum                (I − W (I − αA S D⁻¹)) U = αW A S C,   X = D⁻¹ U,   S = diag of n v_r / Σ v,   D as ever
    exact diffusion, gradient tracking, means     X = x*, the minimum of Σ_r v_r f_r
"""

import pytest
import torch
from pool import ranks
from quadratics import curvatures, descend, optima

import baguakit as bk
from baguakit import topology

V = [2.0, 0.5, 1.0, 1.5]
GRAPHS = ["Ring()", "Star()", "Exponential()"]  # the last is directed for 4 ranks


def minimum(n):
    va = torch.tensor(V[:n], dtype=torch.float64).unsqueeze(1) * curvatures(n)
    return (va * optima(n)).sum(0) / va.sum()


def hastings(expression, n):
    graph = eval(expression, vars(topology))
    w, v = torch.from_numpy(graph.matrix(n, 0)), torch.tensor(V[:n], dtype=torch.float64)
    if bool((w == 1 / n).all()):
        return (v / v.sum()).expand(n, -1)
    p = w * torch.minimum(v[:, None], v) / v[:, None] if graph.symmetric(n) else w * v.min() / v[:, None]
    p.fill_diagonal_(0)
    return p + torch.diag(1 - p.sum(1))


def solve(p, alpha, order):
    n = len(p)
    a, c, eye = torch.diag(curvatures(n).flatten()), optima(n), torch.eye(n, dtype=torch.float64)
    if order == "awc":
        return torch.linalg.solve(eye - p + alpha * a, alpha * a @ c)
    return torch.linalg.solve(eye - p @ (eye - alpha * a), alpha * p @ a @ c)


def push_sum_ends(w, alpha):
    n = len(w)
    values, vectors = torch.linalg.eig(w)
    stationary = vectors[:, values.real.argmax()].real
    d = torch.diag(stationary / stationary.sum() * n)
    v = torch.tensor(V[:n], dtype=torch.float64)
    a, eye = torch.diag(curvatures(n).flatten() * v / v.mean()), torch.eye(n, dtype=torch.float64)
    u = torch.linalg.solve(eye - w @ (eye - alpha * a @ d.inverse()), alpha * w @ a @ optima(n))
    return d.inverse() @ u


def digraph(n):
    return topology.FromDigraph([(i, (i + 1) % n) for i in range(n)] + [(0, 2)])


CASES = {}  # name: (rule, steps, learning rate, momentum), and what it ends with
for _name in GRAPHS:
    for _order in ("awc", "atc"):
        CASES[f"decentralized({_name}, '{_order}')"] = (
            (200, 0.3, 0.0),
            lambda n, g=_name, o=_order: solve(hastings(g, n), 0.3, o),
        )
_star = lambda n: minimum(n).expand(n, -1)  # noqa: E731
CASES |= {
    "decentralized(Ring(), 'atc', every=1)": ((120, 0.1, 0.5), lambda n: solve(hastings("Ring()", n), 0.2, "atc")),
    "low_precision_decentralized()": ((200, 0.1, 0.0), lambda n: solve(hastings("Ring()", n), 0.1, "awc")),
    "choco(gamma=0.5)": (
        (300, 0.1, 0.0),
        lambda n: solve(torch.eye(n, dtype=torch.float64).lerp(hastings("Ring()", n), 0.5), 0.1, "atc"),
    ),
    "push_sum(digraph(n))": ((300, 0.1, 0.0), lambda n: push_sum_ends(torch.from_numpy(digraph(n).matrix(n, 0)), 0.1)),
    "exact_diffusion()": ((300, 0.2, 0.0), _star),
    "exact_diffusion(FullyConnected())": ((200, 0.2, 0.0), _star),
    "gradient_tracking(Ring())": ((300, 0.1, 0.0), _star),
    "gradient_tracking(order='atc')": ((600, 0.06, 0.0), _star),
    "gradient_tracking(digraph(n), 'push_sum')": ((500, 0.05, 0.0), _star),
    "gradient_allreduce()": ((150, 0.2, 0.0), _star),
    "ef21(TopK(0.5))": ((400, 0.1, 0.0), _star),
}


FEW = ("decentralized(Ring(), 'atc')", "push_sum(digraph(n))", "gradient_allreduce()")


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("n", "cases"),
    [(3, FEW), *(pytest.param(n, tuple(CASES), marks=pytest.mark.slow) for n in (3, 4))],
    ids=["few", "3", "4"],
)
def test_ranks_rest_where_the_weighted_equation_says(n, cases):
    names = {**vars(bk.algorithms), **vars(topology), **vars(bk.compressors), "digraph": digraph, "n": n}

    def run():
        import torch.distributed as dist

        weight, found = V[dist.get_rank()], {}
        for name in cases:
            (steps, lr, momentum), _ = CASES[name]
            rule = eval(name, dict(names))
            alike = name.startswith(("gradient_allreduce", "ef21"))  # ranks begin with the same weights
            found[name] = descend(lambda _, rule=rule: rule, steps, lr, momentum, weight=weight, broadcast=alike)
        return found

    there = ranks(n, run, limit=800)
    ends = {name: torch.stack([found[name] for found in there]) for name in cases}
    errors = {name: float((x - CASES[name][1](n)).abs().max()) for name, x in ends.items()}
    assert max(errors.values()) < 1e-6, {name: error for name, error in errors.items() if error >= 1e-6}
