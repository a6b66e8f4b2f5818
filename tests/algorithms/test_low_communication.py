"""DiLoCo, DCD and CHOCO against their equations."""

import warnings
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from pool import ranks
from tiers import slow_after
from torch import nn
from training import flat, net, net_and_sgd, run_steps, sgd, simulate, train

import baguakit as bk
from baguakit.algorithms.local import OuterStep
from baguakit.rules import known_losses


def muon(rule, rank=None):
    """Train a matrix of values from 1 to 2 by Muon with the gradients of a rank, or of this one; return it."""
    draw = torch.Generator().manual_seed(0)
    model = nn.ParameterList([1 + torch.rand(6, 4, generator=draw)])
    goal = torch.randn(6, 4, generator=torch.Generator().manual_seed(dist.get_rank() if rank is None else rank))
    optimizer = torch.optim.Muon(model.parameters(), lr=0.02)
    with bk.attach(model, optimizer, rule):
        for _ in range(4):
            optimizer.zero_grad()
            (model[0] - goal).square().sum().backward()
            optimizer.step()
    return model[0].detach().clone()


def test_muloco_averages_orthogonalised_updates():
    """After one period it is the mean of what each rank's Muon made, and not Muon on the mean gradient."""

    def run():
        local = torch.stack([muon(bk.after_step(bk.stages.Mean(), every=100), rank) for rank in range(2)])
        together = muon(bk.algorithms.diloco(4, lr=1.0))
        return together - local.mean(0), together - muon(bk.algorithms.gradient_allreduce())

    for rounding, difference in ranks(2, run):
        assert rounding.abs().max() < 1e-6 and difference.abs().max() > 1e-3


@pytest.mark.parametrize("outer, options", [(torch.optim.SGD, {}), (torch.optim.Adam, {"lr": 0.01})])
def test_diloco_is_its_equation(outer, options):
    chosen = options or {"lr": 0.8, "momentum": 0.54, "nesterov": True}
    anchor = flat(net(torch.float64))
    optimizer = outer([anchor], **chosen)

    def exchange(step, x, move):
        x = x - move
        if (step + 1) % 4 == 0:
            anchor.grad = (anchor - x).mean(0)
            optimizer.step()
            x = anchor.clone().expand_as(x)
        return x

    def run():
        return train(
            lambda bk: [bk.algorithms.diloco(every=4, optimizer=outer, **options)], 12, torch.float64, bucket_bytes=300
        )

    torch.testing.assert_close(torch.stack(ranks(3, run)), simulate(3, exchange, 12), rtol=0, atol=1e-10)


@pytest.mark.parametrize("momentum, nesterov, most", [(0.0, False, 2.0), (0.5, False, 3.0), (0.3, True, 1.625)])
def test_an_outer_step_that_overshoots_is_named(momentum, nesterov, most):
    """If local steps converge within a round, the anchor's distance shrinks below the bound, and grows above it."""
    for lr, beyond in ((0.98 * most, False), (1.02 * most, True)):
        anchor = torch.ones(1, dtype=torch.float64)
        optimizer = torch.optim.SGD([anchor], lr=lr, momentum=momentum, nesterov=nesterov)
        for _ in range(2000):
            anchor.grad = anchor.clone()
            optimizer.step()
        assert (anchor.abs() > 1).item() is beyond
        rules = bk.algorithms.diloco(2, lr=lr, momentum=momentum, nesterov=nesterov).rules
        assert any("overshoots, as from lr=" in each for each in known_losses(rules, 4)) is beyond


PAPER = "lr=0.7, momentum=0.9, nesterov=True"


@pytest.mark.parametrize(
    "expression, n, sentence",
    [
        (f"diloco(100, {PAPER})", 2, "an outer step with lr=0.7 and momentum=0.9 is long for 2 ranks"),
        (f"diloco(100, {PAPER})", 30, "30 ranks that average every 100 steps end behind DDP"),
        (f"diloco(100, {PAPER})", 1, None),
        ("diloco(16, fragments=4)", 8, "8 ranks that average every 16 steps end behind DDP"),
        ("diloco(16)", 7, None),
        ("diloco(15)", 8, None),
        ("decoupled_diloco(BySpeed(24))", 8, "8 ranks that average every 24 steps"),
        ("diloco(lambda step: 24)", 8, None),
        ("diloco(24, torch.optim.Adam, lr=0.1)", 8, None),
        ("gradient_allreduce()", 8, None),
    ],
)
def test_what_is_known_to_lose_is_said_once(expression, n, sentence):
    made = eval(expression, vars(bk.algorithms) | {"BySpeed": bk.BySpeed, "torch": torch})
    found = known_losses(made.rules, n)
    assert len(found) == (sentence is not None) and all(each.startswith(sentence) for each in found)
    assert not known_losses(made.rules, n, adam=False)


