"""The theorems of the format, shown of its definition."""

import hashlib

import numpy as np
import pytest
import torch
from formats import KEY, MINMAX, definition, of_any_scale, sample
from hypothesis import given, settings
from hypothesis import strategies as st

from baguakit.kernels import noise

codec = definition(MINMAX)
LARGEST = float(np.float32(3.38e38))  # a level half a step beyond is still finite


def round_trip(x: torch.Tensor, block: int, key: int | None = None) -> torch.Tensor:
    out = torch.empty_like(x)
    codec.decompress_(out, codec.compress(x, block, None, key), block)
    return out


# The format.

wild = st.floats(min_value=-LARGEST, max_value=LARGEST, width=32, allow_subnormal=True)


@st.composite
def near_constant(draw):
    """An offset, and values a few ulps from it: the grid's integers exceed 2²⁴."""
    offset = np.float32(draw(wild)).view(np.int32) & ~np.int32(0xFFF)
    steps = draw(st.lists(st.integers(0, 0xFFF if draw(st.booleans()) else 3), min_size=1, max_size=70))
    values = np.array([offset + step for step in steps], np.int32).view(np.float32)
    return [float(v) for v in values if abs(v) <= LARGEST] or [0.0]


@settings(max_examples=150, deadline=None)
@given(of_any_scale(LARGEST) | near_constant())
def test_error_is_at_most_half_a_step_and_a_few_ulps(values):
    x = torch.tensor([values], dtype=torch.float32)
    residual = torch.empty_like(x)
    packed = codec.compress(x, 64, residual)
    decoded = torch.empty_like(x)
    codec.decompress_(decoded, packed, 64)
    for block, read in zip(x[0].split(64), decoded[0].split(64), strict=True):
        low, high = block.double().min(), block.double().max()
        ulp = block.double().abs().max() * 2.0**-23 + 2.0**-149
        bound = max((high - low) / 510, torch.tensor(2.0**-127, dtype=torch.float64)) + 4 * ulp
        assert (read.double() - block.double()).abs().max() <= bound
        assert torch.equal(read[block == 0], torch.zeros(int((block == 0).sum())))
        if low == high:
            assert torch.equal(read, block)
    assert torch.equal(residual, x - decoded)


@pytest.mark.parametrize("scale", [1e-30, 1e-36, 1.0, 1e30])
def test_all_levels_are_used_at_any_scale(scale):
    x = torch.linspace(-1, 2, 512).view(1, -1) * scale
    assert codec.compress(x, 512)[0, :512].unique().numel() == 256


def test_equal_values_are_exact():
    for value in (0.0, 1.0, -1.0, 1e-45, -1e-40, 3e38, 1e6, 0.1, -0.0):
        for key in (None, KEY):
            x = torch.full((1, 100), value)
            assert torch.equal(round_trip(x, 64, key), x)


@pytest.mark.slow  # many draws
def test_stochastic_rounding_is_unbiased():
    x = sample(1, 256).clamp(-3, 3)
    draws = torch.stack([round_trip(x, 64, key) for key in range(4000)]).double()
    header = codec.compress(x, 64, None, 0)[0, 256:].view(torch.float32).view(-1, 2)
    step = header[:, :1].abs().double().expand(-1, 64).reshape(1, -1)
    # The mean of 4000 draws has a standard deviation of at most step / 2 / √4000.
    assert ((draws.mean(0) - x).abs() <= 5 * step / 2 / 4000**0.5 + 1e-7).all()
    assert (draws - x).abs().le(step * 1.0001 + 1e-7).all()


def test_draws_are_even_and_depend_on_key_and_position():
    position = torch.arange(1 << 16)
    draws = [noise.uniform(position, torch.tensor(noise.seed_words(key))) for key in (1, 2)]
    far = noise.uniform(position + (1 << 32), torch.tensor(noise.seed_words(1)))
    for a, b in ((draws[0], draws[1]), (draws[0], far), (draws[0][1:], draws[1][:-1])):
        assert abs(float(torch.corrcoef(torch.stack([a, b]))[0, 1])) < 0.02
    counts = torch.histc(draws[0], 64, 0, 1)
    assert (
        float(((counts - 1024) ** 2 / 1024).sum()) < 120
    )  # chi-square of 63 degrees of freedom: 103 in one of a thousand
    assert draws[0].min() >= 0 and draws[0].max() < 1


@pytest.mark.parametrize("key, digest", [(None, "db311a46ae531763"), (KEY, "ee16b62bcdb96825")])
def test_the_bytes_on_the_wire_stay(key, digest):
    x = torch.arange(-3000, 3000, dtype=torch.float64).view(3, 2000)
    x = (x * x * x / 7e6).float()
    x[1, 100:900] = 0.3
    x[2, 1999] = float("inf")
    packed = codec.compress(x, 512, None, key)
    assert hashlib.sha256(packed.numpy().tobytes()).hexdigest()[:16] == digest
