"""Compressed collectives: results equal what the codec makes of each message, and bytes equal the formula."""

import pytest
import torch
from drawn import FLOATS, all_of_them, draw
from pool import ranks
from tiers import slow_after

import baguakit as bk

SIZES = slow_after(1, [3, 2, 4, 5])
FORMATS = ["MinMaxUInt8()", "UInt4()", "MinMaxUInt8(block=64, stochastic=True)", "BFloat16()"]


def cases():
    """Yield (compressor, dtype, width of a row): widths that pay and do not, and one of several pieces."""
    for name in FORMATS:
        for dtype in FLOATS if name == "MinMaxUInt8()" else FLOATS[:1]:
            yield from ((eval(f"bk.compressors.{name}"), dtype, width) for width in (1, 5, 64, 1001))


def rounded(compressor, x, comm, salt=0):
    """Q(x) of the rank of `comm`, and the bytes of the message."""
    packed = compressor.compress(x.reshape(1, -1), key=comm.key(salt))
    if packed.nbytes > x.nbytes:
        return x, x.nbytes
    return compressor.decompress(packed, x.numel(), x.dtype).view(x.shape), packed.nbytes


@pytest.mark.parametrize("n", SIZES)
def test_gathered_are_the_rounded_values_of_all_ranks(n):
    def run():
        wrong = []
        for compressor, dtype, width in cases():
            sent = {}
            comm = bk.Comm().for_flight(3, 3, 1, sent)
            x = draw(comm.rank, 3 * width, dtype).view(3, width)
            before = x.clone()
            out = bk.primitives.compressed_all_gather(x, compressor, comm)
            mine, nbytes = rounded(compressor, x, comm)
            expected = torch.cat(comm.gather_objects(mine))
            again = torch.full_like(out, float("nan"))
            again[comm.rank * 3 : comm.rank * 3 + 3] = x  # as a part of the output
            bk.primitives.compressed_all_gather(again[comm.rank * 3 :][:3], compressor, comm, out=again)
            right = torch.equal(out, expected) and torch.equal(again, out) and torch.equal(x, before)
            if not right or sent != {"flat": 2 * (n - 1) * nbytes}:
                wrong.append((compressor, dtype, width, sent))
        return wrong

    assert ranks(n, run) == [[]] * n


@pytest.mark.parametrize("n", SIZES)
def test_a_shard_is_the_sum_of_rounded_shards_in_the_order_of_ranks(n):
    """shard_r = Σ_q Q(shard r of x_q), residual_q = x_q − Q(x_q); and bytes are (n − 1) c(N/n)."""

    def run():
        wrong = []
        for compressor, dtype, width in cases():
            sent = {}
            comm = bk.Comm().for_flight(3, 3, 1, sent)
            x = draw(comm.rank, n * width, dtype).view(n, width)
            before, residual = x.clone(), torch.full((n * width,), float("nan"))
            shard = bk.primitives.compressed_reduce_scatter(x, compressor, comm, residual)
            mean = bk.primitives.compressed_reduce_scatter(x, compressor, comm, average=True)
            again = x.clone()  # as a part of the input
            bk.primitives.compressed_reduce_scatter(again, compressor, comm, out=again[comm.rank])
            lost = torch.empty(n, width)
            packed = compressor.compress(x, lost, key=comm.key())
            if packed.nbytes > x.nbytes:
                everyone = torch.stack(comm.gather_objects(x)).double()[:, comm.rank]
                right = torch.allclose(shard[0].double(), everyone.sum(0), rtol=0, atol=0.1) and not residual.any()
                nbytes = width * x.element_size()
            else:
                seen = [compressor.decompress(each, width)[comm.rank] for each in comm.gather_objects(packed)]
                total = seen[0].clone()
                for other in seen[1:]:
                    total += other
                averaged = sum(((one * (1 / n)).double() for one in seen), torch.zeros(width, dtype=torch.float64))
                right = torch.equal(shard[0], total.to(dtype)) and torch.equal(residual.view(n, -1), lost)
                right &= torch.allclose(mean[0].double(), averaged, rtol=1e-2, atol=1e-2)
                nbytes = compressor.row_bytes(width)
            right &= torch.equal(x, before) and torch.equal(again[comm.rank], shard[0])
            if not right or sent != {"flat": 3 * (n - 1) * nbytes}:
                wrong.append((compressor, dtype, width, sent))
        return wrong

    assert ranks(n, run) == [[]] * n


def splits(rank, n):
    """The rows from `rank` to each of `n`: none to some, and rank 1 hears nobody but itself."""
    return [(3 * rank + 5 * r) % 4 * (r != 1) + (r == rank) for r in range(n)]


@pytest.mark.parametrize("n", SIZES)
def test_every_part_arrives_rounded_and_a_rank_s_own_exact(n):
    """out_r = [Q(part r of x_q)]_q, in equal parts and unequal ones; bytes are those of the parts."""

    def run():
        wrong = []
        for compressor, dtype, width in cases():
            if getattr(compressor, "stochastic", False):
                continue  # its draws differ by part: see the test of draws
            for parts in (None, [splits(q, n) for q in range(n)]):
                sent = {}
                comm = bk.Comm().for_flight(3, 3, 1, sent)
                rows = [2] * n if parts is None else parts[comm.rank]
                x = draw(comm.rank, sum(rows) * width, dtype).view(-1, width)
                before = x.clone()
                given = () if parts is None else ([parts[q][comm.rank] for q in range(n)], rows)
                out = bk.primitives.compressed_all_to_all(x, compressor, comm, *given)
                again = torch.full_like(out, float("nan"))
                bk.primitives.compressed_all_to_all(x, compressor, comm, *given, out=again)
                pieces, nbytes = list(x.split(rows)), 0
                for r in set(range(n)) - {comm.rank}:
                    if pieces[r].numel():
                        pieces[r], more = rounded(compressor, pieces[r], comm)
                        nbytes += more
                expected = torch.cat([theirs[comm.rank] for theirs in comm.gather_objects(pieces)])
                right = torch.equal(out, expected) and torch.equal(again, expected) and torch.equal(x, before)
                if not right or sent.get("flat", 0) != 2 * nbytes:
                    wrong.append((compressor, dtype, width, parts, sent, nbytes))
        return wrong

    assert ranks(n, run) == [[]] * n


