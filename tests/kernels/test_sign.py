"""The theorems of one bit a value."""

from fractions import Fraction

import pytest
import torch
from formats import FORMATS, round_trip, sample

from baguakit.kernels.blockwise.uniform import mean_magnitude

FORM = FORMATS["uint1"][0]


def above(mean: float) -> torch.Tensor:
    """A bf16, at least so large: half of the step."""
    near = torch.tensor(mean).bfloat16()
    return (near if float(near) >= mean else (near.view(torch.int16) + 1).view(torch.bfloat16)).float()


def test_signs_times_the_mean_magnitude():
    x = torch.tensor([[3.0, -1.0, 0.0, -0.0, -4.0, 2.0]])
    s = above(10 / 6)
    assert round_trip(FORM, x, 64).tolist() == [[s, -s, s, s, -s, s]]


@pytest.mark.parametrize("n", [1, 63, 64, 1000])
@pytest.mark.parametrize("scale", [1e-44, 1e-36, 1e-30, 1.0, 1e30])
def test_the_magnitude_is_below_the_exact_mean_by_at_most_a_unit(n, scale):
    x = sample(3, n).clamp(-100, 100) * scale
    for row, found in zip(x, mean_magnitude(x), strict=True):
        exact = sum(Fraction(float(value)) for value in row.abs()) / n
        unit = max(Fraction(float(row.abs().max())) * Fraction(1, 1 << 16), Fraction(1, 1 << 113))
        rounding = exact / (1 << 22)
        assert exact - unit - rounding <= Fraction(float(found[0])) <= exact + rounding


def test_the_largest_values_stay_finite():
    top = torch.finfo(torch.float32).max
    read = round_trip(FORM, torch.tensor([[top, -top, top]]), 64)
    assert (read.abs() == 2.0**126).all()
