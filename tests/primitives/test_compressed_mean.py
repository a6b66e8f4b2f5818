"""Means of values, exact, compressed and sparse"""

import bisect

import pytest
import torch
import torch.distributed as dist
from drawn import FLOATS, draw
from pool import ranks

import baguakit as bk
from baguakit.compressors import MinMaxUInt8
from baguakit.primitives.compressed import in_one_hop


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("length", [0, 1, 5, 64, 1000, 4097])
def test_compressed_mean_is_within_two_quantizations(n, length):
    """|result − mean| ≤ mean over ranks of (half a step) + half a step of the mean, by block of the whole tensor."""

    def run():
        comm = bk.Comm()
        worst = []
        for dtype in (torch.float32, torch.float64):
            x = draw(dist.get_rank(), length, dtype)
            result = bk.primitives.compressed_mean_(x.clone(), bk.compressors.MinMaxUInt8(block=64), comm)
            everyone = torch.stack([t.double() for t in comm.gather_objects(x)])
            mean = everyone.mean(0)
            if length:
                spread = (everyone.amax(1) - everyone.amin(1)).mean() + (mean.max() - mean.min())
                worst.append(float((result.double() - mean).abs().max() / (spread / 510 * 1.001 + 1e-6)))
            everywhere = comm.gather_objects(result)
            assert all(torch.equal(everywhere[0], other) for other in everywhere)
        return worst

    assert all(w <= 1 for worst in ranks(n, run) for w in worst)


@pytest.mark.parametrize(
    "length, n",
    [
        *((length, n) for length in (1, 200, 4097) for n in (2, 3, 4)),
        (40_001, 2),  # rows of several times 2¹³ values
        *(pytest.param(300_001, n, marks=pytest.mark.slow) for n in (2, 3, 4)),  # each rank compiles the codec
    ],
)
def test_what_is_lost_is_in_the_residuals(length, n):
    """Σ_r residual_r = Σ_r x_r − n · result, padding and fall-back included."""

    def run():
        comm = bk.Comm()
        x, residual = draw(dist.get_rank(), length), torch.full((length,), float("nan"))
        result = bk.primitives.compressed_mean_(x.clone(), bk.compressors.MinMaxUInt8(), comm, residual=residual)
        lost, total = residual.double(), x.double()
        dist.all_reduce(lost)
        dist.all_reduce(total)
        return float((lost - (total - n * result.double())).abs().max())

    assert all(error < 1e-5 for error in ranks(n, run))


@pytest.mark.parametrize("length", [999, 30_000])
@pytest.mark.parametrize("dtype", FLOATS)
def test_sixteen_bits_on_the_wire_are_summed_in_fp32(dtype, length):
    """And, of many, rounded to them again."""

    def run():
        comm = bk.Comm()
        x = draw(dist.get_rank(), length, dtype)
        result = bk.primitives.compressed_mean_(x.clone(), bk.compressors.BFloat16(), comm)
        rows = [t.bfloat16().float() for t in comm.gather_objects(x)]
        total = torch.zeros(length)
        for row in rows:
            total += row
        mean = total / torch.tensor([3.0])
        return torch.equal(result, (mean if length == 999 else mean.bfloat16()).to(dtype))

    assert ranks(3, run) == [True] * 3


COMPRESSORS = [
    "MinMaxUInt8()",
    "MinMaxUInt8(block=64, stochastic=True)",
    "UInt4()",
    "Float8()",
    "Sign()",
    "BFloat16()",
    "Float16()",
]


