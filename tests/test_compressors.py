"""The promises of every compressor."""

import warnings

import everything
import pytest
import torch
from tiers import slow_after

from baguakit.compressors import BFloat16, Compressor, Float8, Float16, MinMaxUInt8, Sign
from baguakit.compressors.formats import Blockwise
from baguakit.kernels import cpu

ALL = everything.compressors(dense=True)
FAMILIES = [each for each in map(everything.made, everything.usual(everything.COMPRESSORS).values()) if each.dense]
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
every = pytest.mark.parametrize("compressor", ALL, ids=repr)


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)
    torch.manual_seed(0)


@every
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_torchs_default_dtype_does_not_matter(compressor: Compressor, dtype):
    x = torch.randn(3, 1000)

    def work():
        residual, total, kept = x.clone(), x[0].clone(), x[1].clone()
        packed = compressor.compress(x, residual, key=7)
        compressor.add_(total, packed, [0.1, 0.2, 0.3])
        sent = compressor.reduce(packed, 1000, kept)
        return packed, sent, compressor.decompress(packed, 1000), total, residual, kept

    expected = work()
    torch.set_default_dtype(dtype)
    try:
        found = work()
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    "compressor", [c for c in ALL if not isinstance(c, Sign) and not getattr(c, "rotate", False)], ids=repr
)
def test_zeros_survive(compressor):
    x = torch.randn(2, 300)
    x[:, ::3] = 0
    assert not compressor.decompress(compressor.compress(x), 300)[:, ::3].any()


@every
def test_operations_without_checks_are_the_same(compressor):
    x, residual, kept, mine = torch.randn(3, 100), torch.empty(3, 100), torch.ones(100), torch.empty(3, 100)
    packed = compressor.compress(x, residual, key=-5)
    assert compressor._unchecked_row_bytes(100) == compressor.row_bytes(100)
    assert torch.equal(compressor._unchecked_compress(x, mine, -5), packed) and torch.equal(mine, residual)
    for dtype in DTYPES:
        values = compressor.decompress(packed, 100, dtype)
        assert torch.equal(compressor._unchecked_decompress(packed, 100, dtype, None), values)
    mean, also = compressor.reduce(packed, 100, kept, key=2**63), torch.ones(100)
    assert torch.equal(compressor._unchecked_reduce(packed, 100, also, 2**63), mean) and torch.equal(also, kept)


def test_a_subclass_is_asked_for_its_own_operations():
    class Halved(MinMaxUInt8):
        def compress(self, x, residual=None, key=0):
            return super().compress(x / 2, residual, key)

    class Same(Halved):
        pass

    x = torch.randn(1, 100)
    for compressor in (Halved(), Same()):
        assert torch.equal(compressor._unchecked_compress(x, None, 0), MinMaxUInt8().compress(x / 2))


def test_float16_passes_overflow_on():
    x, residual = torch.tensor([[1e6, 1.0]]), torch.empty(1, 2)
    assert Float16().decompress(Float16().compress(x, residual), 2).tolist() == [[float("inf"), 1.0]]
    assert residual.tolist() == [[-float("inf"), 0.0]]
    assert BFloat16().decompress(BFloat16().compress(x), 2).isfinite().all()


def test_one_outlier_coarsens_its_block_only():
    x = torch.randn(1, 4096) * 1e-3
    x[0, 0] = 1
    small, large = ((c.decompress(c.compress(x), 4096) - x)[0, 512:].norm() for c in map(MinMaxUInt8, (512, 4096)))
    assert small < large / 10


@every
def test_gradients_stay_out(compressor):
    x = torch.randn(2, 100, requires_grad=True)
    packed = compressor.compress(x, torch.empty(2, 100))
    assert not packed.requires_grad and not compressor.decompress(packed, 100).requires_grad
    compressor.add_(x[0].detach(), packed, [1.0, 1.0])


@pytest.mark.parametrize("compressor", slow_after(2, [*FAMILIES, MinMaxUInt8(stochastic=True)]), ids=repr)
def test_torch_compile_passes_over_them(compressor):
    def exchange(x, residual):
        packed = compressor.compress(x, residual, key=5)
        return compressor.decompress(packed, 200), compressor.reduce(packed, 200, residual[0])

    torch._dynamo.reset()  # each compressor is one more version of this function, and Dynamo keeps eight
    x, residual, expected_residual = torch.randn(3, 200), torch.zeros(3, 200), torch.zeros(3, 200)
    expected = exchange(x, expected_residual)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own
        results = torch.compile(exchange, fullgraph=True, backend="aot_eager")(x, residual)
    assert all(map(torch.equal, results, expected)) and torch.equal(residual, expected_residual)


