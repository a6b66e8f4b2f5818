"""Optimizer steps by hand: they are torch's, whatever holds the weights, and skip what is not finite."""

import copy

import pytest
import torch
from drawn import SHAPES, values
from torch import nn

import baguakit as bk
from baguakit.primitives import adam_step_, adamw_step_, gradient_norm, lion_step_, sgd_step_

STEPS = 60
# Half-precision gradients and powers of two make every product that torch fuses with a sum exact.
COARSE_SGD = [
    {},
    {"weight_decay": 2**-6},
    {"momentum": 0.5},
    {"momentum": 0.5, "dampening": 0.5, "weight_decay": 2**-6},
    {"momentum": 0.5, "nesterov": True},
]


def zeros() -> list[torch.Tensor]:
    return [torch.zeros(shape) for shape in SHAPES]


def coarse_gradients(step: int) -> list[torch.Tensor]:
    """As many bits as bf16 has, so that their squares are exact."""
    return [g.bfloat16().float() for g in values(step + 1)]


def twins(kind, **options):
    """Weights for us, and parameters with torch's optimizer for them."""
    p = values()
    params = [nn.Parameter(x.clone()) for x in p]
    return p, params, kind(params, foreach=False, **options)


def give(params, grads) -> None:
    for p, g in zip(params, grads, strict=True):
        p.grad = g.clone()


@pytest.mark.parametrize("options", COARSE_SGD, ids=str)
def test_sgd_is_torchs_bit_for_bit_where_products_are_exact(options):
    """λ p is exact for λ a power of two; so are η, μ and 1 − d times anything."""
    p, params, optimizer = twins(torch.optim.SGD, lr=2**-4, **options)
    b = zeros() if "momentum" in options else None
    for step in range(STEPS):
        g = coarse_gradients(step)
        give(params, g)
        optimizer.step()
        sgd_step_(p, g, b, step, lr=2**-4, **options)
    assert all(map(torch.equal, p, params))
    if b is not None:
        assert all(torch.equal(x, optimizer.state[q]["momentum_buffer"]) for x, q in zip(b, params, strict=True))


@pytest.mark.parametrize("kind, ours", [(torch.optim.Adam, adam_step_), (torch.optim.AdamW, adamw_step_)])
def test_adams_states_are_torchs_bit_for_bit_where_products_are_exact(kind, ours):
    """β₂ v is one product in both, (1 − β₂) g² exact. Of the weights so is all but the root, which torch's library
    may round otherwise; with β₂ = 0 it is that of a square, and the weights are equal, too."""
    for beta2 in (0.75, 0.0):
        options = {"lr": 2**-6, "betas": (0.75, beta2), "weight_decay": 0.0}
        p, params, optimizer = twins(kind, **options)
        m, v = zeros(), zeros()
        for step in range(STEPS):
            g = coarse_gradients(step)
            give(params, g)
            optimizer.step()
            ours(p, g, m, v, step, **options)
        states = [optimizer.state[q] for q in params]
        assert all(torch.equal(x, s["exp_avg"]) for x, s in zip(m, states, strict=True))
        assert all(torch.equal(x, s["exp_avg_sq"]) for x, s in zip(v, states, strict=True))
        assert beta2 or all(map(torch.equal, p, params))


@pytest.mark.parametrize(
    "kind, ours, options",
    [
        (torch.optim.SGD, sgd_step_, {"lr": 0.1, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.02}),
        (torch.optim.SGD, sgd_step_, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.02}),
        (torch.optim.Adam, adam_step_, {"lr": 0.01, "weight_decay": 0.1}),
        (torch.optim.AdamW, adamw_step_, {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-5}),
    ],
    ids=lambda x: getattr(x, "__name__", None),
)
def test_they_are_torchs_in_fp64_up_to_roundings(kind, ours, options):
    """Against the same steps in fp64. Each step rounds to 2⁻²⁴ a dozen times, Adam in updates of size η."""
    p, _, _ = twins(kind, **options)
    exact = [nn.Parameter(x.double()) for x in p]
    optimizer = kind(exact, **options)
    remembered = (zeros(),) if kind is torch.optim.SGD else (zeros(), zeros())
    for step in range(STEPS):
        g = values(step + 1)
        give(exact, [x.double() for x in g])
        optimizer.step()
        ours(p, g, *remembered, step, **options)
    for x, q in zip(p, exact, strict=True):
        scale = max(1.0, float(q.detach().abs().max())) if q.numel() else 1.0
        assert ((x.double() - q).abs() <= 12 * STEPS * 2.0**-24 * scale).all()


def lion_by_the_paper(p, g, m, lr, beta1, beta2, decay):
    """Algorithm 2 of Chen et al., in fp64."""
    update = torch.sign(beta1 * m + (1 - beta1) * g)
    return p - lr * (update + decay * p), beta2 * m + (1 - beta2) * g


def test_lion_is_the_papers():
    p, m = values(), zeros()
    exact = [(x.double(), y.double()) for x, y in zip(p, m, strict=True)]
    for step in range(STEPS):
        g = values(step + 1)
        lion_step_(p, g, m, lr=0.01, betas=(0.9, 0.99), weight_decay=0.1)
        exact = [lion_by_the_paper(x, y.double(), z, 0.01, 0.9, 0.99, 0.1) for (x, z), y in zip(exact, g, strict=True)]
    for x, y, (q, z) in zip(p, m, exact, strict=True):
        torch.testing.assert_close(x.double(), q, rtol=0, atol=4 * STEPS * 2.0**-24 * 4)
        torch.testing.assert_close(y.double(), z, rtol=0, atol=4 * STEPS * 2.0**-24)


