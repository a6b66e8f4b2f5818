"""Weights that are chosen for each round, in hooks: what a flight uses is what was chosen when it was launched."""

import pytest
import torch
import torch.distributed as dist
from pool import ranks
from torch import nn
from training import flat, loss, net, simulate

import baguakit as bk

N, STEPS = 3, 6


def matrix(round):
    """One of a sequence of doubly stochastic matrices: a share is kept, and the rest goes to one other rank."""
    keep, shift = (0.5, 0.25, 0.75)[round % 3], 1 + round % 2
    w = torch.eye(N, dtype=torch.float64) * keep
    for r in range(N):
        w[r, (r + shift) % N] += 1 - keep
    return w


def choose(graph, rank, round, form=0):
    """The row of this rank, said in one of the ways in which it can be."""
    w = matrix(round)
    src = {j: float(w[rank, j]) for j in range(N) if j != rank and w[rank, j]}
    dst = [i for i in range(N) if i != rank and w[i, rank]]
    if form == 2:
        src, dst = {j: 2 * weight for j, weight in src.items()}, dict.fromkeys(dst, 0.5)
    graph.choose(src_weights=src, self_weight=float(w[rank, rank]), dst_weights=None if form == 1 else dst)


def optimizer_of(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def train(rule, before_attach=False, **options):
    """Train with `rule(bk, graph)`; every second choice holds for two rounds, and junk is chosen in between."""
    rank, graph, model = dist.get_rank(), bk.topology.Chosen(), net(torch.float64)
    optimizer = optimizer_of(model)
    if before_attach:
        choose(graph, rank, 0)
    with bk.attach(model, optimizer, rule(bk, graph), bucket_bytes=200, **options) as att:
        for step in range(STEPS):
            graph.choose(src_weights={}, dst_weights=[])  # what flies already does not look
            optimizer.zero_grad()
            if not before_attach:
                choose(graph, rank, step, step % 3)
            loss(model, rank, step).backward()
            if before_attach:
                choose(graph, rank, step + 1, step % 3)
            optimizer.step()
        assert len(att.report().rows) > 2
    return flat(model)


WINDOWS = {
    "atc": (lambda bk, graph: bk.algorithms.decentralized(graph, order="atc"), False, lambda w, x, d: w @ (x - d)),
    "awc": (lambda bk, graph: bk.algorithms.decentralized(graph, order="awc"), True, lambda w, x, d: w @ x - d),
}


@pytest.mark.parametrize("name", WINDOWS)
def test_training_is_its_matrix_equation(name):
    rule, before_attach, equation = WINDOWS[name]
    expected = simulate(N, lambda step, x, d: equation(matrix(step), x, d), STEPS)
    for rank, weights in enumerate(ranks(N, train, rule, before_attach)):
        torch.testing.assert_close(weights, expected[rank], rtol=0, atol=1e-13)


def test_gradients_and_results_that_land_later():
    """On gradients all buckets of a backward take what was chosen at the first; a delayed flight what it left with."""

    def run():
        rank, graph, model = dist.get_rank(), bk.topology.Chosen(), net(torch.float64)
        late = bk.topology.Chosen()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        rules = bk.during_backward(bk.stages.NeighborMean(graph)), bk.after_step(bk.stages.NeighborMean(late), delay=1)
        # In the middle of backward, when some buckets have been launched.
        model[2].weight.register_post_accumulate_grad_hook(lambda p: graph.choose(src_weights={}, dst_weights=[]))
        with bk.attach(model, optimizer, *rules, bucket_bytes=200):
            for step in range(STEPS):
                choose(late, rank, step + 1)
                choose(graph, rank, step)
                optimizer.zero_grad()
                loss(model, rank, step).backward()
                optimizer.step()
        return flat(model)

    x, flown = torch.stack([flat(net(torch.float64))] * N), None
    for step in range(STEPS):
        models = [net(torch.float64) for _ in range(N)]
        for rank, model in enumerate(models):
            nn.utils.vector_to_parameters(x[rank].clone(), model.parameters())
            loss(model, rank, step).backward()
        g = torch.stack([torch.cat([p.grad.flatten() for p in model.parameters()]) for model in models])
        x = x - 0.05 * matrix(step) @ g
        if flown is not None:
            x = x + flown
        flown = matrix(step + 1) @ x - x
    for rank, weights in enumerate(ranks(N, run)):
        torch.testing.assert_close(weights, x[rank], rtol=0, atol=1e-13)


def test_ranks_that_disagree_are_named_on_all():
    def run():
        rank, graph, model = dist.get_rank(), bk.topology.Chosen(), net()
        optimizer = optimizer_of(model)
        choose(graph, rank, 0)
        rule = bk.algorithms.decentralized(graph, order="atc")
        with pytest.raises(RuntimeError) as caught, bk.attach(model, optimizer, rule):
            for step in range(3):
                if (rank, step) == (1, 1):
                    graph.choose(src_weights={}, dst_weights=[0])
                loss(model, rank, step).backward()
                optimizer.step()
        return str(caught.value)

    for said in ranks(N, run):
        assert "rank 2 sends to rank 1" in said or "rank 1 hears" in said, said


def test_who_has_run_out_would_not_choose():
    def run():
        model, graph = net(), bk.topology.Chosen()
        rule = bk.algorithms.decentralized(graph, order="atc")
        att, says = bk.attach(model, optimizer_of(model), rule), "one that has run out of batches would choose no more"
        with pytest.raises(ValueError, match=says), att.join():
            pass
        att.detach()
        with pytest.raises(ValueError, match="a hook does not name it"):
            bk.interop.ddp(nn.parallel.DistributedDataParallel(model), bk.stages.NeighborMean(graph), bk.Comm())

    ranks(2, run)
