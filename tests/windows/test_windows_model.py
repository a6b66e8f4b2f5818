"""Random interleavings of calls and deliveries, on windows in one process, equal a sequential model.

Weights are powers of two and values small whole numbers, so that every sum is exact, in any order. Messages are
delayed; their answers get lost, so that they come twice; and edges are dropped.
"""

import itertools
import random

import pytest
import torch
from post import VALUES, Connection, deliver_all, windows

from baguakit.topology import FromDigraph, Ring
from baguakit.windows.messages import DONE, FREE, LOCK, UNLOCK

WEIGHTS = (0.0, 0.5, 1.0, 1.0, -1.0)


class Model:
    """The same, in lists of Python's floats; an edge is a list of calls under way, and one of those that wait."""

    def __init__(self, topology, size, zero):
        self.rows = [topology.weights(r, size, 0) for r in range(size)]
        self.x = [[8.0 * r + i for i in range(VALUES)] + [1.0] for r in range(size)]  # the last is p
        self.exposed = [list(x) for x in self.x]
        self.buffers = {
            (r, j): [0.0] * (VALUES + 1) if zero else list(self.x[r])
            for r in range(size) for j in self.rows[r] if j != r
        }  # fmt: skip
        self.came = dict.fromkeys(self.buffers, 0)
        self.back = [[0.0] * (VALUES + 1) for _ in range(size)]
        self.edges = {}
        for r, j in self.buffers:
            for pair in ((r, j), (j, r)):
                self.edges[pair] = {"waiting": [], "flying": [], "asks": [], "asked": None, "applied": False}
        self.lost, self.holder = set(), [None] * size

    def send(self, i, j, kind, weight, x):
        if (i, j) not in self.lost:
            self.edges[i, j]["waiting"].append((kind, weight, list(x)))
        elif kind == "add":
            self.back[i] = add(self.back[i], x, weight)

    def begin(self, i, j):
        """Begin to send what waits; return whether anything is under way."""
        edge = self.edges[i, j]
        if not edge["flying"] and edge["asked"] is None:
            if edge["waiting"]:
                edge["flying"], edge["waiting"], edge["applied"] = edge["waiting"], [], False
            elif edge["asks"]:
                edge["asked"] = edge["asks"].pop(0)
        return bool(edge["flying"]) or edge["asked"] is not None

    def apply(self, i, j):
        edge = self.edges[i, j]
        for kind, weight, x in [] if edge["applied"] else edge["flying"]:
            before = self.buffers[j, i] if kind == "add" else [0.0] * (VALUES + 1)
            self.buffers[j, i] = add(before, x, weight)
            self.came[j, i] += 1
        edge["applied"] = True

    def answered(self, i, j):
        edge = self.edges[i, j]
        if edge["asked"] is not None:
            self.buffers[i, j] = add([0.0] * (VALUES + 1), self.exposed[j], edge["asked"])
            self.came[i, j] += 1
        edge["flying"], edge["asked"] = [], None

    def drop(self, i, j):
        edge = self.edges[i, j]
        for calls in (edge["flying"], edge["waiting"]):
            if all(kind == "add" for kind, _, _ in calls):
                for _, weight, x in calls:
                    self.back[i] = add(self.back[i], x, weight)
        edge.update(flying=[], waiting=[], asks=[], asked=None)
        self.lost.add((i, j))


def add(a, b, weight):
    return [p + weight * q for p, q in zip(a, b, strict=True)]


