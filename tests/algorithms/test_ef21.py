"""EF21: the shared estimate is the mean of the ranks' own, and it tends to the mean gradient."""

import pytest
import torch
import torch.distributed as dist
from pool import ranks
from quadratics import Point, curvatures, minimum, optima

import baguakit as bk
from baguakit.algorithms.gradients import TrackedMean
from baguakit.compressors import MinMaxUInt8, Sign, TopK
from baguakit.stages import CompressedMean, Hierarchical, Mean, SparseMean

TOP = SparseMean(TopK(1 / 8, chunk=64))


def whole(rank, length=512):
    """Whole numbers, all different in size: their sums and the means of two or four are exact in fp32."""
    order = torch.randperm(length, generator=torch.Generator().manual_seed(rank))
    return (order + 1.0) * (1 - 2 * (order % 2))


def flown(stage, gradients):
    """Return after each flight the result, this rank's estimate, and the shared one."""
    comm = bk.Comm()
    state = stage.init(bk.Bucket.of(torch.zeros_like(gradients[0])), comm)
    found = []
    for t, g in enumerate(gradients):
        x = stage(g.clone(), state, comm.at(t)).clone()
        found.append((x, state["own"].clone(), state["mean"].clone()))
    return found


@pytest.mark.parametrize("n", [2, 4])
def test_a_lossless_compressor_gives_the_mean_bit_for_bit(n):
    def run():
        return flown(TrackedMean(SparseMean(TopK(1.0))), [whole(dist.get_rank() + n * t) for t in range(3)])

    for t, steps in enumerate(zip(*ranks(n, run), strict=True)):
        mean = sum(whole(rank + n * t) for rank in range(n)) / n
        for rank, (x, own, shared) in enumerate(steps):
            assert torch.equal(x, mean) and torch.equal(shared, mean) and torch.equal(own, whole(rank + n * t))


@pytest.mark.parametrize(
    "inner", [TOP, SparseMean(MinMaxUInt8(block=64)), SparseMean(Sign(block=64)), CompressedMean(MinMaxUInt8(block=64))]
)
@pytest.mark.parametrize("momentum", [0.0, 0.75])
def test_the_shared_estimate_is_the_mean_of_all(inner, momentum):
    """h = ⟨h_r⟩ after each step, in one hop and in two, up to the rounding of sums."""

    def run():
        draw = torch.Generator().manual_seed(dist.get_rank())
        return flown(TrackedMean(inner, momentum), [torch.randn(20_000, generator=draw) for _ in range(4)])

    for steps in zip(*ranks(3, run), strict=True):
        mean = sum(own for _, own, _ in steps) / 3
        for x, _, shared in steps:
            assert torch.equal(shared, steps[0][2]) and torch.equal(x, shared)
            torch.testing.assert_close(shared, mean, rtol=0, atol=2e-6)


@pytest.mark.parametrize("momentum", [0.0, 0.75])
def test_it_is_its_equation(momentum):
    """v ← μ v + (1 − μ) g;  h_r ← h_r + Q(v − h_r), where Q is what the others decompress: bit for bit."""

    def run():
        draw = torch.Generator().manual_seed(dist.get_rank())
        gradients = [torch.randn(1000, generator=draw) for _ in range(4)]
        for codec in (TOP.compressor, MinMaxUInt8(block=64)):
            v, h = torch.zeros(1000), torch.zeros(1000)
            for g, (_, own, _) in zip(
                gradients, flown(TrackedMean(SparseMean(codec), momentum), gradients), strict=True
            ):
                v = torch.add(v * momentum, g, alpha=1 - momentum) if momentum else g
                h = h + codec.decompress(codec.compress((v - h)[None]), 1000)[0]
                assert torch.equal(own, h), codec

    ranks(2, run)


def test_it_ends_at_the_minimum_where_error_feedback_does_not():
    """Each rank sends one of three values. A gradient that settles becomes known exactly; a residual never settles."""

    def run(rule):
        n, rank = dist.get_world_size(), dist.get_rank()
        model = Point(torch.zeros(3, dtype=torch.float64))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.15)
        with bk.attach(model, optimizer, rule):
            for _ in range(100):
                optimizer.zero_grad()
                model(float(curvatures(n)[rank]), optima(n)[rank]).backward()
                optimizer.step()
        return model.x.detach()

    tracked, fed_back = (ranks(2, run, rule)[0] for rule in (bk.algorithms.ef21(TopK(0.34)), bk.algorithms.top_k(0.34)))
    torch.testing.assert_close(tracked, minimum(2), rtol=0, atol=1e-6)  # h is fp32
    assert (fed_back - minimum(2)).abs().max() > 1e-3


def test_what_is_not_finite_is_passed_on_and_kept_by_none():
    def run():
        comm, stage = bk.Comm(), TrackedMean(TOP, 0.5)
        state = stage.init(bk.Bucket.of(torch.zeros(512)), comm)
        stage(whole(comm.rank), state, comm.at(0))
        held = {name: state[name].clone() for name in ("own", "mean", "v")}
        bad = whole(comm.rank)
        bad[17] = float("inf") if comm.rank == 1 else 0.0
        result = stage(bad, state, comm.at(1))
        same = all(torch.equal(state[name], value) and value.any() for name, value in held.items())
        return same and not result[17].isfinite()

    assert ranks(3, run) == [True] * 3


def test_what_cannot_be_tracked_is_refused():
    for inner in (Mean(), Hierarchical(TOP)):
        with pytest.raises(TypeError, match=r"TrackedMean tracks what a stage loses, and .* loses nothing"):
            TrackedMean(inner)
    for momentum in (1.0, -0.1, float("nan")):
        with pytest.raises(ValueError, match="momentum is a finite number"):
            bk.algorithms.ef21(momentum=momentum)
