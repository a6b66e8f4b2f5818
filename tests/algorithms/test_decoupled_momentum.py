"""DeMo: cosines of blocks, the largest of which leave the momentum."""

import pytest
import torch
import torch.distributed as dist
from pool import ranks
from torch import nn
from training import flat, loss, net, train

import baguakit as bk
from baguakit.algorithms.signs import (
    InCosines,
    cosines,
    transform_,
)
from baguakit.compressors import TopK
from baguakit.stages import ErrorFeedback, Mean, SparseMean

CPU = torch.device("cpu")
SHAPES = [(64,), (128, 192), (7, 5), (), (0, 3), (127,), (6, 1, 4, 2)]


def parameters(shapes=SHAPES):
    return [nn.Parameter(torch.zeros(shape)) for shape in shapes]


def layout_of(bucket):
    return InCosines(Mean()).init(bucket, bk.Comm())["layout"]


def drawn(length, *seed):
    return torch.randn(length, generator=torch.Generator().manual_seed(sum(s * 1000**i for i, s in enumerate(seed))))


def test_the_sides_of_blocks_divide():
    def run():
        lengths = (0, 1, 7, 64, 67, 96, 100, 128, 768, 50257)
        return [layout_of(bk.Bucket([torch.zeros(n)]))[0].shape[3] for n in lengths]

    assert ranks(1, run) == [[1, 1, 7, 64, 1, 48, 50, 64, 64, 29]]


@pytest.mark.parametrize("side", [1, 2, 5, 64])
def test_cosines_are_orthonormal(side):
    c = cosines(side, CPU, torch.float64)
    torch.testing.assert_close(c @ c.T, torch.eye(side, dtype=torch.float64), rtol=0, atol=1e-14)
    assert (c[0] > 0).all() and torch.equal(cosines(side, CPU), c.float())


def test_blocks_are_transformed_each_by_itself_the_largest_first():
    def run():
        bucket = bk.Bucket([*parameters(), parameters([(32, 64)])[0].t(), parameters([(8, 4, 3, 3)])[0].to(
            memory_format=torch.channels_last)], multiple_of=1000)  # fmt: skip
        layout, x = layout_of(bucket), drawn(bucket.flat.numel(), 1)
        x[bucket.flat.numel() - bucket.padding.numel() :] = 0
        sides = [tuple(each.shape[2:]) for each in layout]
        assert sides == [(64, 64), (32, 64), (8, 36), (1, 64), (6, 8), (7, 5), (1, 1), (1, 1), (1, 1)]
        u = torch.empty_like(x)
        transform_(x, u, layout)
        weight = x[64 : 64 + 128 * 192].view(128, 192)
        c, at = cosines(64, CPU, torch.float64), 0
        for i in range(2):
            for j in range(3):
                block = weight[64 * i : 64 * i + 64, 64 * j : 64 * j + 64].double()
                assert torch.allclose(u[at : at + 4096].view(64, 64).double(), c @ block @ c.T, rtol=0, atol=1e-5)
                at += 4096
        back = torch.full_like(x, torch.nan)
        transform_(back, u, layout, back=True)
        torch.testing.assert_close(back, x, rtol=0, atol=2e-6)
        torch.testing.assert_close(u.norm(), x.norm())

    ranks(1, run)


def test_where_blocks_are_single_values_it_is_sparse_error_feedback():
    """Of vectors of prime length T is the identity: `top_k` with that decay, bit for bit."""

    def run(rule):
        bucket, comm = bk.Bucket(parameters([(127,), (1009,)])), bk.Comm()
        state = rule.stage.init(bucket, comm)
        return torch.stack([rule.stage(drawn(1136, comm.rank, t), state, comm.at(t)).clone() for t in range(4)])

    ours = ranks(2, run, bk.algorithms.decoupled_momentum(0.1, 0.9, sign=False))
    theirs = ranks(2, run, bk.algorithms.top_k(0.1, decay=0.9))
    signs = ranks(2, run, bk.algorithms.decoupled_momentum(0.1, 0.9))
    for a, b, c in zip(ours, theirs, signs, strict=True):
        assert torch.equal(a, b) and torch.equal(a.sign(), c)


def test_it_is_its_equation():
    """m ← β m + g;  q ← top(T m);  m ← m − Tᵀ q;  d ← Tᵀ ⟨q⟩, in fp64; and T m − q has nothing in the places of q."""

    def run():
        bucket, comm, codec = bk.Bucket(parameters([(128, 64), (64,)])), bk.Comm(), TopK(1 / 128)
        stage = ErrorFeedback(InCosines(SparseMean(codec)), decay=0.9)
        state, found = stage.init(bucket, comm), []
        for t in range(3):
            d = stage(drawn(bucket.flat.numel(), comm.rank, t), state, comm.at(t)).clone()
            found.append((d, state["residual"].clone()))
        return found

    found, c = ranks(2, run), cosines(64, CPU, torch.float64)
    m = [torch.zeros(128, 64, dtype=torch.float64) for _ in range(2)]
    for t in range(3):
        q = []
        for rank in range(2):
            m[rank] = 0.9 * m[rank] + drawn(128 * 64 + 64, rank, t)[: 128 * 64].view(128, 64)
            u = torch.stack([c @ block @ c.T for block in m[rank].split(64)]).view(2, -1)
            kept = torch.zeros_like(u).scatter_(1, u.abs().topk(32).indices, 1.0)
            q.append(torch.cat([c.T @ block.view(64, 64) @ c for block in u * kept]))
            m[rank] = m[rank] - q[rank]
        for rank, steps in enumerate(found):
            d, residual = (each[: 128 * 64].view(128, 64).double() for each in steps[t])
            torch.testing.assert_close(residual, m[rank], rtol=0, atol=1e-5)
            torch.testing.assert_close(d, (q[0] + q[1]) / 2, rtol=0, atol=1e-5)


def trained(scale=1.0, **options):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with bk.attach(model, optimizer, bk.algorithms.decoupled_momentum(0.1, **options), bucket_bytes=300):
        for step in range(8):
            optimizer.zero_grad()
            (scale * loss(model, dist.get_rank(), step)).backward()
            optimizer.step()
    return flat(model)


def test_replicas_are_equal_and_the_scale_of_the_loss_changes_nothing():
    def run():
        return trained(), trained(2.0**12), trained(2.0**-12)

    found = [each for rank in ranks(3, run) for each in rank]
    assert all(torch.equal(found[0], each) for each in found)


def test_what_has_no_blocks_is_refused():
    for inner in (ErrorFeedback(SparseMean(TopK(0.1))), InCosines(Mean())):
        with pytest.raises(TypeError, match="InCosines gives coefficients without shapes to a stage that remembers no"):
            InCosines(inner)
    with pytest.raises(TypeError, match="needs the shapes of parameters"):
        bk.hierarchical(bk.algorithms.decoupled_momentum())
    with pytest.raises(ValueError, match="beta is a finite number, 0 to 1, not"):
        bk.algorithms.decoupled_momentum(beta=1.5)

    def run():
        with pytest.raises(ValueError, match="works on matrices and was given a bare tensor"):
            InCosines(Mean()).init(bk.Bucket.of(torch.zeros(64)), bk.Comm())
        return train(lambda bk: [bk.during_backward(InCosines(Mean()))]), train(lambda bk: [bk.during_backward(Mean())])

    for ours, theirs in ranks(2, run):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