@pytest.mark.parametrize("name", COMPRESSORS)
@pytest.mark.parametrize("n", [2, 3])
def test_few_values_are_compressed_once_and_averaged_in_the_order_of_ranks(n, name):
    """result = (1/n) Σ_r Q(x_r) and residual_r = x_r − Q(x_r), bit for bit; (n − 1) c(N) bytes are sent."""

    def run():
        compressor, wrong = eval(f"bk.compressors.{name}"), []
        for length in (200, 512, 1001):
            for dtype in FLOATS:
                sent = {}
                comm = bk.Comm().for_flight(3, 3, 1, sent)
                x = draw(dist.get_rank(), length, dtype)
                residual, lost = torch.full((length,), float("nan")), torch.empty(1, length)
                result = bk.primitives.compressed_mean_(x.clone(), compressor, comm, residual=residual)
                packed = compressor.compress(x.view(1, -1), lost, key=comm.key())
                total, *others = (compressor.decompress(each, length)[0] for each in comm.gather_objects(packed))
                for other in others:
                    total = total + other
                expected = (total / torch.tensor([float(n)])).to(dtype)
                right = torch.equal(result, expected) and torch.equal(residual, lost[0])
                if not right or sent != {"flat": (n - 1) * compressor.row_bytes(length)}:
                    wrong.append((length, dtype, sent))
        return wrong

    assert ranks(n, run) == [[]] * n


