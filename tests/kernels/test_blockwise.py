"""Properties of all wire formats: kernels, on GPUs and in C, and operators equal the definition."""

import itertools
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from formats import DTYPES, FORMATS, KEY, NAMES, bits, compiled, definition, kernels, round_trip, sample
from hostile import KINDS, hostile, same
from tiers import slow, slow_after, slow_unless

from baguakit.kernels import cpu, operators, rotation
from baguakit.kernels.blockwise import cpu as in_c
from baguakit.kernels.blockwise import definition as blockwise
from baguakit.kernels.blockwise import format as layout

# Less than a block, a block and a rest, and tiles of every kernel that are full, besides one that is not.
LONG = (2, 2500)
BROKEN, PLACES = (torch.nan, -torch.nan, torch.inf, -torch.inf), (0, 63, 64, 129)
LENGTHS = [(2, 0), (1, 1), (2, 63), (3, 65), LONG]
every = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in NAMES)) for name in FORMATS]
)


# The definition.


@pytest.fixture
def unrotated(monkeypatch):
    """Formats that rotate do not: rows are added rotated, so that sums are not those of what they restore to."""
    for name in ("rotate", "restore"):
        monkeypatch.setattr(blockwise, name, lambda x, signs: x)


@every
def test_to_compress_is_to_rotate_and_compress(name, monkeypatch):
    form, _, block = FORMATS[name]
    if not form.rotated:
        pytest.skip("it does not rotate")
    codec, x = definition(form), sample(3, 8 * block)
    packed = codec.compress(x, block, None, KEY)
    rotated = rotation.rotate(x.view(3, 8, block), rotation.signs_of(block, x.device)).reshape(3, -1)
    monkeypatch.setattr(blockwise, "rotate", lambda x, signs: x)
    assert torch.equal(codec.compress(rotated, block, None, KEY), packed)