def test_attach_and_plan_say_what_is_known_to_lose():
    def run(n):
        model, rule = net(), bk.algorithms.diloco(100, lr=0.7, momentum=0.9, nesterov=True)
        muon = torch.optim.Muon([p for p in model.parameters() if p.dim() == 2], lr=0.1)
        adam = torch.optim.AdamW([p for p in model.parameters() if p.dim() != 2], lr=0.1)
        bk.attach(model, [muon, adam], rule).detach()
        bk.attach(model, sgd(model.parameters()), rule).detach()
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            bk.attach(model, torch.optim.AdamW(model.parameters()), rule).detach()
        network = bk.tune.describe(n, 1, between=1e7, within=1e9)
        plan = bk.tune.plan(model, network=network, step_seconds=0.1, algorithms=[rule])
        return [str(each.message) for each in told], "is long for 2 ranks" in str(plan)

    (first, planned), *others = ranks(2, run, 2)
    assert len(first) == 1 and "is long for 2 ranks" in first[0] and planned
    assert all(each == ([], True) for each in others)


def test_the_outer_momentum_follows_the_ranks():
    """lr / (1 − μ) = √n, but for rounding and at both ends; a number stays what it is."""
    Described, rule = bk.tune.planning.Described, bk.algorithms.diloco()
    for n, mu in ((1, 0.2), (2, 0.43), (4, 0.6), (8, 0.72), (16, 0.8), (64, 0.9), (4096, 0.9)):
        assert rule.stage._on(Described(n)) == OuterStep(torch.optim.SGD, lr=0.8, momentum=mu, nesterov=True)
    assert OuterStep(torch.optim.SGD, lr=1.5, momentum=None)._on(Described(1))._on(Described(16)).options[1] == (
        "momentum",
        0.1,
    )

    inside = OuterStep(torch.optim.SGD, lr=0.8, momentum=0.6, nesterov=True)
    assert bk.hierarchical(rule).stage._on(Described(8, 2)) == bk.stages.Hierarchical(inside)

    def run():
        model = net()
        with bk.attach(model, sgd(model.parameters()), rule) as att:
            return att.report().rows[0].rule, repr(att.rules[0])

    taken = "after_step(OuterStep(torch.optim.SGD, lr=0.8, momentum=0.54, nesterov=True), every=500)"
    assert ranks(3, run) == [(taken, repr(rule))] * 3


def test_diloco_prints_and_refuses():
    rule = bk.algorithms.diloco()
    assert repr(rule) == "after_step(OuterStep(torch.optim.SGD, lr=0.8, momentum=None, nesterov=True), every=500)"
    assert rule == bk.algorithms.diloco() and hash(rule) == hash(bk.algorithms.diloco())
    with pytest.raises(TypeError, match="speed"):
        bk.algorithms.diloco(speed=3)
    with pytest.raises(ValueError, match="learning rate"):
        bk.algorithms.diloco(lr=-1.0)
    with pytest.raises(TypeError, match=r"optimizer is a subclass of Optimizer, such as torch\.optim\.SGD, not 'SGD'"):
        bk.algorithms.diloco(optimizer="SGD")


GRAPHS = [(2, "Ring"), (3, "Ring"), (4, "Ring"), (4, "FullyConnected"), (4, "Exponential")]
CHANGING = [(3, "OnePeerExact"), (4, "OnePeerExact")]
FEW = [(2, "Ring"), (3, "Ring"), (3, "OnePeerExact")]


WITHOUT_OWN = [  # some ranks, or all, give their own values no weight
    (3, "FromMatrix([[0.5, 0.5, 0.0], [0.5, 0.0, 0.5], [0.0, 0.5, 0.5]])"),
    (3, "FromMatrix([[0.0, 0.5, 0.5], [0.5, 0.0, 0.5], [0.5, 0.5, 0.0]])"),
]
SHIFTS = [(3, "FromMatrix([[[0, 1, 0], [0, 0, 1], [1, 0, 0]], [[0.5, 0.5, 0], [0, 0.5, 0.5], [0.5, 0, 0.5]]])")]


