"""All values are finite or not: asked in one way on CPUs and in another on GPUs, with one answer."""

import math

import pytest
import torch

from baguakit.keeping import Joint, finite, finite_in_two, hold

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


@pytest.mark.parametrize("value, kept", [(1.0, True), (math.nan, False)])
@pytest.mark.parametrize("on_gpu", [False, True])
def test_what_a_flight_holds_without_a_flag_is_kept_if_its_result_is_finite(monkeypatch, on_gpu, value, kept):
    """On a GPU it is held where it is, whatever its strides are; elsewhere as a copy."""
    if on_gpu:
        monkeypatch.setattr(torch.Tensor, "is_cpu", False)
    joint, state, new, result = Joint(), torch.zeros(3, 2), torch.arange(6.0).view(2, 3), torch.tensor([value])
    assert not hold(state, new.T)
    with joint.flight({"q": state}, True, lambda: result):
        assert hold(state, new.T)
        assert torch.equal(state, torch.zeros(3, 2))
    expected = new.T.clone() if kept else torch.zeros(3, 2)
    if not on_gpu:
        new.fill_(7.0)
    joint.settle()
    assert torch.equal(state, expected) and state.is_contiguous()
