"""Speed of the wire formats, next to a copy of the same values: `pytest --benchmark bench/bench_codec.py`

Every result is checked before it is timed, on 1 Mi values. A GPU takes 64 Mi values, a CPU 16 Mi on one thread. `extra_info` holds the
bytes that an operation must read and write, its GB/s, and the share it reaches of the speed of the copy, timed in the
same run: in bytes (of the copy's GB/s), and in values (the time to copy the fp32 values over the time taken).

Each operation of a format stands beside its peers: the definition as it is written; on a GPU also `torch.compile` of
the definition; and blockwise quantization by bitsandbytes and torchao, where they are installed.
"""

import functools
from collections.abc import Callable

import pytest
import torch

from baguakit.compressors import Float8, MinMaxUInt8, Sign, UInt4
from baguakit.compressors.blockwise import Blockwise
from baguakit.kernels.blockwise import definition as blockwise
from baguakit.kernels.blockwise.format import Format
from baguakit.kernels.blockwise.layout import join_
from baguakit.kernels.cpu import units
from bench.measuring import DEVICE, GPU, measure

N = (64 if GPU else 16) << 20
CHECKED = 1 << 20  # values: the definition as it is written is slow
ROWS = 8  # virtual ranks
FORMATS = (MinMaxUInt8(), UInt4(), Float8(), Sign())

every = pytest.mark.parametrize("codec", FORMATS, ids=repr)
eager_or_not = pytest.mark.parametrize("how", ["codec", "eager definition"])


@pytest.fixture(scope="module", autouse=True)
def warm():
    for codec in FORMATS:
        codec.warm_up(DEVICE)


@functools.cache
def values() -> torch.Tensor:
    return torch.randn(1, N, generator=torch.Generator().manual_seed(0)).to(DEVICE)


@functools.cache
def packed_rows(codec: Blockwise) -> torch.Tensor:
    return torch.cat([codec.compress(values() * (row + 1)) for row in range(ROWS)])


def in_eager(work: Callable[[], object]) -> Callable[[], object]:
    """Work as the definition is written."""

    def eagerly():
        with units.eager():
            return work()

    return eagerly


def repeats_for(how: str) -> int:
    return 15 if how == "codec" else 3


def bench_copy(benchmark):
    target = torch.empty_like(values())
    assert torch.equal(target.copy_(values()), values())
    measure(benchmark, lambda: target.copy_(values()), N, 8 * N)


# The codec and its definition.


@every
@eager_or_not
@pytest.mark.parametrize("residual", [False, True], ids=["", "residual"])
def bench_compress(benchmark, codec, how, residual):
    lost, format = torch.empty_like(values()) if residual else None, codec.operators.format
    packed = codec.compress(values(), lost)
    right = in_eager(lambda: blockwise.compress(format, values().cpu(), codec.block))()
    assert torch.equal(packed.cpu(), right)
    assert lost is None or torch.equal(lost, values() - codec.decompress(packed, N))
    work = {
        "codec": lambda: codec.compress(values(), lost),
        "eager definition": in_eager(lambda: blockwise.compress(format, values(), codec.block, lost)),
    }[how]
    measure(benchmark, work, N, 4 * N + packed.shape[1] + 4 * N * residual, repeats_for(how))


@every
@eager_or_not
def bench_decompress(benchmark, codec, how):
    format, packed = codec.operators.format, packed_rows(codec)[:1]
    out, right = torch.empty_like(values()), torch.empty(1, N)
    in_eager(lambda: blockwise.decompress_(format, right, packed.cpu(), codec.block))()
    assert torch.equal(codec.decompress(packed, N, out=out).cpu(), right)
    work = {
        "codec": lambda: codec.decompress(packed, N, out=out),
        "eager definition": in_eager(lambda: blockwise.decompress_(format, out, packed, codec.block)),
    }[how]
    measure(benchmark, work, N, packed.shape[1] + 4 * N, repeats_for(how))


@every
@eager_or_not
def bench_add(benchmark, codec, how):
    format, packed = codec.operators.format, packed_rows(codec)[:2]
    out, right, weights = torch.zeros(N, device=DEVICE), torch.zeros(N), torch.tensor([0.25, 0.5], device=DEVICE)
    in_eager(lambda: blockwise.add_(format, right, packed.cpu(), weights.cpu(), codec.block))()
    assert torch.equal(codec.add_(out, packed, weights).cpu(), right)
    work = {
        "codec": lambda: codec.add_(out, packed, weights),
        "eager definition": in_eager(lambda: blockwise.add_(format, out, packed, weights, codec.block)),
    }[how]
    measure(benchmark, work, N, 2 * packed.shape[1] + 8 * N, repeats_for(how))


@every
@eager_or_not
def bench_reduce(benchmark, codec, how):
    format, packed = codec.operators.format, packed_rows(codec)
    right = in_eager(lambda: blockwise.reduce(format, packed.cpu(), N, codec.block))()
    assert torch.equal(codec.reduce(packed, N).cpu(), right)
    work = {
        "codec": lambda: codec.reduce(packed, N),
        "eager definition": in_eager(lambda: blockwise.reduce(format, packed, N, codec.block)),
    }[how]
    measure(benchmark, work, N, (ROWS + 1) * packed.shape[1], repeats_for(how))


# What others make of the same values.


def compiled_unit(codec: Blockwise) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Room for a row of whole blocks: its packed bytes, and codes and headers as views of them."""
    format = codec.operators.format
    packed = format.layout(N, codec.block).empty(1, values().device)
    (codes,), headers = format.layout(N, codec.block).parts(packed)
    return packed, codes.view(N // codec.block, -1), headers[0]


def pack_(codes: torch.Tensor, headers: torch.Tensor, x: torch.Tensor, format: Format) -> None:
    """The definition of compression as one graph."""
    found, scale = format.measure(x, False)
    headers.copy_(found)
    join_([codes], format.encode(x, found, scale, None), format.bits)


@pytest.mark.skipif(not GPU, reason="on a CPU the codec is what torch.compile makes of its definition")
@every
def bench_compress_by_torch_compile(benchmark, codec):
    packed, codes, headers = compiled_unit(codec)
    work = functools.partial(
        torch.compile(pack_), codes, headers, values().view(-1, codec.block), codec.operators.format
    )
    work()
    # Inductor fuses products with sums and divides in its own way: its codes may be one off.
    assert (codec.decompress(packed, N) - values()).abs().max() <= 2 * values().abs().max()
    measure(benchmark, work, N, 4 * N + packed.shape[1])


@pytest.mark.skipif(not GPU, reason="on a CPU the codec is what torch.compile makes of its definition")
@every
def bench_decompress_by_torch_compile(benchmark, codec):
    packed, codes, headers = compiled_unit(codec)
    packed.copy_(packed_rows(codec)[:1])
    out = torch.empty(N // codec.block, codec.block, device=DEVICE)
    work = functools.partial(torch.compile(blockwise.unpack_), out, None, codec.operators.format, headers, codes)
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
