"""Complex parameters train as the real pairs that they are: bit for bit, by every algorithm."""

import pytest
import torch
import torch.distributed as dist
from everything import ALGORITHMS, made, others_slow, runs_free, windows
from pool import ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import baguakit as bk

# Fragments are divided by layers, of which this network has none that is numbered.
REPEATABLE = [each for each in ALGORITHMS if not runs_free(made(each)) and "fragments" not in each]


class Spectral(nn.Module):
    """A network of complex layers, of complex parameters or of pairs of real ones."""

    def __init__(self, pairs):
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        shapes = {"first": (6, 10), "bias": (10,), "second": (10, 3), "factor": ()}
        for name, shape in shapes.items():
            values = torch.randn(*shape, 2, generator=draw) / 3
            self.register_parameter(name, nn.Parameter(values if pairs else torch.view_as_complex(values)))

    def forward(self, x):
        first, bias, second, factor = (p if p.is_complex() else torch.view_as_complex(p) for p in self.parameters())
        return (torch.tanh(x @ first + bias) @ second * factor).abs().square().mean()


def batch(step):
    draw = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(8, 6, dtype=torch.cfloat, generator=draw)


def real(x):
    return torch.view_as_real(x.detach()) if x.is_complex() else x.detach()


def weights(model):
    return torch.cat([real(p).flatten() for p in model.parameters()])


def trained(algorithm, pairs):
    """Train, resume, and return the weights, their distance and their mean."""
    model = Spectral(pairs)
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-4, momentum=0.5)  # products with complex ones are exact
    state = None
    for first, last in ((0, 3), (3, 6)):
        with bk.attach(model, optimizer, made(algorithm), broadcast=state is None) as att:
            if state is not None:
                att.load_state_dict(state)
            for step in range(first, last):
                optimizer.zero_grad(set_to_none=step % 2 == 0)
                model(batch(step)).backward()
                optimizer.step()
            state, apart = att.state_dict(), att.consensus_distance()
            if last == 6:
                found = [weights(model)]
                att.merge()
    return [*found, weights(model), torch.tensor(apart)]


@pytest.mark.parametrize("algorithm", others_slow(REPEATABLE, windows))
def test_complex_parameters_are_pairs(algorithm):
    def both():
        return trained(algorithm, False), trained(algorithm, True)

    for ours, theirs in ranks(2, both):
        assert all(torch.equal(*each) for each in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("wrapped", ["ddp", "fsdp", "fsdp across"])
@pytest.mark.parametrize("stage", ["Mean()", "ErrorFeedback(CompressedMean())"])
def test_the_hooks_of_ddp_and_fsdp_take_pairs(wrapped, stage):
    def gradients(pairs):
        model = Spectral(pairs)
        if wrapped == "ddp":
            model = nn.parallel.DistributedDataParallel(model)
            handle = bk.interop.ddp(model, made(stage))
        else:
            from torch.distributed.fsdp import fully_shard

            across = init_device_mesh("cpu", (2, 1), mesh_dim_names=("inter", "intra"))
            model.factor = nn.Parameter(model.factor.detach()[None])  # shards have a dimension
            fully_shard(model, mesh=across["intra"] if wrapped == "fsdp across" else init_device_mesh("cpu", (2,)))
            comm = bk.Comm(across.get_group("inter")) if wrapped == "fsdp across" else None
            handle = bk.interop.fsdp(model, made(stage), comm=comm)
        with handle:
            for step in range(3):
                model.zero_grad()
                model(batch(step)).backward()
                handle.load_state_dict(handle.state_dict())
        grads = [getattr(p.grad, "to_local", lambda p=p: p.grad)() for p in model.parameters()]
        return torch.cat([real(grad).flatten() for grad in grads])

    def both():
        return gradients(False), gradients(True)

    for ours, theirs in ranks(2, both):
        assert ours.any() and torch.equal(ours, theirs)


def test_a_bucket_of_complex_parameters():
    p = nn.Parameter(torch.randn(3, 4, dtype=torch.cfloat).t())
    bucket = bk.Bucket([p], multiple_of=16)
    assert bucket.flat.shape == (32,) and bucket.flat.dtype == torch.float32 and bucket.views[0].shape == (4, 3)
    p.grad = torch.randn(4, 3, dtype=torch.cfloat).conj()
    expected = p.grad.clone()
    assert torch.equal(bucket.load("grad")[:24], torch.view_as_real(expected.t().resolve_conj().contiguous()).flatten())
    bucket.store("grad")
    assert torch.equal(p.grad, expected) and p.grad.data_ptr() == bucket.flat.data_ptr()
    before = p.detach().clone()
    bucket.load("data").mul_(2)
    bucket.store("data", only=[True])
    assert torch.equal(p.detach(), 2 * before) and torch.equal(bucket.now(), bucket.flat)


def test_primitives_take_complex_tensors():
    def run():
        x = torch.full((2, 3), complex(1, dist.get_rank()), dtype=torch.cdouble)
        return bk.primitives.mean_(x, bk.Comm())

    assert all(torch.equal(x, torch.full((2, 3), 1 + 0.5j, dtype=torch.cdouble)) for x in ranks(2, run))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_other_dtypes_are_refused_by_name(dtype):
    def run():
        model = nn.Linear(2, 2)
        model.weight = nn.Parameter(torch.zeros(2, 2).to(dtype))
        words = f"parameter weight is of dtype {dtype}, which cannot be averaged; keep it in bfloat16"
        with pytest.raises(TypeError, match=words):
            bk.attach(model, None, bk.algorithms.gradient_allreduce(), broadcast=False)

    ranks(2, run)