@every
@pytest.mark.parametrize("rows, n", [(1, 1), (3, 1000), (8, 65)])
@pytest.mark.parametrize("key", [None, KEY])
def test_reduce_is_decompress_sum_divide_compress(name, rows, n, key, unrotated):
    form, _, block = FORMATS[name]
    codec, n = definition(form), -(-n // block) * block if form.rotated else n  # zeros need no level
    packed = codec.compress(sample(rows, n), block)
    values = torch.empty(rows, n)
    codec.decompress_(values, packed, block)
    total = torch.zeros(n)
    for row in values:
        total = total + row
    mean, lost, residual = (total / torch.tensor(float(rows))).view(1, -1), torch.empty(1, n), torch.randn(n)
    before = residual.clone()
    sent = codec.compress(mean, block, lost, key)
    assert torch.equal(codec.reduce(packed, n, block, residual, key), sent)
    assert torch.equal(residual, before + lost[0] * rows)


@every
@pytest.mark.parametrize("dtype", DTYPES)
def test_add_is_a_loop_in_fp32(name, dtype, unrotated):
    form, _, block = FORMATS[name]
    codec = definition(form)
    packed, out, weights = codec.compress(sample(5, 300), block), sample(1, 300, dtype, 1)[0], torch.rand(5)
    begun = torch.zeros(300) if form.rotated else out.float()
    values, expected = torch.empty(5, 300), begun
    codec.decompress_(values, packed, block)
    for value, weight in zip(values, weights, strict=True):
        expected = expected + value * weight
    if form.rotated:
        expected = out.float() + expected
    codec.add_(out, packed, weights, block)
    assert torch.equal(out, expected.to(dtype))


@every
@pytest.mark.parametrize("key", [None, KEY])
def test_what_was_sent_and_what_was_lost_make_the_values(name, key):
    form, block, _ = FORMATS[name]
    codec, x = definition(form), torch.randn(2, 1000).mul(2**10).round() / 2**10
    residual = torch.empty_like(x)
    packed = codec.compress(x, block, residual, key)
    sent = torch.empty_like(x)
    codec.decompress_(sent, packed, block)
    assert torch.equal(residual, x - sent)
    assert (sent.double() + residual.double() - x.double()).abs().max() <= 2.0**-24 * x.abs().max()


@every
@pytest.mark.parametrize(
    "value, at", slow_unless([*zip(BROKEN, PLACES, strict=True)], itertools.product(BROKEN, PLACES))
)
def test_a_broken_block_reads_as_nan_throughout(name, value, at):
    form, _, block = FORMATS[name]
    codec, x = definition(form), -torch.ones(1, 130)
    x[0, at] = value
    residual = torch.empty_like(x)
    packed = codec.compress(x, block, residual)
    broken = torch.zeros(130, dtype=torch.bool)
    broken[at // 64 * 64 : at // 64 * 64 + 64] = True
    decoded = torch.empty_like(x)
    codec.decompress_(decoded, packed, block)
    assert torch.equal(decoded.isnan()[0], broken) and torch.equal(residual.isnan()[0], broken)
    row = form.layout(130, block)
    run = row.runs[-(at >= 128)]
    codes = layout.split(run.parts_of(packed)[1:], form.bits, run.width)
    assert not codes[0, at // 64 % 2].any()


@every
@pytest.mark.parametrize("key", [None, KEY])
def test_finite_values_never_read_as_nan(name, key):
    form, _, block = FORMATS[name]
    bits = torch.randint(-(1 << 31), 1 << 31, (64, 256), dtype=torch.int64, generator=torch.Generator().manual_seed(0))
    x, most = bits.int().view(torch.float32), torch.finfo(torch.float32).max
    x = torch.where(x.isfinite(), x, most)
    x[:8] = torch.where(x[:8] < 0, -most, most)  # the widest that a block can be
    assert not round_trip(form, x, block, key).isnan().any()


# The kernels.


@pytest.fixture(params=["in_c", "on_gpus"])
def kernels_of(request, device):
    """The function that returns the kernels of a format, and the device of their tensors."""
    if request.param == "on_gpus":
        return kernels, device
    if cpu.functions("blockwise") is None:
        pytest.skip("no C compiler")
    return compiled, "cpu"


@pytest.mark.parametrize(
    "name, dtype, key",
    slow_unless(
        [("minmax_uint8", torch.float32, None), *((name, torch.bfloat16, KEY) for name in NAMES)],
        itertools.product(FORMATS, DTYPES, (None, KEY)),
    ),
)
def test_kernels_equal_the_definition(name, dtype, key, kernels_of):
    (form, usual, least), (kernels, device) = FORMATS[name], kernels_of
    codec, kernel, wide = definition(form), kernels(form), dtype == torch.float32
    for block in (usual, least) if wide else (least,):
        for rows, n in LENGTHS if wide and block == least else [(2, 63), LONG]:  # only loads and stores know dtypes
            x, lost, kernel_lost = sample(rows, n, dtype), torch.empty(rows, n), torch.empty(rows, n, device=device)
            packed = codec.compress(x, block, lost, key)
            kernel_packed = kernel.compress(x.to(device), block, kernel_lost, key)
            assert torch.equal(kernel_packed.cpu(), packed) and torch.equal(bits(kernel_lost.cpu()), bits(lost))

            out, kernel_out = torch.empty(rows, n, dtype=dtype), torch.empty(rows, n, dtype=dtype, device=device)
            codec.decompress_(out, packed, block)
            kernel.decompress_(kernel_out, kernel_packed, block)
            assert torch.equal(bits(kernel_out.cpu()), bits(out))

            total, weights = sample(1, n, dtype, 1)[0], torch.rand(rows)
            kernel_total = total.to(device).clone()
            codec.add_(total, packed, weights, block)
            kernel.add_(kernel_total, kernel_packed, weights.to(device), block)
            assert torch.equal(bits(kernel_total.cpu()), bits(total))

            residual = torch.randn(n)
            kernel_residual = residual.to(device).clone()
            sent = codec.reduce(packed, n, block, residual, key)
            assert torch.equal(kernel.reduce(kernel_packed, n, block, kernel_residual, key).cpu(), sent)
            assert torch.equal(bits(kernel_residual.cpu()), bits(residual))
    assert torch.equal(kernel.compress(x.to(device), block, None, key).cpu(), packed)
    assert torch.equal(kernel.reduce(kernel_packed, n, block, None, key).cpu(), sent)


# Formats of which kernels add codes, by any number of rows; the others only in a loop.
ADDED = [(name, rows) for name in FORMATS for rows in (1, 3, 8, 17) if rows == 3 or FORMATS[name][0].bits in (1, 2, 4)]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's: sums that are dropped may overflow
@pytest.mark.parametrize("name, rows", slow_unless([(name, 17 if name == "uint4" else 3) for name in NAMES], ADDED))
def test_averages_of_rows_of_any_scale_equal_the_definition(name, rows, device):
    """Sums of rows of one scale do not round in fp32, and kernels may then add them as they like; others round."""
    form, _, block = FORMATS[name]
    codec, row = definition(form), torch.arange(rows)
    scales = torch.stack(
        [2.0 ** (-power * row) for power in (0, 1, 3)]
        + [2.0 ** (20 * (row % 2)), *(torch.full((rows,), each) for each in (1e-36, 1e37, 0.0)), (row % 3 == 0).float()]
    )
    x = torch.randn(rows, len(scales), 1024, generator=torch.Generator().manual_seed(rows))  # a tile of each scale
    x = (x * scales.T.unsqueeze(-1) + (1000.0 if rows == 3 else 0.0)).view(rows, -1)
    packed = codec.compress(x, block)
    average = kernels(form).reduce(packed.to(device), x.shape[1], block).cpu()
    assert torch.equal(average, codec.reduce(packed, x.shape[1], block))


@every
def test_kernels_of_several_warps_equal_the_definition(name, kernels_of):
    kernels, device = kernels_of
    codec, kernel, x = definition(FORMATS[name][0]), kernels(FORMATS[name][0]), sample(2, 4500)
    packed, lost, kernel_lost = codec.compress(x, 2048), torch.ones(4500), torch.ones(4500, device=device)
    assert torch.equal(kernel.compress(x.to(device), 2048).cpu(), packed)
    sent = codec.reduce(packed, 4500, 2048, lost)
    assert torch.equal(kernel.reduce(packed.to(device), 4500, 2048, kernel_lost).cpu(), sent)
    assert torch.equal(bits(kernel_lost.cpu()), bits(lost))


@pytest.mark.parametrize("apart", [1, 2])
def test_rows_may_begin_at_any_value(apart, device):
    """A GPU, and the executor of PTX, refuse an access that is wider than an address allows."""
    form, block, _ = FORMATS["minmax_uint8"]
    rows = torch.zeros(3, apart + 2 * 2052, device=device)[:, apart:]
    x, lost, out = (each.view(2, 2052) for each in rows)
    x.copy_(sample(2, 2052))
    theirs = torch.empty_like(lost)
    packed = definition(form).compress(x, block, theirs)
    assert torch.equal(kernels(form).compress(x, block, lost), packed)
    assert same(lost, theirs)
    definition(form).decompress_(theirs, packed, block)
    kernels(form).decompress_(out, packed, block, None)
    assert same(out, theirs)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's: beside the largest fp32 a level can be infinite
@every
@pytest.mark.parametrize("key", [None, KEY])
def test_kernels_equal_the_definition_at_the_ends_of_fp32(name, key, kernels_of):
    (form, _, block), (kernels, device) = FORMATS[name], kernels_of
    codec, kernel = definition(form), kernels(form)
    ends = [(1e-30, -3e-30), (3e38, -3e38), (1e-45, -1e-40), (1e6, 1e6 + 0.0625), (1.0, -1e-45), (3.4e38, 1.0)]
    low, high = torch.tensor(ends, dtype=torch.float64).T.unsqueeze(-1)
    x = torch.lerp(low.expand(-1, 200), high.expand(-1, 200), torch.rand(len(ends), 200).double()).float()
    x[:, :2] = torch.tensor(ends)
    packed, out, kernel_out = codec.compress(x, block, None, key), torch.empty_like(x), torch.empty_like(x).to(device)
    assert torch.equal(kernel.compress(x.to(device), block, None, key).cpu(), packed)
    codec.decompress_(out, packed, block)
    kernel.decompress_(kernel_out, packed.to(device), block)
    assert torch.equal(bits(kernel_out.cpu()), bits(out))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, from the interpreter
@every
@pytest.mark.parametrize("dtypes", slow_after(1, [[torch.float32], [*DTYPES]]), ids=["fp32", "all"])
def test_kernels_pass_broken_blocks_on_in_the_same_bytes(name, dtypes, kernels_of):
    """A row without any, and one for each value that breaks a block; each breaks another block."""
    (form, _, block), (kernels, device) = FORMATS[name], kernels_of
    codec, kernel = definition(form), kernels(form)
    for dtype in dtypes:
        n = 2500 if dtype == torch.float32 else 130
        x = sample(4, n, dtype)
        for row, (at, value) in enumerate([(5, torch.nan), (70, torch.inf), (n - 1, -torch.inf)], 1):
            x[row, at] = value
        packed = codec.compress(x, block)
        assert torch.equal(kernel.compress(x.to(device), block).cpu(), packed)
        assert torch.equal(kernel.reduce(packed.to(device), n, block).cpu(), codec.reduce(packed, n, block))
        out, kernel_out = torch.empty(4, n, dtype=dtype), torch.empty(4, n, dtype=dtype, device=device)
        codec.decompress_(out, packed, block)
        kernel.decompress_(kernel_out, packed.to(device), block)
        torch.testing.assert_close(kernel_out.cpu(), out, rtol=0, atol=0, equal_nan=True)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, from the interpreter
@every
@pytest.mark.parametrize("dtypes", slow_after(1, [[torch.float32], [*DTYPES]]), ids=["fp32", "all"])
@pytest.mark.parametrize("n", [1, 130, slow(2500)])
def test_kernels_tell_whether_what_they_read_is_finite(name, dtypes, n, kernels_of):
    """An average makes it true, and one value of any row false."""
    (form, _, block), (kernels, device) = FORMATS[name], kernels_of
    for dtype, at in itertools.product(dtypes, (None, 0, n - 1)):
        x = torch.full((2, n), 60000.0)  # in fp16 some of what is read may be infinite
        if at is not None:
            x[1, at] = torch.inf
        told = []
        for codec, where in ((definition(form), "cpu"), (kernels(form), device)):
            ok, packed = torch.tensor(False, device=where), codec.compress(x.to(where), block)
            codec.reduce(packed, n, block, ok=ok)
            told.append([bool(ok)])
            out = torch.empty(2, n, dtype=dtype, device=where)
            for rows in (packed[:1], packed, packed[:1]):
                codec.decompress_(out[: len(rows)], rows, block, ok)
                told[-1].append(bool(ok))
        assert told[0] == told[1] and told[0][0] is True
        assert told[0][2] == told[0][3] == bool(out.isfinite().all())


# C.


def everything(codec, x, block, key):
    """Return the results of all operations, and what they write."""
    rows, n = x.shape
    lost, values, again, total, mean_lost = (
        torch.empty(rows, n),
        torch.empty_like(x),
        torch.empty_like(x),
        sample(1, n, x.dtype, 1)[0],
        torch.ones(n),
    )
    packed, ok = codec.compress(x, block, lost, key), torch.tensor(True)
    codec.decompress_(values, packed, block, ok)
    codec.decompress_(again, packed, block)
    codec.add_(total, packed[:0], torch.empty(0), block)
    codec.add_(total, packed, torch.linspace(-1, 2, rows), block)
    sent = codec.reduce(packed, n, block, mean_lost, key)
    alone = codec.compress(x, block, None, key), codec.reduce(packed, n, block, None, key)
    return [packed, lost, values, again, ok, total, sent, mean_lost, *alone]


@pytest.mark.skipif(cpu.compiler() is None, reason="no C compiler")
@every
@pytest.mark.parametrize(
    "kind, key",
    slow_unless([*zip(KINDS, itertools.cycle([None, KEY]))], itertools.product(KINDS, (None, KEY))),
)
def test_c_equals_the_definition_on_hostile_values(name, key, kind, monkeypatch):
    """More rows than one pass takes, by more threads than there are blocks; whole blocks, and every kind of rest.

    Some results go past the caches, to memory where a line begins, and where none does.
    """
    monkeypatch.setattr(cpu, "threads", lambda values: 3)
    form, usual, least = FORMATS[name]
    sizes = (least, 200, 0), (least, 192, 0), (usual, usual + 64, 1 << 22)
    for dtype, (block, n, far) in itertools.product(DTYPES, sizes):
        monkeypatch.setattr(in_c, "FAR", far)
        x = torch.stack([hostile(kind, n, dtype, row) for row in range(9)])
        pairs = zip(everything(compiled(form), x, block, key), everything(definition(form), x, block, key), strict=True)
        assert all(same(ours, theirs) for ours, theirs in pairs)


def test_formats_and_blocks_of_which_c_knows_nothing_run_the_definition(monkeypatch):
    form, x = FORMATS["uint4"][0], sample(2, 300)

    class Own(type(form)):
        pass

    monkeypatch.setattr(layout, "FORMATS", dict(layout.FORMATS))
    for own, block in ((form, 24), (form, 1 << 14), (Own(4), 64)):
        monkeypatch.setitem(operators.FORMATS, "own", own)
        assert not in_c.serves(own, block)
        packed = operators.compress(x, "own", block, None, None)
        assert torch.equal(packed, definition(own).compress(x, block))


def test_within_definitions_the_definition_runs():
    x = torch.zeros(1)
    assert (operators.home_of(x, "blockwise") is in_c) == (cpu.compiler() is not None)
    with patch.object(cpu, "functions", return_value=None):
        assert operators.home_of(x, "blockwise") is blockwise


def test_kernels_serve_the_device_that_triton_compiles_for(monkeypatch):
    """On CUDA, and on Intel's GPUs, which no test has seen; elsewhere the definition runs."""
    triton = pytest.importorskip("triton")
    tensors = {kind: SimpleNamespace(is_cuda=False, is_cpu=False, device=torch.device(kind)) for kind in ("xpu", "mps")}
    driver, known = SimpleNamespace(get_active_torch_device=lambda: tensors["xpu"].device), operators.has_kernels
    monkeypatch.setattr(triton.runtime, "driver", SimpleNamespace(active=driver))
    monkeypatch.setattr(operators, "has_kernels", known.__wrapped__)  # without its cache
    homes = {kind: operators.home_of(x, "mixing").__name__ for kind, x in tensors.items()}
    assert homes == {"xpu": "baguakit.kernels.mixing_gpu", "mps": "baguakit.kernels.mixing"}
    assert operators.has_kernels(torch.device("cuda"))


# The operators.


@pytest.mark.parametrize(
    "name", slow_after(1, ["uint2_rotated", *(name for name in FORMATS if name != "uint2_rotated")])
)
def test_operators_keep_the_rules_of_operators(name, device, monkeypatch):
    monkeypatch.undo()  # opcheck compares what fake and real operators make of torch.empty
    form, _, block = FORMATS[name]
    x = sample(2, 100).to(device)
    packed = operators.compress.registered(x, form.name, block, None, None)
    residual, weights = torch.zeros(2, 100, device=device), torch.ones(2, device=device)
    torch.library.opcheck(operators.compress.registered, (x, form.name, block, residual, None))
    torch.library.opcheck(operators.compress.registered, (x, form.name, block, None, None))
    torch.library.opcheck(operators.decompress_.registered, (torch.zeros_like(x), form.name, packed, block, None))
    ok = torch.tensor(True, device=device)
    torch.library.opcheck(operators.decompress_.registered, (torch.zeros_like(x), form.name, packed, block, ok))
    torch.library.opcheck(operators.add_.registered, (torch.zeros_like(x[0]), form.name, packed, weights, block))
    torch.library.opcheck(operators.reduce.registered, (packed, form.name, 100, block, residual[0].clone(), 3, ok))
