"""The theorems of the scaled float8 formats: they are torch's casts, of values divided by a power of two."""

import pytest
import torch
from formats import FORMATS, KEY, compiled, definition, kernels, round_trip

both = pytest.mark.parametrize("name", ["float8_e4m3", "float8_e5m2"])
BLOCK = 8192


def fields(form, packed: torch.Tensor, n: int, block: int) -> torch.Tensor:
    (run,) = form.layout(n, block).runs
    return run.parts_of(packed)[0][..., 0]


def every_pattern(format) -> torch.Tensor:
    """Values up to the largest number, in rows that begin with it: all upper halves of fp32, with lower ones on both
    sides of each midpoint; and some of the values so small that their code is zero."""
    largest, least = torch.finfo(format.dtype).max, 2.0 ** (format.e - format.m)
    upper = torch.arange(1 << 16, dtype=torch.int64) << 16
    lower = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    values = (upper[:, None] + lower).flatten().to(torch.int32).view(torch.float32)
    values = values[values.abs() <= largest]
    small = values.abs() < least / 4
    values = torch.cat([values[~small], values[small][::101], torch.zeros(BLOCK)])
    values = values[: len(values) // (BLOCK - 1) * (BLOCK - 1)].view(-1, BLOCK - 1)
    return torch.cat([torch.full((len(values), 1), largest), values], 1).contiguous()


@both
def test_codes_are_those_of_torchs_cast_for_every_pattern(name, device):
    form = FORMATS[name][0]
    dtype = form.dtype
    x = every_pattern(form)
    right = x.to(dtype).view(torch.uint8)
    in_c, on_gpus = compiled(form).compress(x, BLOCK), kernels(form).compress(x.to(device), BLOCK).cpu()
    for packed in (definition(form).compress(x, BLOCK), in_c, on_gpus):
        assert (fields(form, packed, BLOCK, BLOCK) == 127).all()  # s = 1
        assert torch.equal(packed[:, :BLOCK], right)


@both
@pytest.mark.parametrize("field", [17, 60, 127, 200, 239])
def test_every_code_means_torchs_number_times_the_power(name, field, device):
    form = FORMATS[name][0]
    numbers = torch.arange(256, dtype=torch.uint8).view(form.dtype).float()
    codes = torch.arange(256, dtype=torch.uint8)[numbers.isfinite()]
    packed = form.layout(256, 256).empty(1, torch.device("cpu"))
    packed[0, : len(codes)] = codes
    packed[0, len(codes) : 256] = 0
    fields(form, packed, 256, 256)[...] = field
    expected = (numbers[numbers.isfinite()].double() * 2.0 ** (field - 127)).float()
    for codec in (definition(form), compiled(form), kernels(form)):
        where = device if codec.module.__name__.endswith(".gpu") else "cpu"
        out = torch.empty(1, 256, device=where)
        codec.decompress_(out, packed.to(where), 256)
        got = out[0, : len(codes)].cpu()
        assert torch.equal(got.view(torch.int32), expected.view(torch.int32))  # −0 is not 0
        least = got[got != 0].abs().min()
        assert least >= torch.finfo(torch.float32).tiny


@both
def test_the_scale_is_the_smallest_power_of_two_that_holds_the_block(name):
    form = FORMATS[name][0]
    largest = torch.finfo(form.dtype).max
    torch.manual_seed(0)
    x = torch.randn(500, 64) * 2.0 ** torch.randint(-80, 80, (500, 1))
    x[0, 0], x[0, 1:] = largest, 1.0
    x[1, 0], x[1, 1:] = largest * (1 + 2**-23), 1.0
    s = 2.0 ** (fields(form, definition(form).compress(x, 64), 64, 64).double() - 127)
    top = x.double().abs().amax(1, keepdim=True)
    assert (top <= largest * s).all() and (top > largest * s / 2).all()
    assert s[:2, 0].tolist() == [1.0, 2.0]


@both
def test_the_error_is_what_the_docstring_says(name):
    form = FORMATS[name][0]
    m, e = form.m, form.e
    torch.manual_seed(0)
    x = torch.randn(300, 64) * 2.0 ** torch.randint(-126, 100, (300, 1)) * 10.0 ** torch.randn(300, 64)
    s = 2.0 ** (fields(form, definition(form).compress(x, 64), 64, 64).double() - 127)
    bound = torch.maximum(x.double().abs() / 2 ** (m + 1), s * 2.0 ** (e - m) / 2)
    assert ((round_trip(form, x, 64).double() - x.double()).abs() <= bound).all()


@both
def test_zeros_keep_their_sign_and_the_largest_values_stay_finite(name):
    form = FORMATS[name][0]
    x = torch.tensor([[0.0, -0.0, 1.0, -1e-30]])
    assert round_trip(form, x, 64).view(torch.int32)[0, :2].tolist() == [0, -(1 << 31)]
    top = torch.finfo(torch.float32).max
    read = round_trip(form, torch.tensor([[top, -top, 1.75 * 2.0**127]]), 64)
    assert read.tolist() == [[1.75 * 2.0**127, -1.75 * 2.0**127, 1.75 * 2.0**127]]


@both
def test_draws_are_unbiased_between_neighbours(name):
    form = FORMATS[name][0]
    torch.manual_seed(0)
    x = torch.randn(1, 64) * 2.0 ** torch.randint(-20, 3, (1, 64))
    x[0, 0] = 3.0
    number = x.double() / 2.0 ** (fields(form, definition(form).compress(x, 64), 64, 64).double() - 127)
    exponent = number.abs().log2().floor().clamp(min=form.e)
    unit = (x.double() / number * 2.0 ** (exponent - form.m)).abs()[0]
    draws = torch.stack([round_trip(form, x, 64, key)[0].double() for key in range(400)])
    assert ((draws - x).abs() < unit).all()
    assert ((draws.mean(0) - x[0]).abs() <= 5 * unit / 2 / 20).all()  # five standard deviations
    exact = round_trip(form, x, 64)
    assert torch.equal(round_trip(form, exact, 64, KEY), exact)