@pytest.mark.parametrize(
    "n, topology, order",
    [(n, f"{t}()", "atc") for n, t in FEW]
    + [pytest.param(n, f"{t}()", "atc", marks=pytest.mark.slow) for n, t in GRAPHS + CHANGING if (n, t) not in FEW]
    + [(n, t, order) for n, t in WITHOUT_OWN[1:] for order in ("atc", "awc")]
    + [pytest.param(n, t, order, marks=pytest.mark.slow) for n, t in WITHOUT_OWN[:1] for order in ("atc", "awc")]
    + [(n, t, "atc") for n, t in SHIFTS],
)
def test_without_loss_they_are_decentralized_sgd(n, topology, order):
    """With a compressor that loses nothing, CHOCO at γ = 1 is ATC, on graphs that change as well, and DCD is AWC."""

    def run(exact):
        graph = eval(f"bk.topology.{topology}")
        if not exact:
            rule = bk.algorithms.decentralized(graph, order)
        elif order == "atc":
            rule = bk.algorithms.choco(graph, Exact(), 1.0)
        else:
            rule = bk.algorithms.low_precision_decentralized(graph, Exact())
        return train(lambda bk: [rule], 8, torch.float64)

    from baguakit.compressors import Compressor

    @dataclass(frozen=True)
    class Exact(Compressor):
        def row_bytes(self, n):
            return 8 * n

        def compress(self, x, residual=None, key=0):
            return x.contiguous().view(torch.uint8).view(x.shape[0], -1)

        def decompress(self, packed, n, dtype=torch.float64, out=None):
            return packed.view(dtype)

    for a, b in zip(ranks(n, run, True), ranks(n, run, False), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-11)


@pytest.mark.parametrize("algorithm", ["low_precision_decentralized", "choco", "choco, one peer"])
@pytest.mark.parametrize("n", [2, 3, 4])
def test_replicas_are_the_same_wherever_they_are_held(n, algorithm):
    """s_i = Σ_{j ≠ i} w_ij r_j for the r_j that the neighbours hold, whatever was lost on the way."""

    def run():
        name, _, one_peer = algorithm.partition(", ")
        graph = bk.topology.OnePeerExact() if one_peer else bk.topology.Ring()
        model, optimizer = net_and_sgd()
        with bk.attach(model, optimizer, getattr(bk.algorithms, name)(graph)) as att:
            run_steps(model, optimizer, range(6))
            state = att._life.runners[0].states[0]
        everyone = bk.Comm().gather_objects(state["replica"])
        assert len(state["replica"]) == graph.period(n)
        for k, s in state["neighbors"].items():
            row = graph.weights(dist.get_rank(), n, int(k))
            expected = sum((w * everyone[p][k] for p, w in row.items() if p != dist.get_rank()), torch.zeros_like(s))
            assert (s - expected).abs().max() < 1e-6 * max(1, expected.abs().max())

    ranks(n, run)


@pytest.mark.parametrize("topology", slow_after(1, ["OnePeerExact", "Ring", "Exponential"]))
def test_choco_moves_no_mean(topology):
    """Σ_r x_r is what it was before the exchange, for any compressor."""

    def run():
        model = nn.Linear(40, 30)
        torch.manual_seed(dist.get_rank())
        for p in model.parameters():
            nn.init.normal_(p)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        before = flat(model)
        graph = getattr(bk.topology, topology)()
        rule = bk.algorithms.choco(graph, bk.compressors.MinMaxUInt8(block=64), 0.4)
        apart = []
        with bk.attach(model, optimizer, rule, broadcast=False) as att:
            for _ in range(30):
                apart.append(att.consensus_distance())
                model(torch.ones(1, 40)).sum().backward()
                optimizer.step()
        return before, flat(model), apart

    results = ranks(4, run)
    torch.testing.assert_close(
        sum(r[0] for r in results).double(), sum(r[1] for r in results).double(), rtol=0, atol=2e-5
    )
    assert results[0][2][-1] < 0.01 * results[0][2][0]


def test_graphs_that_would_not_converge_are_refused():
    def run():
        m, a, t = net(), bk.algorithms, bk.topology
        one_way = t.FromDigraph([(0, 1), (1, 2), (2, 3), (3, 0), (0, 2)])
        with pytest.raises(ValueError, match=r"static and symmetric; OnePeerExponential\(\) is not .* or choco\(\)"):
            bk.attach(m, sgd(m.parameters()), a.low_precision_decentralized(t.OnePeerExponential()))
        with pytest.raises(ValueError, match="would move the mean"):
            bk.attach(m, sgd(m.parameters()), a.choco(one_way))
        with pytest.raises(ValueError, match="more than 64 for 4 ranks"):
            bk.attach(m, sgd(m.parameters()), a.choco(t.RandomMatching(0)))

    ranks(4, run)
