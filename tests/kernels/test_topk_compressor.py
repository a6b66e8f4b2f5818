"""`TopK`: its rows of places and values, which values arrive, and error feedback with it."""

import pytest
import torch
from chunks import DTYPES, INFINITY, NAN, by_sorting, drawn
from pool import never_waiting

from baguakit.compressors import BFloat16, MinMaxUInt8, TopK, UInt2
from baguakit.kernels import topk
from baguakit.stages import ErrorFeedback, SparseMean
from baguakit.testing.blind import Two


def by_definition(x: torch.Tensor, compressor: TopK) -> torch.Tensor:
    """Return the rows that arrive if values are sent in fp32."""
    sent = torch.zeros(x.shape)
    for row, out in zip(x.float(), sent, strict=True):
        for at in range(0, len(row), compressor.chunk):
            chunk = row[at : at + compressor.chunk]
            kept = by_sorting(chunk.tolist(), min(len(chunk), max(1, round(compressor.ratio * len(chunk)))))
            out[at : at + len(chunk)][kept] = chunk[kept]
    return sent


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chunk", [64, 128, 256, 512, 1024, 2048, 4096])
def test_the_values_arrive_and_the_rest_is_lost(dtype, chunk):
    x, compressor = drawn(2, 5000, dtype), TopK(0.03, chunk)
    residual = torch.empty(2, 5000)
    packed = compressor.compress(x, residual)
    sent = compressor.decompress(packed, 5000)
    assert torch.equal(sent, by_definition(x, compressor)) and torch.equal(sent + residual, x.float())
    bits, kept = chunk.bit_length() - 1, compressor.kept(5000)
    assert packed.shape == (2, -(-(-(-kept // 8) * bits) // 16) * 16 + 4 * kept)
    total = torch.ones(5000)
    compressor.add_(total, packed, [0.5, 2.0])
    assert torch.equal(total, 1 + sent[0] * 0.5 + sent[1] * 2)


@pytest.mark.parametrize("values", [UInt2(), UInt2(stochastic=True), MinMaxUInt8(block=64), BFloat16()])
def test_values_travel_in_any_dense_format(values):
    """The row ends with the values as that compressor packs them; the residual is what both have lost."""
    x, plain, compressor = drawn(2, 5000, torch.float32), TopK(0.03, 256), TopK(0.03, 256, values)
    kept = plain.kept(5000)
    exact, residual = plain.compress(x), torch.empty(2, 5000)
    packed = compressor.compress(x, residual, key=7)
    size = values.row_bytes(kept)
    assert packed.shape[1] == compressor.row_bytes(5000) == exact.shape[1] - 4 * kept + size
    assert torch.equal(packed[:, :-size], exact[:, : -4 * kept])
    lost = torch.empty(2, kept)
    inner = values.compress(exact[:, -4 * kept :].contiguous().view(torch.float32), lost, key=7)
    assert torch.equal(packed[:, -size:], inner)
    sent, places = compressor.decompress(packed, 5000), plain.decompress(exact, 5000) != 0
    assert torch.equal(sent[places], values.decompress(inner, kept).flatten()) and not sent[~places].any()
    assert torch.equal(residual[places], lost.flatten()) and torch.equal(residual[~places], x[~places])


def test_the_compressor_of_values_is_given_rows_without_gaps(monkeypatch):
    """Those of a kernel of a format lie one behind another."""
    read, seen = UInt2.decompress, []
    monkeypatch.setattr(UInt2, "_unchecked_decompress", lambda self, *args: seen.append(args[0]) or read(self, *args))
    compressor = TopK(0.03, 256, UInt2())
    compressor.decompress(compressor.compress(drawn(2, 5000, torch.float32)), 5000)
    assert seen[0].shape[0] == 2 and seen[0].is_contiguous()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("values", [None, UInt2()])
def test_what_is_not_finite_is_passed_on(dtype, values):
    x, residual = drawn(1, 9000, dtype), torch.empty(1, 9000)
    x[0, 5], x[0, 5000], x[0, 8999] = NAN, INFINITY, -INFINITY
    compressor = TopK(0.01, values=values)
    sent = compressor.decompress(compressor.compress(x, residual), 9000)
    for each in (sent, residual, compressor.add_(torch.ones(9000), compressor.compress(x), [1.0])[None]):
        assert not each[0, [5, 5000, 8999]].isfinite().any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_added_one_after_another_where_they_have_places(dtype, device):
    """Bit for bit, for subnormal sums too: out ← out + w_r v_r at the places of each row r, and nothing elsewhere."""
    x, compressor = drawn(3, 1000, torch.float32) * 10.0 ** torch.tensor([[0.0], [-2.0], [-41.0]]), TopK(0.3)
    x[2, :500] = -0.0
    packed, weights = compressor.compress(x), (3, 0.1, 1)
    start = drawn(1, 1000, dtype, 1)[0] * (torch.arange(1000) % 3 > 0)
    wide = torch.promote_types(dtype, torch.float32)
    total, (places, kept) = start.to(wide, copy=True), topk.select(x, 4096, 0, 300)
    for values, at, weight in zip(kept, places, torch.tensor(weights).float(), strict=True):
        for value, place in zip(values, at.tolist(), strict=True):
            total[place] = total[place] + (value * weight).to(wide)
    added = compressor.add_(start.to(device), packed.to(device), weights).cpu()
    assert torch.equal(added.double().view(torch.int64), total.to(dtype).double().view(torch.int64))


@pytest.mark.parametrize("values", [None, UInt2(), BFloat16()])
@pytest.mark.parametrize("n", [0, 1, 7])
def test_all_may_be_kept_and_nothing_may_be_there(n, values):
    x, compressor, residual = drawn(2, n, torch.float32), TopK(1.0, values=values), torch.empty(2, n)
    sent = compressor.decompress(compressor.compress(x, residual), n)
    assert torch.allclose(sent + residual, x) and compressor.kept(n) == n
    assert TopK(1.0).row_bytes(n) == 16 * (n > 0) + 4 * n


class Both(Two):
    """Two ranks with the same values."""

    def all_gather(self, x):
        return torch.cat([x, x])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, from the interpreter
def test_error_feedback_by_kernels_is_that_of_the_definition_and_keeps_its_residual_where_a_mean_breaks(monkeypatch):
    stage, found = ErrorFeedback(SparseMean(TopK(0.1, 64))), []
    for on_gpu in (False, True):
        state = {"residual": torch.zeros(200), "inner": {}}
        monkeypatch.setattr(torch.Tensor, "is_cuda", on_gpu)
        for x in (drawn(1, 200, torch.bfloat16)[0], drawn(1, 200, torch.float32, 1)[0], torch.full((200,), NAN)):
            found += [stage(x, state, Both()).float().nan_to_num(12345.0), state["residual"].clone()]
    assert all(torch.equal(a, b) for a, b in zip(found[:6], found[6:], strict=True))
    assert torch.equal(found[3], found[5]) and found[3].isfinite().all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_compressing_never_waits_for_the_device():
    x, residual = torch.randn(1, 1 << 20, device="cuda"), torch.empty(1, 1 << 20, device="cuda")
    TopK(0.01).compress(x, residual)
    with never_waiting():
        packed = TopK(0.01).compress(x, residual)
    assert torch.equal(packed.cpu(), TopK(0.01).compress(x.cpu()))