def one_interleaving(monkeypatch, seed, length=30):
    draw = random.Random(seed)
    size, zero = draw.randint(2, 5), draw.random() < 0.5
    circle = FromDigraph([(r, (r + 1) % size) for r in range(size)])
    topology = circle if size > 2 and draw.random() < 0.5 else Ring()
    real, model = windows(monkeypatch, size, topology, zero), Model(topology, size, zero)
    lines = {pair: Connection(real, *pair) for pair in model.edges}
    for _ in range(length):
        r = draw.randrange(size)
        hears = [j for i, j in model.buffers if i == r]
        heard_by = [i for i, j in model.buffers if j == r]
        act = draw.choice(("put", "add", "get", "update", "deliver", "deliver", "deliver", "mutex", "write", "drop"))
        weights = {j: draw.choice(WEIGHTS) for j in draw.sample(heard_by, draw.randint(1, len(heard_by)))}
        if act == "put":
            real[r].put(dst_weights=weights, wait=False)
            for j, w in weights.items():
                model.send(r, j, "put", w, model.x[r])
            model.exposed[r] = list(model.x[r])
        elif act == "add":
            s = draw.choice(WEIGHTS)
            real[r].accumulate(dst_weights=weights, self_weight=s, wait=False)
            for j, w in weights.items():
                model.send(r, j, "add", w, model.x[r])
            model.x[r] = add([s * v for v in model.x[r]], model.back[r], 1.0)
            model.back[r], model.exposed[r] = [0.0] * (VALUES + 1), list(model.x[r])
        elif act == "get":
            weights = {j: draw.choice(WEIGHTS) for j in draw.sample(hears, draw.randint(1, len(hears)))}
            real[r].get(weights, wait=False)
            for j, w in sorted(weights.items()):
                model.edges[r, j]["asks"] += [w] if (r, j) not in model.lost else []
        elif act == "update":
            own, reset = draw.choice(WEIGHTS), draw.random() < 0.5
            weights = {j: draw.choice(WEIGHTS) for j in draw.sample(hears, draw.randint(0, len(hears)))}
            real[r].update(own, weights, reset=reset)
            x = [own * v for v in model.x[r]]
            for j, w in weights.items():
                x = add(x, model.buffers[r, j], w)
            model.x[r], model.back[r] = add(x, model.back[r], 1.0), [0.0] * (VALUES + 1)
            model.exposed[r] = list(model.x[r])
            for i, j in model.buffers:
                if i == r:
                    model.came[i, j] = 0
                    model.buffers[i, j] = [0.0] * (VALUES + 1) if reset else model.buffers[i, j]
        elif act == "deliver":
            i, j = draw.choice(list(lines))
            if (i, j) not in model.lost:
                began = lines[i, j].edge.take()
                assert began == model.begin(i, j)
                if began and draw.random() < 0.8:  # else it stays under way
                    lost = draw.random() < 0.3
                    lines[i, j].deliver(lost)
                    if (j, i) in model.lost and model.edges[i, j]["flying"]:
                        model.drop(i, j)
                        continue
                    model.apply(i, j)
                    if lost:
                        model.holder[j] = None if model.holder[j] == i else model.holder[j]
                    else:
                        model.answered(i, j)
        elif act == "mutex":
            mutex_of_one(draw, real, model, lines, r)
        elif act == "write":  # by the optimizer
            real[r].x += 1
            model.x[r] = [v + 1 for v in model.x[r][:-1]] + model.x[r][-1:]
        elif act == "drop" and draw.random() < 0.2:
            j = draw.choice(list(real[r]._links.edges))
            if (r, j) not in model.lost:
                lines[r, j].edge.drop("the test")
                model.drop(r, j)
        compare(real, model)


def mutex_of_one(draw, real, model, lines, r):
    """Let a rank take or give back the mutex of a neighbour, if nothing else is under way there."""
    j = draw.choice(list(real[r]._links.edges))
    if (r, j) in model.lost or real[r].pending[j] or model.holder[j] not in (None, r):
        return
    asked = lines[r, j].edge.ask(UNLOCK if model.holder[j] == r or draw.random() < 0.1 else LOCK)
    assert lines[r, j].edge.take()
    lines[r, j].deliver()
    held = model.holder[j] == r
    assert asked.answer.kind == (FREE if asked.kind == UNLOCK and not held else DONE)
    model.holder[j] = r if asked.kind == LOCK else None


