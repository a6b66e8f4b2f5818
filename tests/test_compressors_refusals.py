"""Wrong arguments of every compressor raise a sentence that names them."""

import everything
import pytest
import torch

from baguakit.compressors import Float8
from baguakit.compressors.blockwise import Blockwise

ALL = everything.compressors(dense=True)
BLOCKWISE = list(dict.fromkeys(type(each) for each in ALL if isinstance(each, Blockwise)))
every = pytest.mark.parametrize("compressor", ALL, ids=repr)


@pytest.mark.parametrize("block", [None, 0, -64, 32, 100, 16384, 64.5, "64"])
@pytest.mark.parametrize("format", BLOCKWISE)
def test_blocks_are_checked_at_declaration(format, block):
    name = format.__name__
    with pytest.raises(
        ValueError, match=rf"{name} takes a block of 64 to 8192 .* not {block!r}; {name}\(\) takes {format.block}"
    ):
        format(block=block)


@pytest.mark.parametrize("format", ["e4m3fn", "", None, 8])
def test_float8_names_its_formats(format):
    with pytest.raises(ValueError, match=rf'"e4m3", with more precision, .* not {format!r}; Float8\(\) takes .e4m3'):
        Float8(format=format)


@pytest.mark.parametrize("compressor", [format() for format in BLOCKWISE], ids=repr)
def test_what_is_written_lies_beside_what_is_read(compressor):
    memory = torch.randn(2000)
    x = memory[:1000].view(1, -1)
    with pytest.raises(ValueError, match="residual and the values share memory; give residual memory of its own"):
        compressor.compress(x, memory[999:1999].view(1, -1))
    packed = compressor.compress(x, memory[1000:].view(1, -1))
    room = torch.zeros(8192, dtype=torch.uint8)
    inside, values = room[16 : 16 + packed.shape[1]].view(1, -1).copy_(packed), room.view(torch.float32)[:1000]
    with pytest.raises(ValueError, match="out and the packed rows share memory"):
        compressor.decompress(inside, 1000, out=values.view(1, -1))
    with pytest.raises(ValueError, match="out and the packed rows share memory"):
        compressor.add_(values, inside, [1.0])
    with pytest.raises(ValueError, match="residual and the packed rows share memory"):
        compressor.reduce(inside, 1000, values)


@every
def test_all_tensors_are_on_one_device(compressor):
    x, far = torch.randn(1, 100), torch.zeros(1, 100, device="meta")
    packed = compressor.compress(x)
    with pytest.raises(ValueError, match="residual is on meta and what it belongs to on cpu; move one to the other"):
        compressor.compress(x, far)
    with pytest.raises(ValueError, match="out is on meta and what it belongs to on cpu"):
        compressor.decompress(packed, 100, out=far)
    with pytest.raises(ValueError, match="out is on meta and what it belongs to on cpu"):
        compressor.add_(far[0], packed, [1.0])
    with pytest.raises(ValueError, match="residual is on meta and what it belongs to on cpu"):
        compressor.reduce(packed, 100, far[0])


@every
def test_mistakes_are_named(compressor):
    x, n = torch.randn(2, 100), 100
    packed = compressor.compress(x)
    with pytest.raises(TypeError, match=r"not torch\.int64; convert other values"):
        compressor.compress(torch.ones(2, 3, dtype=torch.int64))
    with pytest.raises(TypeError, match=r"not torch\.complex64"):
        compressor.compress(torch.ones(2, 3, dtype=torch.complex64))
    with pytest.raises(ValueError, match=r"\(rows, n\), not a tensor \(100,\) .*; use x.view\(rows, -1\)"):
        compressor.compress(x[0])
    with pytest.raises(TypeError, match=r"residual is float32 whatever the values are, not torch\.bfloat16"):
        compressor.compress(x, torch.empty(2, 100, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=r"residual is contiguous, here of shape \(2, 100\), not \(100,\)"):
        compressor.compress(x, torch.empty(100))
    with pytest.raises(ValueError, match=r"\(100,\), not \(2, 100\)"):
        compressor.reduce(packed, n, torch.empty(2, 100))
    with pytest.raises(TypeError, match=r"packed is rows in uint8, .*, not a tensor .* torch\.float32"):
        compressor.decompress(x, n)
    with pytest.raises(ValueError, match=r"packed is rows of .* packs n=99 values, not a tensor"):
        compressor.decompress(packed[:, 1:], 99)
    with pytest.raises(TypeError, match=r"not torch\.int32"):
        compressor.decompress(packed, n, torch.int32)
    with pytest.raises(ValueError, match=r"out is contiguous, of shape \(2, 100\), not \(100, 2\)"):
        compressor.decompress(packed, n, out=torch.empty(100, 2))
    with pytest.raises(ValueError, match="with gaps"):
        compressor.decompress(packed, n, out=torch.empty(2, 200)[:, ::2])
    with pytest.raises(ValueError, match="weights is as many numbers as there are packed rows, 2, not"):
        compressor.add_(torch.zeros(n), packed, [1.0])
    with pytest.raises(ValueError, match=r"use out.view\(-1\)"):
        compressor.add_(torch.zeros(1, n), packed, [1.0, 1.0])
