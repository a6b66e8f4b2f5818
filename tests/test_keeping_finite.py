"""All values are finite or not: asked in one way on CPUs and in another on GPUs, with one answer."""

import math

import pytest
import torch

from baguakit.keeping import finite, finite_in_two

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("n", (1, 2, 7, 4097))
@pytest.mark.parametrize("dtype", DTYPES)
def test_both_ways_say_what_isfinite_says(dtype, n):
    info = torch.finfo(dtype)
    for value in (math.inf, -math.inf, math.nan, info.max, info.min, info.smallest_normal, -0.0):
        for place in {0, n // 2, n - 1}:
            x = torch.randn(n).to(dtype)
            x[place] = value
            assert finite(x) == finite_in_two(x) == torch.isfinite(x).all()


def test_no_values_are_finite():
    assert finite(torch.empty(0)) and finite(torch.empty(0, dtype=torch.bfloat16))