def compare(real, model):
    for r, each in enumerate(real):
        assert [*each.x.tolist(), each.p] == model.x[r]
        for i, j in model.buffers:
            if i == r:
                buffer, p = each._memory.buffers[j], each._memory.ps[j]
                assert [*buffer.tolist(), p] == model.buffers[i, j]
        assert each.versions == {j: n for (i, j), n in model.came.items() if i == r}
        pending = {
            j: len(e["flying"]) + len(e["waiting"]) + len(e["asks"]) + (e["asked"] is not None)
            for (i, j), e in model.edges.items() if i == r
        }  # fmt: skip
        assert each.pending == pending


def interleavings(monkeypatch, seeds):
    for seed in seeds:
        try:
            one_interleaving(monkeypatch, seed)
        except BaseException as error:
            raise AssertionError(f"the interleaving of seed {seed}") from error


def test_random_interleavings_equal_a_sequential_model(monkeypatch):
    interleavings(monkeypatch, range(200))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_10_000_random_interleavings_equal_a_sequential_model(monkeypatch):
    interleavings(monkeypatch, range(200, 10_200))


@pytest.mark.parametrize("drops", [False, True])
def test_push_sum_keeps_its_mass_and_its_mean_is_exact(monkeypatch, drops):
    """With delays, and duplicates or dropped edges, Σp = n, and every x/p is the mean."""
    draw, size = random.Random(1), 5
    topology = FromDigraph([(r, (r + d) % size) for r in range(size) for d in (1, 2)])
    real = windows(monkeypatch, size, topology, zero=True)
    lines = {(i, j): Connection(real, i, j) for i in range(size) for j in real[i]._links.edges}
    mean = sum(each.x.clone() for each in real) / size
    for round in range(1500):
        each = real[draw.randrange(size)]
        each.accumulate(self_weight=1 / 3, dst_weights=dict.fromkeys(each._row[2], 1 / 3), wait=False)
        for _ in range(draw.randrange(6)):
            line = draw.choice([*lines.values()])
            if line.edge.peer not in line.edge.memory.lost and line.edge.take():
                line.deliver(not drops and draw.random() < 0.3)
        draw.choice(real).collect()
        if drops and round in (100, 200):  # while messages wait; every rank still reaches all others
            at = (round // 100 - 1, round // 100)
            real[at[0]].accumulate(self_weight=0.5, dst_weights={at[1]: 0.5}, wait=False)
            assert real[at[0]].pending[at[1]] > 0
            lines[at].edge.drop("the test")
    deliver_all(lines, draw)
    for each in real:
        each.collect()
    assert sum(each.p for each in real) == pytest.approx(size, rel=1e-12)
    torch.testing.assert_close(sum(each.x for each in real) / size, mean, rtol=1e-12, atol=0)
    for each in real:
        torch.testing.assert_close(each.x / each.p, mean, rtol=1e-9, atol=0)


def test_accumulating_commutes(monkeypatch):
    """In whatever order the messages of two ranks are delivered, the buffers and the result are the same."""
    results = []
    for order in itertools.permutations([(0, 1), (0, 1), (2, 1), (2, 1)]):
        real = windows(monkeypatch, 3, Ring(), zero=True)
        lines = {pair: Connection(real, *pair) for pair in ((0, 1), (2, 1))}
        for pair in order:
            real[pair[0]].accumulate(dst_weights={1: 0.5}, self_weight=0.5, wait=False)
            assert lines[pair].edge.take()
            lines[pair].deliver()
        real[1].collect()
        results.append((real[1].x.tolist(), real[1].p))
    assert len(results) == 24 and all(each == results[0] for each in results)


def test_a_slow_edge_keeps_two_messages_however_many_calls_wait(monkeypatch):
    real = windows(monkeypatch, 2, Ring(), zero=True)
    line = Connection(real, 0, 1)
    for i in range(100):
        real[0].x.fill_(i)
        real[0].put(wait=False)
        if i == 0:
            line.edge.take()
    assert real[0].pending == {1: 100} and line.edge.waiting.count == 99
    line.deliver()
    assert real[1].versions == {0: 1} and real[1].fetch(0)[0].item() == 0
    line.edge.take()
    line.deliver()
    assert real[1].versions == {0: 100} and real[1].fetch(0)[0].item() == 99 and real[0].pending == {1: 0}
