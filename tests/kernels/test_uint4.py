"""The theorems of four bits a value."""

import numpy as np
import pytest
import torch
from formats import FORMATS, definition, of_any_scale, round_trip
from hypothesis import given, settings

FORM, BLOCK, _ = FORMATS["uint4"]
codec = definition(FORM)
LARGEST = float(np.float32(3.0e38))  # a level half a step beyond is still finite


def steps(packed: torch.Tensor, n: int, block: int) -> torch.Tensor:
    headers = torch.cat([run.parts_of(packed)[0] for run in FORM.layout(n, block).runs], 1)
    return (headers[..., 0] << 16).view(torch.float32)


@pytest.mark.slow  # hundreds of examples
@settings(max_examples=300, deadline=None)
@given(of_any_scale(LARGEST))
def test_error_is_at_most_half_a_step_and_a_step_what_the_docstring_says(values):
    x = torch.tensor([values], dtype=torch.float32)
    residual = torch.empty_like(x)
    packed = codec.compress(x, 64, residual)
    decoded = torch.empty_like(x)
    codec.decompress_(decoded, packed, 64)
    found = steps(packed, len(values), 64)[0].double()
    for block, read, step in zip(x[0].split(64), decoded[0].split(64), found, strict=True):
        low, high = block.double().min(), block.double().max()
        largest = block.double().abs().max()
        ulp = largest * 2.0**-23 + 2.0**-149
        assert step <= 1.008 * max((high - low) / 15, largest / 32760, torch.tensor(2.0**-126))
        assert (read.double() - block.double()).abs().max() <= step / 2 + 4 * ulp
        assert not read[block == 0].any()
    assert torch.equal(residual, x - decoded)


@pytest.mark.parametrize("scale", [1e-30, 1e-36, 1.0, 1e30])
def test_all_levels_are_used_at_any_scale(scale):
    x = torch.linspace(-1, 2, 256).view(1, -1) * scale
    codes = codec.compress(x, 256)[0, :128]
    assert torch.cat([codes & 15, codes >> 4]).unique().numel() == 16


def test_a_narrow_block_far_from_zero_is_nearly_exact():
    x = torch.full((1, 100), 3.3)
    assert ((round_trip(FORM, x, 64) - x).abs() <= 3.3 / 65520 * 1.008).all()
    x[0, ::2] = 3.31
    assert ((round_trip(FORM, x, 64) - x).abs() <= 0.01 / 30 * 1.008 + 1e-6).all()


def test_draws_are_unbiased_between_neighbouring_levels():
    torch.manual_seed(0)
    x = torch.randn(1, 64)
    packed = codec.compress(x, 64, None, 0)
    step = steps(packed, 64, 64)[0, 0]
    draws = torch.stack([round_trip(FORM, x, 64, key)[0] for key in range(400)])
    assert ((draws - x).abs() <= step * 1.0001).all()
    # 400 draws of values at most a step apart: their mean errs by a fortieth of a step once in a million at 5 σ.
    assert ((draws.mean(0) - x[0]).abs() <= 5 * step / 2 / 20).all()