@pytest.mark.parametrize("n", SIZES)
def test_all_get_the_rounded_values_of_the_source(n):
    """In one hop the source sends (n − 1) c(N); in a chain all ranks but the last send c(N)."""

    def run():
        wrong = []
        for source in {0, n - 1}:
            for compressor, dtype, width in [*cases(), (bk.compressors.MinMaxUInt8(), torch.float32, 40_000)]:
                sent = {}
                comm = bk.Comm().for_flight(3, 3, 1, sent)
                x = draw(comm.rank, width, dtype)
                mine, nbytes = rounded(compressor, x, comm)
                expected = comm.gather_objects(mine)[source]
                same = bk.primitives.compressed_broadcast_(x, compressor, comm, source) is x
                every = comm.gather_objects(sent.get("flat", 0))
                place = [(r - source) % n for r in range(n)]
                if not compressor.row_bytes(width) <= x.nbytes:
                    theirs = [(n - 1) / n * nbytes] * n
                elif (n - 1) * nbytes <= 1 << 15:
                    theirs = [(n - 1) * nbytes * (p == 0) for p in place]
                else:
                    theirs = [nbytes * (p < n - 1) for p in place]
                if not same or not torch.equal(x, expected) or every != theirs:
                    wrong.append((source, compressor, dtype, width, every, theirs))
        return wrong

    assert ranks(n, run) == [[]] * n


@pytest.mark.parametrize("n", [2, 3])
def test_a_message_arrives_rounded(n):
    """Round a ring, and into a tensor with gaps."""

    def run():
        wrong = []
        for compressor, dtype, width in cases():
            sent = {}
            comm = bk.Comm().for_flight(3, 3, 1, sent)
            after, before = (comm.rank + 1) % n, (comm.rank - 1) % n
            x = draw(comm.rank, 2 * width, dtype).view(2, width)
            heard = torch.full((width, 2), float("nan"), dtype=dtype).T
            if comm.rank:
                bk.primitives.compressed_receive_(heard, compressor, comm, before)
            bk.primitives.compressed_send(x, compressor, comm, after)
            if not comm.rank:
                bk.primitives.compressed_receive_(heard, compressor, comm, before)
            mine, nbytes = rounded(compressor, x, comm)
            if not torch.equal(heard, comm.gather_objects(mine)[before]) or sent != {"flat": nbytes}:
                wrong.append((compressor, dtype, width, sent))
        return wrong

    assert ranks(n, run) == [[]] * n


def test_a_value_that_is_not_finite_is_passed_on():
    """And only the block in which it stands is touched."""

    def run():
        byte, comm = bk.compressors.MinMaxUInt8(block=64), bk.Comm()
        x = torch.zeros(3, 640)
        x[:, 70] = float("nan") if comm.rank == 1 else 0
        gathered = bk.primitives.compressed_all_gather(x, byte, comm).isnan()
        shard = bk.primitives.compressed_reduce_scatter(x, byte, comm).isnan()
        swapped = bk.primitives.compressed_all_to_all(x, byte, comm).isnan()
        spread = bk.primitives.compressed_broadcast_(x, byte, comm, source=1).isnan()
        return [int(each.any(1).sum()) for each in (gathered, shard, swapped, spread)] + [
            bool(each[:, :64].any() or each[:, 128:].any()) for each in (gathered, shard, swapped, spread)
        ]

    assert ranks(3, run) == [[3, 1, 1, 3] + [False] * 4] * 3


def test_draws_differ_by_rank_and_by_part():
    def run():
        drawn, comm = bk.compressors.MinMaxUInt8(stochastic=True), bk.Comm().at(7)
        x = torch.linspace(0, 1, 512).repeat(2, 1)
        gathered = bk.primitives.compressed_all_gather(x[0], drawn, comm).view(2, -1)
        again = bk.primitives.compressed_all_gather(x[0], drawn, comm).view(2, -1)
        later = bk.primitives.compressed_all_gather(x[0], drawn, comm.at(8)).view(2, -1)
        return torch.equal(gathered[0], gathered[1]), torch.equal(gathered, again), torch.equal(gathered, later)

    assert ranks(2, run) == [(False, True, False)] * 2


@pytest.mark.parametrize("n", SIZES)
def test_what_is_sent_in_pieces_is_as_if_sent_whole(n):
    """All results are equal, bit for bit, in one piece and in several, to all at once and around a ring."""

    def run():
        from baguakit.primitives import compressed as pieces
        from baguakit.primitives import transports

        expected, right = all_of_them(bk.Comm()), []
        usual = pieces.PIECE_VALUES, transports.RING
        try:
            pieces.PIECE_VALUES = 1 << 10
            for transports.RING in (usual[1], 1):
                found = all_of_them(bk.Comm())
                right += [torch.equal(a, b) for a, b in zip(expected, found, strict=True)]
        finally:
            pieces.PIECE_VALUES, transports.RING = usual
        return right

    assert ranks(n, run) == [[True] * 14] * n
