"""Speed of the wire formats, next to a copy of the same values: `pytest --benchmark bench/bench_codec.py`

Every result is checked on 0.25 Mi values before it is timed. A GPU takes 64 Mi values, a CPU 16 Mi on one thread.
`extra_info` holds the bytes that an operation must read and write, its GB/s, and the share it reaches of the speed of
the copy, timed in the same run: in bytes (of the copy's GB/s), and in values (the time to copy the fp32 values over the
time taken).

Each operation of a format stands beside its peers: the definition as it is written; on a GPU also `torch.compile` of
the definition; and blockwise quantization by bitsandbytes and torchao, where they are installed.
"""

import functools

import pytest
import torch

from baguakit.compressors import Float8, MinMaxUInt8, Sign, UInt4
from baguakit.compressors.formats import Blockwise
from baguakit.kernels.blockwise import definition as blockwise
from baguakit.kernels.blockwise.format import Format, join_
from bench.measuring import DEVICE, GPU, as_defined, measure
from bench.speed import CHECKED, drawn, operations

N = (64 if GPU else 16) << 20
FORMATS = (MinMaxUInt8(), UInt4(), Float8(), Sign())

every = pytest.mark.parametrize("codec", FORMATS, ids=repr)


OPERATIONS = {f"{each.family}, {each.name}": each for each in operations() if each.family in map(repr, FORMATS)}


@pytest.fixture(scope="module", autouse=True)
def warm():
    for codec in FORMATS:
        codec.warm_up(DEVICE)


def bench_copy(benchmark):
    source = drawn(N, DEVICE)
    target = torch.empty_like(source)
    assert torch.equal(target.copy_(source), source)
    measure(benchmark, lambda: target.copy_(source), N, 8 * N)


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("how", ["codec", "eager definition"])
def bench_operation(benchmark, name, how):
    operation = OPERATIONS[name]
    assert operation.is_right(CHECKED, DEVICE)
    ours = operation.ready(N, DEVICE)
    work, repeats = (ours, 15) if how == "codec" else (as_defined(ours), 3)
    measure(benchmark, work, N, operation.bytes(N), repeats)


# What others make of the same values.


def values() -> torch.Tensor:
    return drawn(N, DEVICE).view(1, -1)


def compiled_unit(codec: Blockwise) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Room for a row of whole blocks: its packed bytes, and codes and headers as views of them."""
    format = codec.form
    layout, blocks = format.layout(N, codec.block), N // codec.block
    packed = layout.empty(1, values().device)
    headers = packed[0, layout.header_at :][: blocks * format.header_bytes].view(format.header[0])
    return packed, packed[0, : N * format.bits // 8].view(blocks, -1), headers.view(blocks, -1)


def pack_(codes: torch.Tensor, headers: torch.Tensor, x: torch.Tensor, format: Format) -> None:
    """The definition of compression as one graph."""
    found, scale = format.measure(x, False)
    headers.copy_(found)
    join_([codes], format.encode(x, found, scale, None), format.bits)


@pytest.mark.skipif(not GPU, reason="on a CPU torch.compile takes minutes")
@every
def bench_compress_by_torch_compile(benchmark, codec):
    packed, codes, headers = compiled_unit(codec)
    room = codes.clone(), headers.clone()  # it does not write to views of the same bytes with different dtypes
    compiled = torch.compile(pack_, dynamic=False)
    work = functools.partial(compiled, *room, values().view(-1, codec.block), codec.form)
    work()
    codes.copy_(room[0])
    headers.copy_(room[1])
    # Inductor fuses products with sums and divides in its own way: some of its codes are one off.
    errors = [(codec.decompress(each, N) - values()).norm() for each in (packed, codec.compress(values()))]
    assert errors[0] <= 1.001 * errors[1]
    measure(benchmark, work, N, 4 * N + packed.shape[1])


@pytest.mark.skipif(not GPU, reason="on a CPU torch.compile takes minutes")
@every
def bench_decompress_by_torch_compile(benchmark, codec):
    packed, codes, headers = compiled_unit(codec)
    packed.copy_(codec.compress(values()))
    out = torch.empty(N // codec.block, codec.block, device=DEVICE)
    work = functools.partial(torch.compile(blockwise.unpack_, dynamic=False), out, None, codec.form, headers, codes)
    work()
    torch.testing.assert_close(out.view(1, N), codec.decompress(packed, N))
    measure(benchmark, work, N, packed.shape[1] + 4 * N)


@pytest.mark.parametrize("bits", [8, 4])
def bench_compress_by_bitsandbytes(benchmark, bits):
    theirs = pytest.importorskip("bitsandbytes").functional
    x, block = values().view(-1), 256
    if bits == 8:
        work = functools.partial(theirs.quantize_blockwise, x, blocksize=block)
        back = theirs.dequantize_blockwise(*work())
    else:
        work = functools.partial(theirs.quantize_4bit, x, blocksize=block, quant_type="nf4")
        back = theirs.dequantize_4bit(*work())
    assert (back.view(-1) - x).norm() <= (0.02 if bits == 8 else 0.2) * x.norm()
    measure(benchmark, work, N, 4 * N + N * bits // 8 + 4 * N // block)


def bench_compress_by_torchao(benchmark):
    theirs = pytest.importorskip("torchao.quantization.quant_primitives")
    x, block = values().view(-1, 512), (1, 512)

    def work() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        scale, zero = theirs.choose_qparams_affine(x, theirs.MappingType.ASYMMETRIC, block, torch.uint8)
        return theirs.quantize_affine(x, block, scale, zero, torch.uint8), scale, zero

    codes, scale, zero = work()
    back = theirs.dequantize_affine(codes, block, scale, zero, torch.uint8)
    assert (back - x).norm() <= 0.02 * x.norm()
    measure(benchmark, work, N, 5 * N + 8 * N // 512)
