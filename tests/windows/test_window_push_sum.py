"""Asynchronous gossip and push-sum on windows in one process: mass, ends, and ranks of unequal speed."""

import random

import pytest
import torch
from post import Connection, deliver_all, windows

from baguakit.algorithms.asynchronous import LEAST, WindowMean, WindowPushSum
from baguakit.topology import Exponential, FromDigraph, Ring
from baguakit.windows.messages import ADD, Request

SIZE = 5
TWO_WAYS = FromDigraph([(r, (r + d) % SIZE) for r in range(SIZE) for d in (1, 2)])


def trained(stage, w, change=0.0):
    """Make a local step, and the exchange after it."""
    x = w.x + change
    return w.x.copy_(stage(x, {"window": w}, w.comm))


def start(monkeypatch, topology, size=SIZE):
    real = windows(monkeypatch, size, topology, zero=True, one=True)
    return real, {(i, j): Connection(real, i, j) for i in range(size) for j in real[i]._links.edges}


def mass(p, x):
    """The mass p, and the values x that it has, as one tensor."""
    return torch.cat([torch.tensor([p], dtype=torch.float64), x.view(-1)])


def held_by(rank, real, lines):
    """All that a rank that is killed takes with it: its own, its buffers, and what it has not delivered.

    What it has taken and not confirmed stays with the sender.
    """
    w, memory = real[rank], real[rank]._memory
    held = mass(w.p, w.p * w.x) + sum(mass(memory.ps[j], memory.buffers[j]) for j in memory.buffers)
    if memory.back is not None:
        held = held + mass(memory.back_p, memory.back)
    for (i, j), line in lines.items():
        edge, under_way = (
            line.edge,
            [
                each
                for each in (line.edge.waiting, line.edge.flying)
                if isinstance(each, Request) and each.x is not None
            ],
        )
        taken = edge.flying is not None and line.memory.applied.get(i, 0) == edge.number
        for each in under_way:
            assert each.kind == ADD
            here = mass(each.p, each.x * each.weight)
            if i == rank and not (each is edge.flying and taken):
                held = held + here
            elif j == rank and each is edge.flying and taken:
                held = held - here
    return held


@pytest.mark.parametrize("topology", [Ring(), Exponential(), TWO_WAYS], ids=repr)
@pytest.mark.parametrize("seed", range(5))
def test_the_living_keep_their_mass_when_a_rank_is_killed(monkeypatch, topology, seed):
    """Whatever is under way, lost or repeated at that moment; then they agree on the mean of what they have."""
    draw, stage = random.Random(seed), WindowPushSum(topology)
    real, lines = start(monkeypatch, topology)
    whole = sum(mass(1.0, w.x) for w in real)
    for _ in range(draw.randrange(100, 300)):
        trained(stage, draw.choice(real))
        for _ in range(draw.randrange(4)):
            line = draw.choice([*lines.values()])
            if line.edge.take():
                line.deliver(answer_is_lost=draw.random() < 0.3)
    dead = draw.randrange(SIZE)
    left = whole - held_by(dead, real, lines)
    assert 0 < left[0] < SIZE
    for pair in [pair for pair in lines if dead in pair]:
        lines.pop(pair).edge.drop("the test")
    living = [w for w in real if w is not real[dead]]
    for _ in range(600):
        for w in living:
            trained(stage, w)
        deliver_all(lines, draw)
    for w in living:
        w.x.mul_(w.p)
        w.collect()
    torch.testing.assert_close(sum(mass(w.p, w.x) for w in living), left, rtol=1e-12, atol=0)
    for w in living:
        torch.testing.assert_close(w.x / w.p, left[1:] / left[0], rtol=1e-9, atol=0)


@pytest.mark.parametrize("staleness", [None, 10**6])
def test_a_rank_that_nobody_answers_keeps_a_mass(monkeypatch, staleness):
    real, lines = start(monkeypatch, TWO_WAYS)
    before, stage = real[0].x.clone(), WindowPushSum(TWO_WAYS, staleness)
    for _ in range(2_000):
        trained(stage, real[0])
        for j in (1, 2):
            if lines[0, j].edge.take():
                lines[0, j].deliver()
    assert LEAST / 3 <= real[0].p < LEAST
    torch.testing.assert_close(real[0].x, before, rtol=1e-12, atol=0)
    assert real[0].p + sum(real[j]._memory.ps[0] for j in (1, 2)) == pytest.approx(1.0, rel=1e-12)


