"""The layout of packed rows."""

import pytest
import torch
from formats import FORMATS

from baguakit.kernels.blockwise import format as layout

every = pytest.mark.parametrize("name", FORMATS)


@pytest.mark.parametrize("count", [8, 4, 1])
@pytest.mark.parametrize("width", [1, 7, 8, 9, 64])
def test_split_undoes_join(count, width):
    codes = torch.randint(0, 1 << count, (3, width), dtype=torch.uint8)
    assert torch.equal(layout.split(joined(codes, count), count, width), codes)
    assert torch.equal(layout.stripes(codes, count).flatten(-2)[:, :width], codes)


def joined(codes, count):
    planes = [
        torch.empty(*codes.shape[:-1], -(-codes.shape[-1] * plane // 8), dtype=torch.uint8)
        for plane in layout.PLANES[count]
    ]
    layout.join_(planes, codes, count)
    return planes


@pytest.mark.parametrize("count", [3, 5, 6, 7])
def test_codes_of_other_lengths_are_cut_in_planes(count):
    codes = torch.randint(0, 1 << count, (3, 64), dtype=torch.uint8)
    planes = joined(codes, count)
    assert sum(8 * plane.shape[1] for plane in planes) == 64 * count
    low = layout.PLANES[count][0]
    assert torch.equal(planes[0], joined(codes & (1 << low) - 1, low)[0])
    assert torch.equal(layout.split(planes, count, 64), codes)


def test_a_byte_holds_a_value_of_every_stripe():
    codes = torch.arange(16, dtype=torch.uint8)
    assert joined(codes, 4)[0].tolist() == [low | (low + 8) << 4 for low in range(8)]
    assert joined(codes % 2, 1)[0].tolist() == [0, 255]
    assert joined(codes[:5], 4)[0].tolist() == [0 | 3 << 4, 1 | 4 << 4, 2]


@every
def test_a_row_is_codes_and_headers_in_sixteens(name):
    format, block, _ = FORMATS[name]
    assert format.row_bytes(0, block) == 0
    for blocks, rest in ((0, 1), (0, 9), (1, 0), (3, 5), (1 << 12, 0)):
        n, stored = blocks * block + rest, block if format.padded and rest else rest
        codes = [(blocks * block + stored) * plane / 8 for plane in layout.PLANES[format.bits]]
        parts = [*codes, (blocks + (rest > 0)) * format.header_bytes]
        assert format.row_bytes(n, block) == format.layout(n, block).row == sum(-(-part // 16) * 16 for part in parts)


def test_a_million_values_in_bits():
    n = 1 << 20
    taken = {name: 8 * form.row_bytes(n, block) / n for name, (form, block, _) in FORMATS.items()}
    assert taken == {
        "minmax_uint8": 8.125,
        "uint4": 4.125,
        "float8_e4m3": 8.0625,
        "float8_e5m2": 8.0625,
        "uint1": 1.03125,
        **{f"uint{bits}_rotated": bits + 0.125 for bits in (1, 3, 4, 5, 6, 7, 8)},
        **{f"uint{bits}": bits + 0.125 for bits in (2, 3, 6)},
        "uint2_rotated": 2.25,
    }


def test_a_format_without_triton_functions_is_refused_on_gpus():
    class Own(layout.Format):
        bits = 6

    with pytest.raises(NotImplementedError, match=r"the format own has a definition and no Triton functions.*_gpu.py"):
        layout.twin_of(Own("own"))
