"""One variant of every kernel, executed as PTX, equals the definition: run with `--ptx ARCH` (test_executed_here.py).

All other tests of kernels run with `--ptx`, too; these take seconds.
"""

import pkgutil

import pytest
import torch
from formats import DTYPES, KEY, MINMAX, definition, kernels, sample
from hostile import hostile, same

import baguakit.kernels
from baguakit.kernels import mixing, topk
from baguakit.kernels.steps import definition as steps
from baguakit.kernels.steps import operators as steps_table

pytest.importorskip("triton")
ROWS, LENGTH, BLOCK = 2, 2500, 512  # tiles that are full, and one that is not
SUBNORMAL = 1e-41


@pytest.fixture(autouse=True)
def only_executed(request):
    if not request.config.getoption("ptx"):
        pytest.skip("runs with --ptx")


def test_formats():
    codec, kernel = definition(MINMAX), kernels(MINMAX)
    x = torch.stack([hostile("broken", LENGTH), hostile("constant", LENGTH)])
    lost, ours = torch.empty(ROWS, LENGTH), torch.empty(ROWS, LENGTH)
    packed = codec.compress(x, BLOCK, lost, KEY)
    assert torch.equal(kernel.compress(x, BLOCK, ours, KEY), packed) and same(ours, lost)
    out, ours = torch.empty(ROWS, LENGTH), torch.empty(ROWS, LENGTH)
    codec.decompress_(out, packed, BLOCK)
    kernel.decompress_(ours, packed, BLOCK)
    assert same(ours, out)
    total, weights = sample(1, LENGTH, seed=1)[0], torch.rand(ROWS)
    ours = total.clone()
    codec.add_(total, packed, weights, BLOCK)
    kernel.add_(ours, packed, weights, BLOCK)
    assert same(ours, total)
    residual = torch.randn(LENGTH)
    ours = residual.clone()
    sent = codec.reduce(packed, LENGTH, BLOCK, residual, KEY)
    assert torch.equal(kernel.reduce(packed, LENGTH, BLOCK, ours, KEY), sent) and same(ours, residual)


def test_mixing_and_landing():
    from baguakit.kernels import mixing_gpu as gpu

    x, y, z = (hostile(kind, 5000, torch.bfloat16) for kind in ("broken", "many scales", "largest"))
    ours = x.clone()
    mixing.mix_(x, [y, z], [0.5, 0.25, -0.75])
    gpu.mix_(ours, [y, z], [0.5, 0.25, -0.75])
    assert same(ours, x)
    before, result = hostile("broken", 5000, seed=3), hostile("broken", 5000, seed=4)
    landed = torch.where(torch.arange(5000) % 3 == 0, before * 3, before)
    ours = landed.clone()
    mixing.land_(landed, result, before)
    gpu.land_(ours, result, before)
    assert same(ours, landed)


def test_the_largest_values():
    from baguakit.kernels import topk_gpu as gpu

    x, residual, ours = hostile("broken", 4099)[None], torch.empty(1, 4099), torch.empty(1, 4099)
    expected, found = topk.select(x, 1024, 70, 2, residual), gpu.select(x, 1024, 70, 2, ours)
    assert all(map(same, found, expected)) and same(ours, residual)


def test_steps_and_norms():
    from baguakit.kernels.steps import gpu

    def tensors():
        source = torch.Generator().manual_seed(0)
        made = [[torch.rand(n, generator=source) for n in (1100, 0, 1)] for _ in "pguv"]
        made[1][0][::50], made[1][0][7] = SUBNORMAL, -0.0
        return made

    (p, g, *states), (ours, gradients, *others) = tensors(), tensors()
    conditions = {"lr": 0.1, "taken": torch.tensor(6.0), "clip": torch.tensor(0.7)}
    rule = steps.Adam(weight_decay=0.1, decoupled=True)
    steps.step_(
        rule, steps.Operands(p, g, tuple(states), []), steps.Conditions(**conditions | {"taken": torch.tensor(6.0)})
    )
    kinds = [(torch.float32, torch.float32, False)] * 3
    plan = steps_table.tables_of(kinds, {"p": ours, "g": gradients} | dict(zip("uv", others, strict=True)))
    gpu.step_(rule, plan, steps.Conditions(**conditions))
    assert all(same(a, b) for a, b in zip([*p, *states[0], *states[1]], [*ours, *others[0], *others[1]], strict=True))
    norms = torch.empty(()), torch.empty(())
    steps.gradient_norm_(norms[0], g, None)
    gpu.gradient_norm_(norms[1], steps_table.tables_of(kinds, {"g": gradients}, steps_table.SUM_TILE), None)
    assert same(*norms)


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_without_values(dtype):
    from baguakit.kernels import mixing_gpu as gpu

    kernel, empty = kernels(MINMAX), torch.empty(2, 0, dtype=dtype)
    assert kernel.compress(empty, BLOCK).shape == definition(MINMAX).compress(empty, BLOCK).shape
    kernel.decompress_(empty, kernel.compress(empty, BLOCK), BLOCK)
    gpu.land_(empty[0], empty[0], empty[1])


def test_no_kernel_was_left_out(executed_gpu):
    """Those above launch all kernels that there are."""
    import importlib

    from triton.runtime import JITFunction

    found = pkgutil.walk_packages(baguakit.kernels.__path__, "baguakit.kernels.")
    modules = [importlib.import_module(each.name) for each in found if each.name.endswith(("gpu", "launch"))]
    every = {name for module in modules for name, each in vars(module).items() if isinstance(each, JITFunction)}
    launched = {each.name for each in executed_gpu.launches}
    assert launched == {name for name in every if name.endswith("_kernel")}