@every
@pytest.mark.parametrize("device", ["cpu", torch.device("cpu")])
def test_warm_up_leaves_nothing_to_load(compressor, device):
    cpu.functions.cache_clear()
    compressor.warm_up(device, torch.bfloat16)
    loaded = cpu.functions.cache_info().misses
    for dtype in (torch.bfloat16, torch.float32):
        x, residual = torch.randn(6, 3001).to(dtype), torch.empty(6, 3001)
        packed = compressor.compress(x, residual)
        compressor.decompress(packed, 3001, dtype)
        compressor.add_(residual[0], packed, [1.0] * 6)
        if compressor.dense:
            compressor.reduce(packed, 3001, residual[0])
    assert cpu.functions.cache_info().misses == loaded


BLOCKWISE = list(dict.fromkeys(type(each) for each in ALL if isinstance(each, Blockwise)))


@pytest.mark.parametrize("block", [None, 0, -64, 32, 100, 16384, 64.5, "64"])
@pytest.mark.parametrize("format", BLOCKWISE)
def test_blocks_are_checked_at_declaration(format, block):
    kind = ValueError if isinstance(block, int) else TypeError
    with pytest.raises(kind, match=f"^block is a power of two, 64 to 8192, not {block!r}$"):
        format(block=block)


@pytest.mark.parametrize("format", ["e4m3fn", "", None, 8])
def test_float8_names_its_formats(format):
    kind = ValueError if isinstance(format, str) else TypeError
    with pytest.raises(kind, match=f"^format is 'e4m3' or 'e5m2', not {format!r}$"):
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
    for name, call in (
        ("residual", lambda: compressor.compress(x, far)),
        ("out", lambda: compressor.decompress(packed, 100, out=far)),
        ("out", lambda: compressor.add_(far[0], packed, [1.0])),
        ("residual", lambda: compressor.reduce(packed, 100, far[0])),
    ):
        with pytest.raises(ValueError, match=f"{name} is on meta and what it belongs to on cpu; move one to the other"):
            call()


@every
def test_mistakes_are_named(compressor):
    x, n = torch.randn(2, 100), 100
    packed, c = compressor.compress(x), compressor
    for mistake, words in (
        (lambda: c.compress(torch.ones(2, 3, dtype=torch.int64)), r"not torch\.int64; convert it by"),
        (lambda: c.compress(torch.ones(2, 3, dtype=torch.complex64)), r"not torch\.complex64"),
        (lambda: c.compress(x[0]), r"\(rows, n\), not a tensor \(100,\) .*; use x.view\(rows, -1\)"),
        (lambda: c.compress(x, x.bfloat16()), r"residual is float32 whatever the values are; torch\.bfloat16"),
        (lambda: c.compress(x, torch.empty(100)), r"residual is contiguous, here of shape \(2, 100\), not \(100,\)"),
        (lambda: c.reduce(packed, n, torch.empty(2, 100)), r"\(100,\), not \(2, 100\)"),
        (lambda: c.decompress(x, n), r"packed is rows in uint8, .*, not a tensor .* torch\.float32"),
        (lambda: c.decompress(packed[:, 1:], 99), r"packed is rows of .* packs n=99 values, not a tensor"),
        (lambda: c.decompress(packed, n, torch.int32), r"not torch\.int32"),
        (lambda: c.decompress(packed, n, out=x.new_empty(100, 2)), r"of shape \(2, 100\), not \(100, 2\)"),
        (lambda: c.decompress(packed, n, out=torch.empty(2, 200)[:, ::2]), "with gaps"),
        (lambda: c.add_(torch.zeros(n), packed, [1.0]), "weights is as many numbers as there are packed rows, 2, not"),
        (lambda: c.add_(torch.zeros(1, n), packed, [1.0, 1.0]), r"use out.view\(-1\)"),
    ):
        with pytest.raises((TypeError, ValueError), match=words):
            mistake()