def test_a_list_is_a_flat_tensor_draws_included():
    """Tensors of a list and their concatenation take the same steps: positions are counted over all of them."""
    p, g = values(0, torch.bfloat16), values(1, torch.bfloat16)
    flat_p, flat_g = (torch.cat([x.flatten() for x in xs]) for xs in (p, g))
    m, v = zeros(), zeros()
    flat_m, flat_v = torch.zeros_like(flat_p, dtype=torch.float32), torch.zeros_like(flat_p, dtype=torch.float32)
    for step in range(5):
        adamw_step_(p, g, m, v, step, lr=1e-3, key=11)
        adamw_step_(flat_p, flat_g, flat_m, flat_v, step, lr=1e-3, key=11)
    assert torch.equal(torch.cat([x.flatten() for x in p]), flat_p)
    assert torch.equal(torch.cat([x.flatten() for x in m]), flat_m)


def test_masters_lose_nothing():
    """bf16 weights behind fp32 masters follow the steps of fp32 weights with the same gradients, rounded."""
    p, g = values(0, torch.bfloat16), values(1, torch.bfloat16)
    master, m, v = [x.float() for x in p], zeros(), zeros()
    plain, plain_m, plain_v = [x.float() for x in p], zeros(), zeros()
    for step in range(20):
        adam_step_(p, g, m, v, step, lr=1e-5, master=master)
        adam_step_(plain, g, plain_m, plain_v, step, lr=1e-5)
    assert all(map(torch.equal, master, plain))
    assert all(torch.equal(x, y.bfloat16()) for x, y in zip(p, plain, strict=True))


def test_numbers_may_be_tensors_and_a_count_is_advanced():
    options = {"grad_scale": 4.0, "clip": 0.5, "lr": 0.25}
    for count in (torch.tensor(0.0), torch.tensor(0), torch.tensor([0], dtype=torch.int32)):
        p, held_p, g = values(), values(), values(1)
        states, held_states = (zeros(), zeros()), (zeros(), zeros())
        for step in range(3):
            adam_step_(p, g, *states, step, **options)
            held = {name: torch.tensor(value) for name, value in options.items()}
            adam_step_(held_p, g, *held_states, count, **held, found_inf=count.new_zeros((), dtype=torch.float32))
        assert all(map(torch.equal, p, held_p)) and count.item() == 3


def test_clipping_and_scaling_without_looking():
    """A norm, a clip and a scaled loss on the device are the steps of clip_grad_norm_ and GradScaler."""
    p, params, optimizer = twins(torch.optim.SGD, lr=0.5)
    scale, found, count = torch.tensor(1024.0), torch.zeros(()), torch.tensor(0)
    for step in range(4):
        g = values(step + 1)
        give(params, g)
        nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
        scaled = [x * scale for x in g]
        norm = gradient_norm(scaled, found) / scale
        sgd_step_(
            p, scaled, None, count, lr=0.5, grad_scale=scale, clip=(1.0 / (norm + 1e-6)).clamp(max=1), found_inf=found
        )
    assert count == 4
    for x, q in zip(p, params, strict=True):
        torch.testing.assert_close(x, q.detach(), rtol=0, atol=4 * 8 * 2.0**-24)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_skipped_and_not_counted(bad):
    g, found, count = values(1), torch.zeros(()), torch.tensor(5)
    g[1][3] = bad
    p, m, v = values(), values(2), [x.abs() for x in values(3)]
    before = copy.deepcopy((p, m, v))
    gradient_norm(g, found)
    adamw_step_(p, g, m, v, count, found_inf=found)
    sgd_step_(p, g, m, count, lr=1.0, momentum=0.9, found_inf=found)
    lion_step_(p, g, m, count, found_inf=found)
    assert all(torch.equal(x, y) for xs, ys in zip((p, m, v), before, strict=True) for x, y in zip(xs, ys, strict=True))
    assert found == 1 and count == 5


def test_the_norm_is_that_of_all():
    g = values(1) + [x.bfloat16() for x in values(2)]
    exact = torch.cat([x.double().flatten() for x in g]).norm().float()
    assert torch.equal(gradient_norm(g), exact)
    assert torch.equal(gradient_norm(g[0]), g[0].double().norm().float())
    assert gradient_norm([torch.full((4,), 3e38)]).isinf()


def test_packed_gradients_are_those_that_were_packed():
    compressor, n = bk.compressors.MinMaxUInt8(64), 1000
    p, g = torch.randn(n), torch.randn(n)
    packed = compressor.compress(g.view(1, -1))
    q, m, v, qm, qv = p.clone(), *(torch.zeros(n) for _ in range(4))
    adamw_step_(p, None, m, v, 0, packed=packed, compressor=compressor)
    adamw_step_(q, compressor.decompress(packed, n)[0], qm, qv, 0)
    assert torch.equal(p, q) and torch.equal(m, qm) and torch.equal(v, qv)


def test_weights_have_a_new_version():
    """Flights land by it."""
    p, g = torch.ones(4), torch.ones(4)
    before = p._version
    sgd_step_(p, g, lr=0.1)
    assert p._version > before
