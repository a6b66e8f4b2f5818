"""The largest values of a row: what is kept, that it depends on nothing else, and that the kernels keep the same."""

import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pool import never_waiting

from baguakit.compressors import TopK
from baguakit.kernels.topk import definition as topk
from baguakit.kernels.topk import operators

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
NAN, INFINITY = float("nan"), float("inf")


def drawn(rows: int, n: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Values of many scales; half of them come from a few, so that the threshold has equals."""
    source = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, n, generator=source) * 10 ** torch.randn(rows, n, generator=source)
    few = torch.randint(-3, 4, (rows, n), generator=source).float()
    return torch.where(torch.rand(rows, n, generator=source) < 0.5, few, x).to(dtype)


def parts(packed: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    words = packed.view(torch.int32).view(len(packed), 2, k)
    return words[:, 0].contiguous().view(torch.float32), words[:, 1]


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.cpu().nan_to_num(12345.0), b.cpu().nan_to_num(12345.0))


# The values that are kept.


def by_sorting(row: list[float], k: int) -> list[int]:
    """The definition in the words of Python: by magnitude, NaN above all, then by place."""
    order = sorted(
        range(len(row)), key=lambda i: (-INFINITY if row[i] != row[i] else -abs(row[i]), row[i] == row[i], i)
    )
    return sorted(order[:k])


few = st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, INFINITY, -INFINITY, NAN, 1e-45, -1e-45])


@settings(max_examples=200, deadline=None)
@given(st.lists(few | st.floats(width=32), min_size=1, max_size=60), st.data())
def test_it_is_the_beginning_of_a_stable_sort(row, data):
    k, x = data.draw(st.integers(1, len(row))), torch.tensor([row])
    residual = torch.empty_like(x)
    values, places = parts(topk.compress(x, k, residual), k)
    assert places[0].tolist() == by_sorting(x[0].tolist(), k)
    assert same(values[0], x[0, places[0].long()])
    rest = x.clone()
    rest[0, places[0].long()] -= rest[0, places[0].long()].clone()
    assert same(residual, rest)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_was_sent_and_what_was_lost_make_the_values(dtype):
    x, compressor = drawn(3, 1000, dtype), TopK(0.03)
    residual = torch.empty(3, 1000)
    packed = compressor.compress(x, residual)
    sent = compressor.decompress(packed, 1000)
    assert torch.equal(sent + residual, x.float()) and int((sent != 0).sum()) == 3 * 30
    total = torch.ones(1000)
    compressor.add_(total, packed, [0.5, 0.25, 2.0])
    assert torch.equal(total, 1 + sent[0] * 0.5 + sent[1] * 0.25 + sent[2] * 2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_added_one_after_another_where_they_have_places(dtype, device):
    """Bit for bit, for subnormal sums too: out ← out + w_r v_r at the places of each row r, and nothing elsewhere."""
    x, compressor = drawn(3, 1000, torch.float32) * 10.0 ** torch.tensor([[0.0], [-2.0], [-41.0]]), TopK(0.3)
    x[2, :500] = -0.0
    packed, start, weights = (
        compressor.compress(x),
        drawn(1, 1000, dtype, 1)[0] * (torch.arange(1000) % 3 > 0),
        (3, 0.1, 1),
    )
    wide = torch.promote_types(dtype, torch.float32)
    total = start.to(wide)
    for values, places, weight in zip(*parts(packed, 300), torch.tensor(weights).float(), strict=True):
        for value, place in zip(values, places.tolist(), strict=True):
            total[place] = total[place] + (value * weight).to(wide)
    added = compressor.add_(start.to(device), packed.to(device), weights).cpu()
    assert torch.equal(added.double().view(torch.int64), total.to(dtype).double().view(torch.int64))


@pytest.mark.parametrize("n, k", [(0, 0), (1, 1), (7, 7)])
def test_all_may_be_kept_and_nothing_may_be_there(n, k):
    x = drawn(2, n, torch.float32)
    assert torch.equal(TopK(1.0).decompress(TopK(1.0).compress(x), n), x) and TopK(1.0).row_bytes(n) == 8 * k


# Of a long row the few that may be kept are found first, from a guess. Whatever is guessed, the same is kept.


def with_ties(n: int) -> torch.Tensor:
    return torch.randint(-40, 41, (1, n), generator=torch.Generator().manual_seed(1)).float()


def sparse(n: int) -> torch.Tensor:
    """Hardly any value but zeros of both signs."""
    x = drawn(1, n, torch.float32)
    return torch.where(torch.arange(n) % 41 == 0, x, -0.0 * x.sign())


def with_nans(n: int) -> torch.Tensor:
    """NaNs of every payload, more than are kept, and infinities."""
    x = drawn(1, n, torch.float32)
    bits = x.view(torch.int32)
    bits[0, ::7], bits[0, 1::7], x[0, 2::7] = 0x7F800001, -1, -INFINITY
    return x


def hidden(n: int) -> torch.Tensor:
    """Large where the sample looks, and nowhere else: the guess is too high."""
    x = drawn(1, n, torch.float32).clamp(-9, 9)
    x[0, :: n // topk.SAMPLE | 1] = 1e30
    return x


LONG = {
    "drawn": lambda n: drawn(1, n, torch.float32),
    "ties": with_ties,
    "zeros": lambda n: torch.zeros(1, n),
    "equal": lambda n: torch.full((1, n), -3.0),
    "sparse": sparse,
    "NaN": with_nans,
    "all NaN": lambda n: torch.full((1, n), NAN),
    "subnormal": lambda n: 1e-44 * with_ties(n),
    "rising": lambda n: torch.arange(n).float()[None],
    "hidden": hidden,
}


def equations(x: torch.Tensor, k: int) -> torch.Tensor:
    """The places kept of a row, as a stable sort says it."""
    sizes = torch.from_numpy(topk.sizes_of(x[0].view(torch.int32).numpy().view("uint32"))).long()
    return sizes.argsort(descending=True, stable=True)[:k].sort().values


def kept_as_defined(x: torch.Tensor, k: int) -> bool:
    at, residual = equations(x, k), torch.empty_like(x)
    packed = topk.compress(x, k, residual)
    values, places = parts(packed, k)
    rest = x.clone()
    rest[0, at] -= x[0, at]
    bits = torch.where(x[0, at].isnan(), topk.NAN, x[0, at].view(torch.int32))
    same_values = torch.equal(values[0].view(torch.int32), bits) and same(residual, rest)
    return torch.equal(places[0].long(), at) and same_values and torch.equal(topk.compress(x, k), packed)


@pytest.mark.parametrize("kind", LONG)
@pytest.mark.parametrize("k", [1, 5, 60, 700, 2000, 2001])
def test_a_long_row_keeps_what_the_equations_say(kind, k, monkeypatch):
    monkeypatch.setattr(topk, "SAMPLE", 500)
    monkeypatch.setattr(topk, "PIECE", 333)
    assert kept_as_defined(LONG[kind](2001), k)


@settings(max_examples=100, deadline=None)
@given(st.lists(few | st.floats(width=32), min_size=1, max_size=60), st.data())
def test_no_guess_changes_what_is_kept(row, data):
    k, x = data.draw(st.integers(1, len(row))), torch.tensor([row])
    sizes = topk.sizes_of(x[0].view(torch.int32).numpy().view("uint32")).tolist()
    guess = data.draw(st.sampled_from(sizes) | st.integers(0, topk.NAN))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(topk, "guess_at", lambda row, k: guess)
        patch.setattr(topk, "PIECE", 7)
        assert parts(topk.compress(x, k), k)[1][0].tolist() == by_sorting(x[0].tolist(), k)


@pytest.mark.parametrize("guess", [1, 0x3F800000, topk.INFINITY, topk.NAN])
def test_what_reaches_a_guess_is_found_in_order(guess, monkeypatch):
    monkeypatch.setattr(topk, "PIECE", 10)
    row = with_nans(997)[0].view(torch.int32).numpy().view("uint32")
    sizes = topk.sizes_of(row)
    assert (topk.reaching(guess, row) == (sizes >= min(guess, topk.INFINITY)).nonzero()[0]).all()


def test_guesses_are_good_for_what_is_drawn_and_forgotten_where_they_mislead(monkeypatch):
    """Of a row as it is drawn little more than k are looked at twice; of one that misleads the sample, all are."""
    looked_at, largest = [], topk.largest
    monkeypatch.setattr(topk, "largest", lambda row, k: looked_at.append(len(row)) or largest(row, k))
    n = 4 * topk.SAMPLE
    assert kept_as_defined(torch.randn(1, n, generator=torch.Generator().manual_seed(0)), n // 100)
    assert n // 100 <= looked_at[0] < n // 50
    for row, k in (
        (hidden(n), n // 5 + 9),  # the guess is too high
        (torch.randn(1, n), n // 3),  # so many that a guess does not pay
        (torch.zeros(1, n), 9),  # none is larger than zero
        (with_ties(n - 1), 9),  # not long
    ):
        looked_at.clear()
        assert kept_as_defined(row, k)
        assert looked_at[0] == row.shape[1]


# The kernels.


def kernels_agree(x: torch.Tensor, k: int, device: str) -> bool:
    from baguakit.kernels.topk import gpu as kernels

    residual, ours = torch.empty(x.shape), torch.empty(x.shape, device=device)
    packed = topk.compress(x, k, residual)
    equal = torch.equal(kernels.compress(x.to(device), k, ours).cpu(), packed) and same(ours, residual)
    return equal and torch.equal(kernels.compress(x.to(device), k).cpu(), packed)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows, n, k", [(1, 1, 1), (2, 1000, 10), (1, 1025, 1025)])
def test_short_kernel_equals_the_definition(dtype, rows, n, k, device):
    assert kernels_agree(drawn(rows, n, dtype), k, device)


@pytest.mark.parametrize("dtype", DTYPES)
def test_long_kernels_equal_the_definition(dtype, device, monkeypatch):
    from baguakit.kernels.topk import gpu as kernels

    monkeypatch.setattr(kernels, "SHORT", 0)
    assert kernels_agree(drawn(2, 4099, dtype), 100, device)


@pytest.mark.parametrize("rows, n, k", [(1, 16385, 160), (2, 70001, 60000), (3, 4096, 4096)])
@pytest.mark.slow  # the interpreter takes seconds for each
def test_long_kernels_equal_the_definition_whatever_the_tiles(rows, n, k, device, monkeypatch):
    from baguakit.kernels.topk import gpu as kernels

    monkeypatch.setattr(kernels, "SHORT", 0)
    for many in (0, 1 << 40):
        monkeypatch.setattr(kernels, "MANY", many)
        assert kernels_agree(drawn(rows, n, torch.float32), k, device)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, from the interpreter
@pytest.mark.parametrize("short", [0, 1 << 12])
@pytest.mark.parametrize("k", [3, 12, 700])
def test_kernels_keep_what_is_not_finite_and_break_ties_by_place(short, k, device, monkeypatch):
    from baguakit.kernels.topk import gpu as kernels

    monkeypatch.setattr(kernels, "SHORT", short)
    x = torch.full((1, 4000), -2.0)
    x[0, ::3] = 2.0
    x[0, 3900:3905], x[0, 1], x[0, 50:53] = NAN, -NAN, INFINITY
    x[0, 60:65] = torch.tensor([0x7F800001, 0x7FFFFFFF, -1, -0x400000, 0x7FC00000], dtype=torch.int32).view(
        torch.float32
    )
    for dtype in (torch.float32, torch.bfloat16):
        assert kernels_agree(x.to(dtype), k, device)
    assert kernels_agree(torch.zeros(1, 4000), k, device)


# The operator.


def test_torch_compile_passes_over_the_operator(device):
    def sent(x, residual):
        return operators.compress(x, 5, residual).float().sum() + residual.sum()

    x = drawn(2, 100, torch.float32).to(device)
    residual, again = torch.zeros(2, 100, device=device), torch.zeros(2, 100, device=device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own
        compiled = torch.compile(sent, fullgraph=True, backend="aot_eager")(x, residual)
    assert torch.equal(compiled, sent(x, again)) and torch.equal(residual, again)


def test_the_operator_keeps_the_rules_of_operators(device, monkeypatch):
    monkeypatch.undo()
    x = drawn(2, 100, torch.float32).to(device)
    torch.library.opcheck(operators.compress.registered, (x, 5, torch.zeros(2, 100, device=device)))
    torch.library.opcheck(operators.compress.registered, (x, 5, None))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_compressing_never_waits_for_the_device():
    x, residual = torch.randn(1, 1 << 20, device="cuda"), torch.empty(1, 1 << 20, device="cuda")
    TopK(0.01).compress(x, residual)
    with never_waiting():
        packed = TopK(0.01).compress(x, residual)
    assert torch.equal(packed.cpu(), TopK(0.01).compress(x.cpu()))