@pytest.mark.parametrize("n", [2, 4, 16])
def test_few_is_what_is_sent_to_all_in_little(n):
    """Up to the last N with (n − 1) c(N) ≤ 32 KiB, and n N < 2¹⁶."""
    from baguakit.compressors import MinMaxUInt8, Sign

    byte, last = MinMaxUInt8(), most(n)
    assert all(in_one_hop(N, byte, n) for N in (*range(1, last, 61), last))
    assert not any(in_one_hop(N, byte, n) for N in (*range(last + 1, 1 << 16, 61), (1 << 16) - 1))
    assert (n - 1) * byte.row_bytes(last) <= 1 << 15 < (n - 1) * byte.row_bytes(last + 1)
    assert in_one_hop((1 << 16) // n - 1, Sign(), n) and not in_one_hop((1 << 16) // n, Sign(), n)


def most(n):
    """The most 8-bit values that n ranks send in one hop."""
    return bisect.bisect_left(range(1 << 16), True, lo=1, key=lambda N: not in_one_hop(N, MinMaxUInt8(), n)) - 1


@pytest.mark.parametrize("hops", [1, 2])
def test_both_ways_send_what_they_say_and_agree(hops):
    """(n − 1) c(N) up to the most that are few, and from the next on 2 (n − 1) c(N/n)."""
    length = most(3) + hops - 1

    def run():
        byte, sent, comm = bk.compressors.MinMaxUInt8(), {}, bk.Comm()
        x, residual = draw(dist.get_rank(), length), torch.empty(length)
        result = bk.primitives.compressed_mean_(x.clone(), byte, comm.for_flight(0, 0, 0, sent), residual=residual)
        lost, total = (comm.all_reduce(each.double()) for each in (residual, x))
        everyone = comm.gather_objects(result)
        assert all(torch.equal(everyone[0], other) for other in everyone)
        assert float((lost - (total - 3 * result.double())).abs().max()) < 1e-5
        return sent == {"flat": 2 * byte.row_bytes(length) if hops == 1 else 2 * 2 * byte.row_bytes(-(-length // 3))}

    assert ranks(3, run) == [True] * 3


def test_a_handful_of_values_travels_as_it_is():
    """The mean is exact if codes and ranges would take more bytes than the values."""

    def run():
        x, sent = draw(dist.get_rank(), 7), {}
        comm = bk.Comm().for_flight(0, 0, 0, sent)
        exact = bk.primitives.mean_(x.clone(), bk.Comm())
        return torch.equal(bk.primitives.compressed_mean_(x, bk.compressors.MinMaxUInt8(), comm), exact), sent

    assert ranks(4, run) == [(True, {"flat": 2 * 3 / 4 * 28})] * 4


def test_nan_and_inf_are_passed_on_and_never_spread_beyond_their_block():
    def run():
        x = draw(dist.get_rank(), 4096)
        if dist.get_rank() == 1:
            x[100], x[3000] = float("nan"), float("inf")
        result = bk.primitives.compressed_mean_(x, bk.compressors.MinMaxUInt8(block=64), bk.Comm())
        return (~result.isfinite()).nonzero().flatten().tolist()

    for broken in ranks(2, run):
        assert {100, 3000} <= set(broken) and len(broken) <= 2 * 64


@pytest.mark.parametrize("length", [1, 1000, 100_000])
def test_places_of_ones_own_are_not_averaged_as_if_all_were_there(length):
    def run():
        with pytest.raises(TypeError, match="sparse_mean_"):
            bk.primitives.compressed_mean_(torch.ones(length), bk.compressors.TopK(0.1), bk.Comm())

    ranks(2, run)


def long_mean_on_a_gpu(length):
    """The worst error of what the residuals say, and whether all ranks have the same result."""
    comm = bk.Comm()
    x, residual = draw(dist.get_rank(), length).cuda(), torch.full((length,), float("nan"), device="cuda")
    result = bk.primitives.compressed_mean_(x.clone(), bk.compressors.MinMaxUInt8(), comm, residual=residual)
    lost, total = (comm.all_reduce(each.double()) for each in (residual, x))
    everyone = comm.all_gather(result.view(1, -1))
    return float((lost - (total - comm.size * result.double())).abs().max()), bool((everyone == result).all())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("length", [5 << 20, (5 << 20) + 3])
def test_a_gpu_averages_a_long_tensor_in_one_piece(length):
    """Σ_r residual_r = Σ_r x_r − n · result, as in several pieces, and replicas are equal."""
    for error, alike in ranks(2, long_mean_on_a_gpu, length, cuda=True):
        assert error < 1e-5 and alike


def test_mean_takes_any_tensor_and_lists():
    def run():
        r, comm = float(dist.get_rank()), bk.Comm()
        transposed = torch.full((3, 2), r).T
        mixed = [torch.full((2, 2), r), torch.full((3,), r, dtype=torch.float64), torch.tensor(r), torch.empty(0)]
        for x in (transposed, mixed, [], torch.empty(0)):
            assert bk.primitives.mean_(x, comm) is x
        for bad in (torch.ones(2, dtype=torch.int64), [torch.ones(2), 3.0], torch.ones(2).to_sparse()):
            with pytest.raises(TypeError):
                bk.primitives.mean_(bad, comm)
        return all(bool((x == 1).all()) for x in [transposed, *mixed])

    assert ranks(3, run) == [True] * 3


@pytest.mark.parametrize("dtype", FLOATS)
def test_neighbors_are_summed_in_fp32(dtype):
    def run():
        comm = bk.Comm()
        x = draw(dist.get_rank(), 500, dtype)
        rows = comm.gather_objects(x.clone())
        r, wide = dist.get_rank(), torch.float64 if dtype == torch.float64 else torch.float32
        expected = rows[r].to(wide) * (1 / 3)
        for peer in sorted({(r - 1) % 4, (r + 1) % 4}):
            expected = expected + rows[peer].to(wide) * (1 / 3)
        bk.primitives.neighbor_mean_(x, bk.topology.Ring(), comm)
        error = (x.double() - expected.to(dtype).double()).abs().max()
        return float(error), float(torch.finfo(dtype).eps) * 4

    for error, allowed in ranks(4, run):
        assert error <= allowed


def test_a_periodic_topology_wants_a_round():
    def run():
        with pytest.raises(ValueError, match="has no round"):
            bk.primitives.neighbor_mean_(torch.ones(3), bk.topology.OnePeerExponential(), bk.Comm())
        bk.primitives.neighbor_mean_(torch.ones(3), bk.topology.Ring(), bk.Comm())

    ranks(3, run)


@pytest.mark.parametrize("ratio", [0.01, 0.3, 1.0])
@pytest.mark.parametrize("dtype", FLOATS)
def test_sparse_mean_is_the_mean_of_what_is_kept(ratio, dtype):
    """result = (1/n) Σ_r (x_r − residual_r), replicas are bitwise equal, and with ratio 1 nothing is lost."""

    def run():
        comm = bk.Comm()
        x, residual = draw(dist.get_rank(), 700, dtype), torch.full((700,), float("nan"))
        result = bk.primitives.sparse_mean_(x.clone(), bk.compressors.TopK(ratio), comm, residual=residual)
        kept = comm.all_reduce(x.double() - residual.double()) / comm.size
        everyone = comm.gather_objects(result)
        assert all(torch.equal(everyone[0], other) for other in everyone)
        return float((result.double() - kept).abs().max()), int((residual == 0).sum())

    for error, sent in ranks(3, run):
        assert error <= 2 * torch.finfo(dtype).eps + 1e-6 and sent >= round(ratio * 700)
