"""The largest values of chunks: what is kept and sent, that it depends on nothing else, and that kernels keep it."""

import numpy as np
import pytest
import torch
from chunks import DTYPES, INFINITY, NAN, by_sorting, drawn, same
from hostile import KINDS, difference, hostile
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiers import slow, slow_after

from baguakit.compressors import TopK
from baguakit.kernels import cpu, operators, topk, topk_cpu


@pytest.fixture(params=["definition", "C"])
def on_cpu(request):
    """The modules that CPU tensors use."""
    return topk if request.param == "definition" else compiled()


@pytest.fixture(params=["C", "Triton"])
def kernels(request):
    """The kernels that equal the definition, and the device that they run on."""
    if request.param == "Triton":
        from baguakit.kernels import topk_gpu

        return topk_gpu, request.getfixturevalue("device")
    if request.config.getoption("ptx"):
        pytest.skip("launches no kernel")
    return compiled(), "cpu"


def compiled():
    if cpu.functions("topk") is None:
        pytest.skip("no C compiler")
    return topk_cpu


# The values that are kept.


few = st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, INFINITY, -INFINITY, NAN, 1e-45, -1e-45])


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(few | st.floats(width=32), min_size=1, max_size=60), st.integers(1, 30), st.data())
def test_it_is_the_beginning_of_a_stable_sort_of_each_chunk(on_cpu, row, chunk, data):
    chunks = [row[at : at + chunk] for at in range(0, len(row), chunk)]
    k, rest = data.draw(st.integers(1, chunk)), data.draw(st.integers(1, max(1, len(row) % chunk)))
    kept = [rest if len(each) < chunk else k for each in chunks]
    x = torch.tensor([row])
    residual = torch.empty_like(x)
    places, values = on_cpu.select(x, chunk, k, rest if len(row) % chunk else 0, residual)
    expected = [by_sorting(x[0, at * chunk :][:chunk].tolist(), kept[at]) for at in range(len(chunks))]
    assert places[0].tolist() == [place for each in expected for place in each]
    at = torch.tensor([first * chunk + place for first, each in enumerate(expected) for place in each])
    assert same(values[0], x[0, at])
    rest = x.clone()
    rest[0, at] -= x[0, at]
    assert same(residual, rest)


def with_ties(n: int) -> torch.Tensor:
    return torch.randint(-40, 41, (1, n), generator=torch.Generator().manual_seed(1)).float()


def sparse(n: int) -> torch.Tensor:
    """Hardly any value but zeros of both signs."""
    x = drawn(1, n, torch.float32)
    return torch.where(torch.arange(n) % 41 == 0, x, -0.0 * x.sign())


def with_nans(n: int) -> torch.Tensor:
    """NaNs of every payload, and infinities."""
    x = drawn(1, n, torch.float32)
    bits = x.view(torch.int32)
    bits[0, ::7], bits[0, 1::7], x[0, 2::7] = 0x7F800001, -1, -INFINITY
    return x


