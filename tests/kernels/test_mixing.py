"""Mixing and landing: what their equations say, and that the kernels equal the definition to the bit."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from hostile import KINDS, difference, hostile
from tiers import slow_after

from baguakit.kernels import cpu, mixing, mixing_cpu, operators

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
LENGTHS = (0, 1, 2047, 2048, 2049, 5000)  # a tile is 2048
WILD = (float("nan"), float("inf"), -float("inf"), -0.0, 1e-45, 3e38)


def drawn(n: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Values of many scales, with zeros."""
    source = torch.Generator().manual_seed(seed)
    x = torch.randn(n, generator=source, dtype=torch.float64) * 10 ** torch.randn(n, generator=source)
    x[::7] = 0
    return x.to(dtype)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal to the bit, where one NaN is as good as another."""
    a, b = a.cpu(), b.cpu()
    if not torch.equal(a.isnan(), b.isnan()):
        return False
    return torch.equal(*(t.masked_fill(a.isnan(), 1.0).view(torch.uint8) for t in (a, b))) if a.numel() else True


# Triton's interpreter rounds a product and its sum twice. Here they are rounded once, as GPUs do.


def fused(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    a, b, c = np.broadcast_arrays(a, b, c)
    with np.errstate(all="ignore"):
        if c.dtype == np.float64:
            rounded_twice, exact = a * b + c, np.frompyfunc(_exactly, 3, 1)
            finite = np.isfinite(rounded_twice)
            rounded_twice[finite] = exact(a[finite], b[finite], c[finite]).astype(np.float64)
            return rounded_twice
        # The product is exact in fp64. Its sum is rounded to odd there, after which rounding to fp32 errs no further.
        product, c = a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64)
        near = product + c
        back = near - product
        lost = (product - (near - back)) + (c - back)
        bits = near.view(np.int64)
        toward = np.where((lost > 0) == (near > 0), 1, -1)
        odd = np.where((lost != 0) & np.isfinite(near) & (bits & 1 == 0), bits + toward, bits)
        return odd.view(np.float64).astype(np.float32)


def _exactly(a: float, b: float, c: float) -> float:
    if a == 0 or b == 0:
        return a * b + c  # zeros have signs, which fractions have not
    return float(Fraction(a) * Fraction(b) + Fraction(c))


@pytest.fixture
def kernels(monkeypatch):
    from triton.runtime import interpreter

    from baguakit.kernels import mixing_gpu as mixing_triton

    def create_fma(self, x, y, z):
        return interpreter.TensorHandle(fused(x.data, y.data, z.data), z.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_fma", create_fma)
    return mixing_triton


# The equations.


def test_a_product_and_its_sum_are_rounded_once():
    x, y = drawn(4099, torch.float32, 0), drawn(4099, torch.float32, 1)
    expected = fused(y.numpy(), np.float32(0.3), x.numpy() * np.float32(0.7))
    mixing.mix_(x, [y], [0.7, 0.3])
    assert np.array_equal(x.numpy(), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [0, 1, 3, 9])
def test_mixing_is_a_loop_over_the_tensors(dtype, count):
    x, *others = (drawn(2053, dtype, seed) for seed in range(count + 1))
    weights = torch.linspace(0.1, 0.9, count + 1).tolist()
    total = x.double() if dtype == torch.float64 else x.float()
    total = total * weights[0]
    for other, weight in zip(others, weights[1:], strict=True):
        total = total.add(other, alpha=weight)
    mixing.mix_(x, others, weights)
    assert torch.equal(x, total.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_landing_replaces_what_has_not_moved_and_keeps_what_has(dtype):
    before, result = drawn(1033, dtype, 0), drawn(1033, dtype, 1)
    x = before.clone()
    mixing.land_(x, result, before)
    assert torch.equal(x, result)
    x = before.clone()
    x[5::9] += 1
    expected = torch.where(x == before, result, x + (result - before))
    mixing.land_(x, result, before)
    assert torch.equal(x, expected) and not torch.equal(x, result)


def test_landing_never_hides_a_nan():
    nan = float("nan")
    x, result, before = torch.tensor([nan, nan, 1, 1]), torch.tensor([2, 2, nan, 2.0]), torch.tensor([nan, 1, 1, nan])
    operators.land_(x, result, before, None)
    assert x.isnan().all()


# The kernels.


@pytest.mark.parametrize("dtype", slow_after(2, DTYPES))
@pytest.mark.parametrize("count", [0, 1, 2, 8, 17])
def test_mix_kernel_equals_the_definition(dtype, count, kernels, device):
    for n in LENGTHS if dtype != torch.float64 else (0, 1, 2049):  # fractions are slow
        x, *others = (drawn(n, dtype, seed) for seed in range(count + 1))
        weights = torch.linspace(-0.3, 0.9, count + 1).tolist()
        ours, theirs = x.to(device).clone(), [other.to(device) for other in others]
        kernels.mix_(ours, theirs, weights)
        mixing.mix_(x, others, weights)
        assert same(ours, x)


@pytest.mark.parametrize("good", [None, True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_land_kernel_equals_the_definition(dtype, good, kernels, device):
    for n in LENGTHS:
        before, result = drawn(n, dtype, 0), drawn(n, dtype, 1)
        x = before.clone()
        x[::3] *= 3
        ours, moved = x.to(device).clone(), x.clone()
        flags = [None if good is None else torch.tensor(good, device=where) for where in (device, "cpu")]
        kernels.land_(ours, result.to(device), before.to(device), flags[0])
        mixing.land_(x, result, before, flags[1])
        assert same(ours, x) and (good is not False or same(x, moved))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, from the interpreter
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernels_equal_the_definition_at_the_ends_of_the_range(dtype, kernels, device):
    values = torch.tensor(WILD, dtype=torch.float64).to(dtype)
    x, y, z = (t.flatten().contiguous() for t in torch.meshgrid(values, values, values, indexing="ij"))
    for weights in ([0.5, 0.25, 0.25], [0.0, 1.0, -1.0], [1.0, 2.0, 0.0]):
        mixed, ours = x.clone(), x.to(device).clone()
        mixing.mix_(mixed, [y, z], weights)
        kernels.mix_(ours, [y.to(device), z.to(device)], weights)
        assert same(ours, mixed)
    landed, ours = x.clone(), x.to(device).clone()
    mixing.land_(landed, y, z)
    kernels.land_(ours, y.to(device), z.to(device))
    assert same(ours, landed)


# The kernels in C.


@pytest.fixture
def library():
    if cpu.functions("mixing") is None:
        pytest.skip("there is no C compiler")


@pytest.mark.parametrize("dtype", DTYPES)
def test_c_equals_the_definition_on_hostile_values(dtype, library):
    for n in (0, 1, 15, 17, 1023, 1024, 1025, 5000):  # a run is 1024
        for count in range(4):
            for first in range(len(KINDS)):
                kinds = [KINDS[(first + i * (1 + count)) % len(KINDS)] for i in range(count + 1)]
                x, *others = (hostile(kind, max(n, 1), dtype, i)[:n].clone() for i, kind in enumerate(kinds))
                weights = [0.3, -1.0, 1.0, 0.0][: count + 1]
                ours = x.clone()
                mixing_cpu.mix_(ours, others, weights)
                mixing.mix_(x, others, weights)
                assert not difference(ours, x), (n, kinds)
                if count == 2:
                    lands_alike(torch.where(torch.arange(n) % 3 == 0, x, others[1]), *others)


def lands_alike(x, result, before):
    for good in (None, torch.tensor(True), torch.tensor(False)):
        ours, theirs = x.clone(), x.clone()
        mixing_cpu.land_(ours, result, before, good)
        mixing.land_(theirs, result, before, good)
        assert not difference(ours, theirs)


@pytest.mark.parametrize("dtype", DTYPES)
def test_c_equals_the_definition_on_several_threads(dtype, library, monkeypatch):
    monkeypatch.setattr(cpu, "threads", lambda values: 3)
    x, *others = (drawn(1 << 16, dtype, seed) for seed in range(3))
    ours = x.clone()
    mixing_cpu.mix_(ours, others, [0.5, 0.3, 0.2])
    mixing.mix_(x, others, [0.5, 0.3, 0.2])
    assert same(ours, x)
    lands_alike(x, *others)


def test_writes_of_c_are_counted(library):
    x, y = torch.zeros(3), torch.ones(3)
    for operation in (lambda: operators.mix_(x, [y], [0.5, 0.5]), lambda: operators.land_(x, y, y + 1, None)):
        before = x._version
        operation()
        assert x._version > before


# The operators.


def test_what_is_not_one_run_of_memory_lands_as_well(device):
    before = drawn(48, torch.float32, 0).view(6, 8).to(device)
    x, result = before.t().clone().t(), torch.ones(6, 8, dtype=torch.float64, device=device)
    x[2] += 1
    expected = torch.where(x == before, result, x + (result - before)).float()
    operators.land_(x, result, before, None)
    assert torch.equal(x, expected)
    point = torch.tensor(2.0, device=device)
    operators.land_(point, point + 1, point.clone(), None)
    assert point == 3


def test_operators_keep_the_rules_of_operators(device, monkeypatch):
    monkeypatch.undo()
    x, y = torch.ones(9, device=device), torch.zeros(9, device=device)
    torch.library.opcheck(operators.mix_.registered, (x, [y], [0.5, 0.5]))
    torch.library.opcheck(operators.land_.registered, (x, y, y.clone(), torch.tensor(True, device=device)))
