"""Compiled models, activation checkpointing, sparse gradients and batch statistics."""

import shutil
import warnings

import pytest
import torch
import torch.distributed as dist
from everything import made, others_slow, usual, windows
from pool import ranks
from torch import nn
from torch.utils.checkpoint import checkpoint
from training import attached, batch, close, flat, loss, mean_loop, net, sgd

import baguakit as bk

GOSSIP = [lambda bk: bk.algorithms.decentralized(), lambda bk: bk.algorithms.decentralized(order="atc")]
ALL = [lambda bk: bk.algorithms.gradient_allreduce(), lambda bk: bk.algorithms.bytegrad(), *GOSSIP]


@pytest.mark.parametrize("algorithm", others_slow(usual().values(), windows))
def test_evaluation_is_undisturbed_and_compilation_whole(algorithm):
    """One frame, no graph break, whatever is attached; a forward in between launches nothing."""

    def run():
        import torch._dynamo
        from torch._dynamo.testing import CompileCounter

        torch._dynamo.reset()
        counter = CompileCounter()
        m = net()
        keys = list(m.state_dict())
        compiled = torch.compile(m, backend=counter, fullgraph=True)
        o = sgd(m.parameters())
        with bk.attach(m, o, made(algorithm)) as att:
            for step in range(4):
                o.zero_grad()
                x, y = batch(dist.get_rank(), step)
                (compiled(x) - y).square().mean().backward()
                o.step()
            flights = [row.flights for row in att.report().rows]
            with torch.no_grad():
                m(x)
            unchanged = flights == [row.flights for row in att.report().rows]
        return counter.frame_count, unchanged, keys == list(m.state_dict())

    for result in ranks(2, run):
        assert result == (1, True, True)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant):
    def backward(m, rank, step):
        x, y = batch(rank, step)
        x = m[1](m[0](x))
        x = checkpoint(lambda v: m[3](m[2](v)), x, use_reentrant=reentrant)
        (m[4](x) - y).square().mean().backward()

    def run():
        return attached(backward, bucket_bytes=100)

    for x in ranks(2, run):
        close(x, flat(mean_loop(2, lambda m, r, s: loss(m, r, s).backward())))


@pytest.mark.slow
@pytest.mark.parametrize(
    "backend",
    [
        "aot_eager",
        pytest.param("inductor", marks=[pytest.mark.slow, pytest.mark.timeout(300)]),  # calls a C++ compiler
    ],
)
def test_compiled_models_train_as_they_are(backend):
    """One graph for all steps, although weights change under it and gradients are views of buckets.

    Compiled, gradients come in another order, which buckets follow: a compressor gets one bucket here.
    """
    if backend == "inductor" and not (shutil.which("g++") or shutil.which("clang++")):
        pytest.skip("Inductor needs a C++ compiler")

    def run(algorithm, backend):
        import torch._dynamo
        from torch._dynamo.utils import counters

        def backward(m, rank, step):
            x, y = batch(rank, step)
            (forward(m)(x) - y).square().mean().backward()

        def forward(m):
            if backend is None:
                return m
            return compiled.setdefault(m, torch.compile(m, backend=backend, fullgraph=True))

        if backend == "inductor":
            warnings.simplefilter("ignore")  # its own imports warn
        torch._dynamo.reset()
        counters.clear()
        compiled = {}
        whole = "Compressed" in repr(algorithm(bk))
        weights = attached(backward, 6, algorithm=algorithm(bk), bucket_bytes=1 << 20 if whole else 300)
        return weights, counters["stats"]["unique_graphs"]

    for algorithm in ALL:
        theirs = ranks(2, run, algorithm, None)
        for (weights, graphs), (expected, _) in zip(ranks(2, run, algorithm, backend, limit=200), theirs, strict=True):
            close(weights, expected)
            assert graphs == 1


# Sparse gradients


def words(sparse=True):
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(20, 6, sparse=sparse), nn.Flatten(), nn.Linear(18, 1))


def sentence(rank, step):
    draw = torch.Generator().manual_seed(10 * step + rank)
    return torch.randint(20, (8, 3), generator=draw)


def test_sparse_gradients_are_refused_at_attach():
    def run():
        m = words()
        with pytest.raises(TypeError, match=r"the gradient of 0.weight is sparse .* of during_backward\(Mean\(\)\)"):
            bk.attach(m, torch.optim.SGD(m.parameters(), lr=0.1), bk.algorithms.gradient_allreduce())

    ranks(2, run)


def test_sparse_gradients_that_were_not_foreseen_are_refused_at_the_first_backward():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.ones(20, 1))

        def forward(self, x):
            return nn.functional.embedding(x, self.table, sparse=True)

    def run():
        m = Tied()
        o = torch.optim.SGD(m.parameters(), lr=0.1)
        with (
            pytest.raises(Exception, match="a bucket cannot hold a sparse gradient"),
            bk.attach(m, o, bk.algorithms.gradient_allreduce(), timeout=2),
        ):
            m(sentence(dist.get_rank(), 0)).sum().backward()

    ranks(2, run)


def test_sparse_gradients_are_left_to_a_rule_on_weights():
    """Weights averaged after every step of SGD: the table ends as if its dense gradients had been averaged."""

    def run(sparse):
        m = words(sparse)
        o = torch.optim.SGD(m.parameters(), lr=0.1)
        rules = [
            bk.during_backward(bk.stages.Mean(), where=lambda name, p: not sparse or name != "0.weight"),
            bk.after_step(bk.stages.Mean(), where=lambda name, p: name == "0.weight"),
        ]
        with bk.attach(m, o, rules):
            for step in range(4):
                o.zero_grad()
                m(sentence(dist.get_rank(), step)).square().mean().backward()
                o.step()
        return flat(m)

    for a, b in zip(ranks(2, run, True), ranks(2, run, False), strict=True):
        close(a, b)


# Batch statistics


def normalized(kind=nn.BatchNorm1d):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), kind(5), nn.Tanh(), nn.Linear(5, 1))


def test_batch_statistics_are_local_until_they_are_averaged():
    """They begin as on rank 0; `merge` makes them the mean, and so does a primitive in the loop; counts stay counts."""

    def run():
        rank = dist.get_rank()
        m = normalized()
        m[1].running_mean.fill_(rank + 1.0)
        o = sgd(m.parameters())
        with bk.attach(m, o, bk.algorithms.gradient_allreduce()) as att:
            began = m[1].running_mean.clone()
            loss(m, rank, 0).backward()
            o.step()
            mine = m[1].running_mean.clone(), m[1].running_var.clone()
            bk.primitives.mean_([b for b in m.buffers() if b.is_floating_point()], bk.Comm())
            by_hand = m[1].running_mean.clone(), m[1].running_var.clone()
            m[1].running_mean.copy_(mine[0])
            m[1].running_var.copy_(mine[1])
            att.merge()
        return began, mine, by_hand, (m[1].running_mean, m[1].running_var), int(m[1].num_batches_tracked)

    results = ranks(3, run)
    assert not torch.equal(results[0][1][0], results[1][1][0])
    for began, _, by_hand, merged, count in results:
        assert torch.equal(began, torch.ones(5)) and count == 1
        for i in range(2):
            mean = sum(mine[i] for _, mine, *_ in results) / 3
            close(by_hand[i], mean)
            close(merged[i], mean)