def test_a_busy_edge_keeps_its_share(monkeypatch):
    """No share waits behind a message that is under way, unless a bounded staleness counts the calls."""
    for staleness, waiting in ((None, 1), (10**6, 100)):
        real, _ = start(monkeypatch, TWO_WAYS)
        for _ in range(100):
            trained(WindowPushSum(TWO_WAYS, staleness), real[0])
        assert real[0].pending == {1: waiting, 2: waiting, 3: 0, 4: 0}


RATES = (1, 1, 2, 4, 8)


def converged(monkeypatch, stage, steps=6000):
    """Let ranks pull to centres of their own at unequal rates; return the mean of the weights, and p at exchanges."""
    draw = random.Random(0)
    real, lines = start(monkeypatch, stage.topology)
    at, means, masses = torch.arange(SIZE, dtype=torch.float64), [], [[] for _ in real]
    for step in range(steps):
        r = draw.choices(range(SIZE), RATES)[0]
        masses[r].append(real[r].p)
        trained(stage, real[r], 0.05 * (at[r] - real[r].x))
        deliver_all(lines, draw)
        if step >= steps // 2:
            means.append(torch.stack([w.x for w in real]).mean())
    return float(torch.stack(means).mean()), [sum(p) / len(p) for p in masses]


@pytest.mark.parametrize("stage", [WindowPushSum(Ring()), WindowMean(Ring())], ids=repr)
def test_ranks_count_alike_however_fast_they_are(monkeypatch, stage):
    """They tend to the mean of all centres, 2, not to one in which ranks count by their rates, 3.06."""
    found, masses = converged(monkeypatch, stage)
    assert found == pytest.approx(2, abs=0.15)
    if isinstance(stage, WindowPushSum):
        rates = [rate * p for rate, p in zip(RATES, masses, strict=True)]
        assert max(rates) < 1.2 * min(rates)


def descended(monkeypatch, stage, lr, rounds):
    """Descend on quadratics with curvatures and centres of their own; return the weights of all rounds.

    Ranks step in an order of chance, and their messages are late, or come twice.
    """
    draw = random.Random(1)
    real, lines = start(monkeypatch, stage.topology)
    said = []
    for _ in range(rounds):
        for r in draw.sample(range(SIZE), SIZE):
            trained(stage, real[r], -lr * A[r] * (real[r].x - C[r]))
            for _ in range(4):
                line = draw.choice([*lines.values()])
                if line.edge.take():
                    line.deliver(answer_is_lost=draw.random() < 0.3)
        said.append(torch.stack([w.x.clone() for w in real]))
    return torch.stack(said)


A = torch.linspace(0.5, 1.5, SIZE, dtype=torch.float64)
C = torch.randn(SIZE, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
BEST = (A[:, None] * C).sum(0) / A.sum()  # the minimum of the mean


@pytest.mark.parametrize("topology", [Ring(), Exponential()], ids=repr)
def test_gossip_ends_where_the_synchronous_one_does(monkeypatch, topology):
    """However late messages are:  (I − W (I − αA)) X = αW A C."""
    lr, W = 0.1, torch.from_numpy(topology.matrix(SIZE, 0))
    eye, a = torch.eye(SIZE, dtype=torch.float64), torch.diag(A)
    expected = torch.linalg.solve(eye - W @ (eye - lr * a), lr * W @ a @ C)
    torch.testing.assert_close(descended(monkeypatch, WindowMean(topology), lr, 700)[-1], expected, rtol=0, atol=1e-9)


@pytest.mark.slow
def test_the_floor_of_push_sum_falls_with_the_learning_rate(monkeypatch):
    """At half the rate, the mean distance from the minimum halves at least, while its masses go on changing."""
    found = []
    for lr, rounds in ((0.1, 400), (0.05, 800), (0.025, 1600)):
        late = descended(monkeypatch, WindowPushSum(Ring()), lr, rounds)[rounds // 2 :]
        found.append(float((late - BEST).norm(dim=-1).mean()))
    assert found[0] < 0.3 and found[1] < 0.6 * found[0] and found[2] < 0.6 * found[1], found