LONG = {
    "drawn": lambda n: drawn(1, n, torch.float32),
    "ties": with_ties,
    "zeros": lambda n: torch.zeros(1, n),
    "equal": lambda n: torch.full((1, n), -3.0),
    "sparse": sparse,
    "embedding": lambda n: drawn(1, n, torch.float32) * (torch.arange(n) // 4096 % 2),
    "NaN": with_nans,
    "all NaN": lambda n: torch.full((1, n), NAN),
    "subnormal": lambda n: 1e-44 * with_ties(n),
    "rising": lambda n: torch.arange(n).float()[None],
}


def equations(x: torch.Tensor, k: int) -> torch.Tensor:
    """The places kept of each chunk (chunks, width), as a stable sort says it."""
    sizes = np.minimum(x.view(torch.int32).numpy() & topk.SIZE, topk.INFINITY + 1)
    return torch.from_numpy(sizes).argsort(descending=True, stable=True)[:, :k].sort().values


@pytest.mark.parametrize("kind", LONG)
def test_chunks_keep_what_the_equations_say(on_cpu, kind):
    """Few, some, many and all of several chunks, and of a rest that may keep more or fewer."""
    x, residual = LONG[kind](5 * 4096 + 1001), torch.empty(1, 5 * 4096 + 1001)
    for k, rest in ((1, 1), (4, 2), (8, 1001), (9, 7), (41, 10), (500, 3), (1500, 1000), (4096, 1)):
        places, values = on_cpu.select(x, 4096, k, rest, residual)
        at = torch.cat([equations(x[:, :20480].view(5, -1), k).flatten(), equations(x[:, 20480:], rest)[0]])
        assert torch.equal(places[0].long(), at)
        at += torch.cat([torch.arange(5).repeat_interleave(k), torch.full((rest,), 5)]) * 4096
        lost = x.clone()
        lost[0, at] -= x[0, at]
        bits = torch.where(x[0, at].isnan(), topk.NAN, x[0, at].view(torch.int32))
        assert torch.equal(values[0].view(torch.int32), bits) and same(residual, lost)
        again = on_cpu.select(x, 4096, k, rest)
        assert torch.equal(again[0], places) and torch.equal(again[1].view(torch.int32), values.view(torch.int32))


# The arguments of the compressor.


@pytest.mark.parametrize(
    "arguments, kind, said",
    [
        ({"chunk": 100}, ValueError, "chunk is a power of two, 64 to 4096, not 100"),
        ({"chunk": 8192}, ValueError, "chunk is a power of two, 64 to 4096, not 8192"),
        ({"values": TopK(0.1)}, ValueError, r"TopK\(0.1\) leaves some out; use a dense compressor such as UInt2\(\)"),
        ({"values": 2}, TypeError, "values is a compressor such as .* or None, not 2"),
        ({"ratio": NAN}, ValueError, "ratio is a finite number"),
    ],
)
def test_what_cannot_be_right_is_refused_at_declaration(arguments, kind, said):
    with pytest.raises(kind, match=said):
        TopK(**{"ratio": 0.1} | arguments)


# The kernels.


def kernels_agree(kernels, x: torch.Tensor, chunk: int, k: int, rest: int) -> bool:
    kernels, device = kernels
    residual, ours = torch.empty(x.shape), torch.empty(x.shape, device=device)
    expected = topk.select(x, chunk, k, rest, residual)
    found = kernels.select(x.to(device), chunk, k, rest, ours), kernels.select(x.to(device), chunk, k, rest)
    equal = [torch.equal(a.cpu(), b) for each in found for a, b in zip(bits_of(each), bits_of(expected), strict=True)]
    return all(equal) and same(ours, residual)


def bits_of(found: tuple[torch.Tensor, torch.Tensor]) -> list[torch.Tensor]:
    return [each.view(torch.int32) for each in found]


@pytest.mark.parametrize("dtype", slow_after(2, DTYPES))
@pytest.mark.parametrize(
    "chunk, rows, n, k, rest", [(4096, 1, 1, 0, 1), (64, 2, 200, 5, 3), (1024, 1, 1025, 1024, 1), (512, 2, 1027, 30, 2)]
)
def test_the_kernel_equals_the_definition(dtype, chunk, rows, n, k, rest, kernels):
    assert kernels_agree(kernels, drawn(rows, n, dtype), chunk, k, rest)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, from the interpreter
@pytest.mark.parametrize("k", slow_after(1, [3, 12, 700]))
def test_the_kernel_keeps_what_is_not_finite_and_breaks_ties_by_place(k, kernels):
    x = torch.full((1, 2000), -2.0)
    x[0, ::3] = 2.0
    x[0, 1900:1905], x[0, 1], x[0, 50:53] = NAN, -NAN, INFINITY
    x[0, 60:65] = torch.tensor([0x7F800001, 0x7FFFFFFF, -1, -0x400000, 0x7FC00000], dtype=torch.int32).view(
        torch.float32
    )
    for dtype in (torch.float32, torch.bfloat16):
        assert kernels_agree(kernels, x.to(dtype), 1024, k, k)
    assert kernels_agree(kernels, torch.zeros(1, 2000), 1024, k, k)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, from the interpreter
@pytest.mark.parametrize(
    "dtype, k, rest", slow_after(1, [(DTYPES[1], 20, 128), (DTYPES[0], 1, 9), (DTYPES[2], 128, 1)])
)
@pytest.mark.parametrize("kind", LONG)
def test_the_kernel_finds_few_among_hostile_values(kind, dtype, k, rest, kernels):
    """One, some, and as many as just need the groups, of whole tiles and of parts of one."""
    assert kernels_agree(kernels, LONG[kind](2048 + 1031).to(dtype), 2048, k, rest)


@pytest.mark.parametrize("rows, count", [(1, 1), (2, 9), (1, 520)])
@pytest.mark.parametrize("chunk", slow_after(2, [4096, 2048, 512, 64]))
def test_the_kernel_packs_the_bytes_of_the_definition(chunk, rows, count, kernels):
    kernels, device = kernels
    places = torch.randint(0, chunk, (rows, count), dtype=torch.int32, generator=torch.Generator().manual_seed(0))
    for values in (drawn(rows, count, torch.float32), None):
        size = topk.values_at(count, chunk) + 4 * count * (values is not None)
        packed = torch.empty(rows, size, dtype=torch.uint8)
        ours = torch.empty_like(packed, device=device)
        topk.join_(packed, places, values, chunk)
        kernels.join_(ours, places.to(device), None if values is None else values.to(device), chunk)
        assert torch.equal(ours.cpu(), packed)


@pytest.mark.parametrize("dtype", slow_after(2, DTYPES))
@pytest.mark.parametrize("chunk, n, k, rest", [(64, 200, 40, 3), (4096, 5000, 41, 9), (2048, 7, 5, 5)])
def test_the_kernel_adds_rows_as_the_definition_does(dtype, chunk, n, k, rest, kernels):
    """One after another, to what is there or as a mean, with values in the rows or beside them."""
    kernels, device = kernels
    x = drawn(3, n, torch.float32) * 10.0 ** torch.tensor([[0.0], [-2.0], [-41.0]])
    places, values = topk.select(x, chunk, k, rest)
    packed = torch.empty(3, topk.values_at(places.shape[1], chunk) + 4 * places.shape[1], dtype=torch.uint8)
    topk.join_(packed, places, values, chunk)
    for weights in (None, torch.tensor([3.0, 0.1, -1.0])):
        for beside in (None, 2 * values):
            out = drawn(1, n, dtype, 1)[0]
            ours, ok = out.to(device, copy=True), torch.tensor(True, device=device) if weights is None else None
            given = [None if each is None else each.to(device) for each in (beside, weights)]
            topk.add_(out, packed, beside, weights, chunk, k, rest)
            kernels.add_(ours, packed.to(device), *given, chunk, k, rest, ok)
            assert torch.equal(ours.cpu().double().view(torch.int64), out.double().view(torch.int64))
            assert ok is None or ok == out.isfinite().all()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, from the interpreter
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_mean_tells_whether_it_is_finite_after_it_has_been_rounded(dtype, kernels):
    kernels, device = kernels
    largest = torch.finfo(torch.float32 if dtype == torch.float64 else dtype).max
    for value, finite in ((largest, True), (torch.inf, False), (NAN, False), (1.0035 * largest, False)):
        places, values = torch.tensor([[3]], dtype=torch.int32, device=device), torch.tensor([[value]], device=device)
        for m in (kernels, topk):
            packed = torch.empty(1, topk.values_at(1, 64) + 4, dtype=torch.uint8, device=device)
            out, ok = torch.zeros(64, dtype=dtype, device=device), torch.tensor(False, device=device)
            m.join_(packed, places, values, 64, ok)
            assert ok
            m.add_(out, packed, None, None, 64, 1, 0, ok)
            assert ok == finite


def everything(kernels, x: torch.Tensor, out: torch.Tensor, chunk: int, k: int, rest: int):
    """Yield the results of all operations on rows `x`: what is sent, what is lost, the mean and a sum onto `out`."""
    residual = torch.empty(x.shape)
    places, values = kernels.select(x, chunk, k, rest, residual)
    yield from (places, values, residual)
    packed, ok = (
        torch.empty(len(x), topk.values_at(places.shape[1], chunk) + 4 * places.shape[1]).byte(),
        torch.ones(()),
    )
    kernels.join_(packed, places, values, chunk, ok := ok.bool())
    total, mean = out.clone(), out.clone()
    if len(x):
        kernels.add_(mean, packed, None, None, chunk, k, rest, ok)
    kernels.add_(total, packed, 0.1 * values, torch.linspace(-1, 3, len(x)), chunk, k, rest)
    yield from (packed, ok, mean, total)


@pytest.mark.parametrize("threads", [3, slow(1)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_c_does_what_the_definition_does_with_hostile_values(kind, dtype, threads, monkeypatch):
    ours = compiled()
    monkeypatch.setattr(cpu, "threads", lambda values: threads)
    for rows, n, chunk, k, rest in (
        (1, 20000, 4096, 41, 36), (2, 20000, 4096, 4096, 3616), (3, 5000, 512, 300, 200), (2, 2000, 64, 1, 1),
        (1, 40, 256, 30, 20), (3, 1, 64, 1, 1), (0, 100, 64, 2, 1), (2, 0, 64, 2, 0),
    ):  # fmt: skip
        x = torch.stack([*(hostile(kind, max(n, 1), dtype, row)[:n] for row in range(rows)), torch.zeros(n).to(dtype)])
        out = hostile("many scales", max(n, 1), dtype, 9)[:n]
        given = x[:rows], out, chunk, k, rest
        for found, expected in zip(everything(ours, *given), everything(topk, *given), strict=True):
            assert not difference(found, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_position_beyond_the_end_of_a_row_is_refused(dtype, on_cpu):
    packed = TopK(0.5, 64).compress(torch.ones(2, 70))
    packed[1, :20] = 0xFF
    with pytest.raises(IndexError, match="beyond the end of the 70 values"):
        on_cpu.add_(torch.zeros(70, dtype=dtype), packed, None, None, 64, 32, 3)


# The operators.


def test_the_operators_keep_the_rules_of_operators(device, monkeypatch):
    monkeypatch.undo()
    x = drawn(2, 100, torch.float32).to(device)
    places, values = operators.select(x, 64, 5, 3, None)
    packed = torch.zeros(2, topk.values_at(8, 64) + 32, dtype=torch.uint8, device=device)
    torch.library.opcheck(operators.join_.registered, (packed, places, values, 64, None))
    torch.library.opcheck(operators.add_rows_.registered, (x[0], packed, None, None, 64, 5, 3, x[0, 0] == x[0, 0]))
    torch.library.opcheck(operators.add_rows_.registered, (x[0], packed, values, x[:, 0], 64, 5, 3, None))
    torch.library.opcheck(operators.select.registered, (x, 64, 5, 3, torch.zeros(2, 100, device=device)))
    torch.library.opcheck(operators.select.registered, (x, 64, 5, 3, None))
