"""PowerSGD against its equations."""

import pytest
import torch
from pool import ranks
from training import train

import baguakit as bk
from baguakit.algorithms.power_sgd import orthonormal

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.mark.parametrize("n", [1, 2, 3])
def test_full_rank_power_sgd_is_the_mean(n):
    ours = ranks(n, train, lambda bk: [bk.algorithms.power_sgd(rank=16)], 6, torch.float64)
    exact = ranks(n, train, lambda bk: [bk.algorithms.gradient_allreduce()], 6, torch.float64)
    for a, b in zip(ours, exact, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=5e-5 if n > 1 else 0)
    assert all(torch.equal(ours[0], other) for other in ours)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n", [1, 2])
def test_power_sgd_says_of_each_value_what_it_lost(n, dtype):
    """mean(x − lost) = result. Nothing is lost of vectors, of padding, of two rows, and by a single rank."""

    def run():
        comm = bk.Comm()
        shapes = [(3,), (6, 5), (4,), (2, 7), (40, 1), (3, 2, 2)]
        bucket = bk.Bucket([torch.zeros(shape, dtype=dtype) for shape in shapes], multiple_of=64)
        stage = bk.algorithms.power_sgd(rank=2).stage.inner
        state = stage.init(bucket, comm)
        x = torch.randn(bucket.flat.shape, generator=torch.Generator().manual_seed(comm.rank)).to(dtype)
        lost = torch.full(x.shape, float("nan"))
        result = stage(x.clone(), state, comm, residual=lost)
        sent = comm.all_reduce(x.double() - lost.double()) / comm.size
        views = bk.Bucket.of(lost, bucket.params).views
        exact = [*(view for view in views if view.dim() == 1), lost[sum(view.numel() for view in views) :]]
        means = [float((result.double() - sent).abs().max()), *(float(piece.abs().max()) for piece in exact)]
        return means, [float(view.abs().max()) for view in views if view.dim() > 1]

    for (wrong, *exact), matrices in ranks(n, run):
        assert wrong < (1e-5 if dtype == torch.float32 else 2e-2)  # a product of fp32; and its rounding
        assert exact == [0.0] * 3
        assert [most > 0.1 for most in matrices] == ([True, False, True, True] if n > 1 else [False] * 4)


def test_power_sgd_wants_shapes():
    with pytest.raises(TypeError, match="needs the shapes"):
        bk.hierarchical(bk.algorithms.power_sgd())


STRIDES = {
    "contiguous": lambda: torch.zeros(40, 24),
    "transposed": lambda: torch.zeros(24, 40).t(),
    "transposed, many dimensions": lambda: torch.zeros(3, 5, 2, 12).permute(3, 2, 1, 0),
    "channels_last": lambda: torch.zeros(12, 5, 3, 3).to(memory_format=torch.channels_last),
    "channels_last_3d": lambda: torch.zeros(12, 5, 3, 1, 2).to(memory_format=torch.channels_last_3d),
    "rows between": lambda: torch.zeros(5, 12, 3, 2).permute(1, 2, 0, 3),
    "rows between, of one value": lambda: torch.zeros(5, 1, 7).transpose(0, 1),
    "with gaps": lambda: torch.zeros(40, 48)[:, ::2],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_rows_and_columns_are_those_that_the_user_sees(dtype):
    """Results do not depend on strides, and a gradient of rank one comes back unchanged."""

    def run(contiguous):
        comm, found = bk.Comm(), {}
        for name, make in STRIDES.items():
            param = make().to(dtype)
            params = [torch.zeros(3, dtype=dtype), param.contiguous() if contiguous else param]
            bucket = bk.Bucket(params, multiple_of=64)
            stage = bk.algorithms.power_sgd(rank=2).stage
            state = stage.init(bucket, comm)
            draw = torch.Generator().manual_seed(1 + comm.rank)
            results = []
            for round in range(3):
                bucket.views[1].copy_(torch.randn(param.shape, generator=draw, dtype=torch.float64))
                result = stage(bucket.flat.clone(), state, comm.at(round))
                for flat in (result, state["residual"]):
                    results.append(bk.Bucket.of(flat, params).views[1].double().contiguous())
            shape = (param.shape[0], -1)
            exact = (torch.arange(1.0, 1 + shape[0]).view(-1, 1) * torch.ones(param.shape).view(shape)).view(
                param.shape
            )
            bucket.views[1].copy_(exact)
            fresh = stage.init(bucket, comm)
            back = bk.Bucket.of(stage(bucket.flat.clone(), fresh, comm), params).views[1].double()
            found[name] = results, float((back - bucket.views[1].double()).abs().max() / shape[0])
        return found

    for ours, plain in zip(ranks(2, run, False), ranks(2, run, True), strict=True):
        for name, (results, wrong) in ours.items():
            assert wrong < (2e-2 if dtype == torch.bfloat16 else 1e-5), name
            for a, b in zip(results, plain[name][0], strict=True):
                bound = 0.1 if dtype == torch.bfloat16 else 1e-4  # sums in another order; and the rounding of results
                torch.testing.assert_close(a, b, rtol=0, atol=bound * float(b.abs().max()), msg=name)


def columns(shape, kind):
    """Columns of every rank that a step can bring."""
    p = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))
    if kind == "zero":
        p.zero_()
    elif kind == "dependent":
        p[:, -1] = p[:, 0]
    elif kind == "one column":
        p[:, 1:] = 0
    elif kind == "bfloat16":
        p = p.bfloat16().float()
    elif kind == "tiny":
        p *= 1e-30
    elif kind == "huge":
        p *= 1e18
    return p


KINDS = ("random", "zero", "dependent", "one column", "bfloat16", "tiny", "huge")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("together", [False, True])
def test_factors_are_orthonormal_whatever_the_rank_of_the_gradients(together, device):
    """QᵀQ = 1, and QQᵀP = P: columns that depend on others are completed, and nothing of the others is lost."""
    shapes = [(40, 4), (1, 1), (31, 2), (40, 2), (3, 3), (1000, 4)]
    given = [columns(shape, kind).to(device) for kind in KINDS for shape in shapes]
    before = [p.clone() for p in given]
    found = orthonormal(given, together)
    assert all(torch.equal(p, copy) for p, copy in zip(given, before, strict=True))
    for p, q in zip(given, found, strict=True):
        assert q.shape == p.shape
        p, q = p.double(), q.double()
        assert (q.T @ q - torch.eye(q.shape[1], device=device)).abs().max() < 1e-5
        assert (q @ (q.T @ p) - p).abs().max() <= 1e-5 * p.abs().max()


@pytest.mark.parametrize("device", DEVICES)
def test_together_is_one_by_one_with_one_call_for_each_shape(monkeypatch, device):
    given = [columns(shape, kind).to(device) for kind in KINDS for shape in [(40, 4), (31, 2), (64, 4)]]
    alone = orthonormal(given, together=False)
    factor, shapes = torch.linalg.qr, []
    monkeypatch.setattr(torch.linalg, "qr", lambda a: (shapes.append(tuple(a.shape)), factor(a))[1])
    together = orthonormal(given, together=True)
    assert shapes == [(7, 40, 4), (7, 31, 2), (7, 64, 4)]
    for a, b in zip(together, alone, strict=True):  # where memory lies changes the order of sums
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)
