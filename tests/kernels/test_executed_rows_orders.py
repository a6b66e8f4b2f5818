"""Exchanges in one hop in one kernel are the same in every order of programs: run with `--ptx ARCH`."""

import random

import pytest

pytest.importorskip("triton")
from row_exchanges import AllGather, AllToAll, Averaged, NeighborMean, Place, ReduceScatter, checked, run, unlike, wrong

from baguakit.compressors import MinMaxUInt8, UInt4
from baguakit.topology import Grid2D, RandomMatching
from ptx.ranks import drawn, every

SECOND = 10**9
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800), pytest.mark.usefixtures("only_executed")]


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("codec", [UInt4(), None], ids=repr)
@pytest.mark.parametrize("kind", [ReduceScatter, AllGather, AllToAll])
def test_a_hundred_orders(kind, codec, ranks, executed_gpu):
    source = random.Random(f"{kind.__name__} of {ranks} ranks")
    lengths = [source.randrange(8192 // ranks) // 2 * 2 + 1 for _ in range(2)]
    for seed, order in enumerate(drawn(100)):
        checked(executed_gpu, kind(ranks, lengths[seed % 2], codec, seed=seed % 2), order=order)


@pytest.mark.parametrize("ranks", [3, 4])
@pytest.mark.parametrize("topology", [Grid2D(), RandomMatching(), None], ids=repr)
def test_means_of_neighbours_of_whom_some_come_ahead(topology, ranks, executed_gpu):
    """Rounds of topologies; or rank 0 writes to rank 1, which writes to rank 2, and nobody writes to rank 0."""
    edges = None if topology else tuple((rank, rank + 1) for rank in range(ranks - 1))
    kind = {"edges": edges} if edges else {"topology": topology}
    means = [NeighborMean(ranks, 129 + 64 * (k % 2), seed=k, round=k, **kind) for k in range(4)]
    for order in drawn(100 if ranks == 3 else 20):
        checked(executed_gpu, *means, order=order)


@pytest.mark.parametrize("kind", [ReduceScatter, AllGather, AllToAll, NeighborMean])
def test_every_order_with_two_preemptions(kind, executed_gpu):
    """Of two ranks with two programs each, of which the first has values."""
    codec = None if kind is NeighborMean else MinMaxUInt8()
    for order in every(preemptions=2):
        checked(executed_gpu, kind(2, 129, codec), order=order)


def test_every_order_with_a_preemption_of_neighbours_that_use_a_half_again(executed_gpu):
    means = [NeighborMean(2, 65, seed=k, edges=((0, 1),)) for k in range(3)]
    for order in every(preemptions=1):
        checked(executed_gpu, *means, order=order, ctas=1)


@pytest.mark.parametrize("ranks", [2, 3])
def test_exchanges_of_all_kinds_one_after_another(ranks, executed_gpu):
    kinds = [
        AllGather(ranks, 4001, UInt4()),
        ReduceScatter(ranks, 1001, UInt4(), residual=True, average=True),
        Averaged(ranks, 1001),
        AllToAll(ranks, 3001, UInt4(), seed=4),
        AllGather(ranks, 77),
        Averaged(ranks, 77),
        ReduceScatter(ranks, 501, seed=1),
    ]
    for order in drawn(5):
        checked(executed_gpu, *kinds, *kinds, order=order)


@pytest.mark.parametrize("begun", [2**32 - 50, 2**31 - 50], ids=["2^32", "2^31"])
def test_a_hundred_exchanges_while_the_numbers_wrap(begun, executed_gpu):
    gathers = [AllGather(2, n, seed=n) for n in (1, 129, 65, 257)] * 25
    means = [NeighborMean(3, n, seed=n, edges=((0, 1), (1, 2), (2, 1))) for n in (1, 129, 65, 257)] * 25
    for exchanges in (gathers, means):
        checked(executed_gpu, *exchanges, order=next(drawn(1, begun)), begun=begun)


@pytest.mark.parametrize("ctas", [1, 3])
def test_other_numbers_of_programs(ctas, executed_gpu):
    """One takes all tiles; of three one has none."""
    for order in drawn(5):
        checked(executed_gpu, ReduceScatter(2, 8191), order=order, ctas=ctas)
        checked(executed_gpu, *[NeighborMean(3, 8191, edges=((0, 1), (1, 2)), seed=k) for k in range(3)], ctas=ctas)


# A rank that does not come.


@pytest.mark.parametrize("kind", [ReduceScatter, AllGather, AllToAll])
def test_nobody_waits_for_a_rank_that_never_comes(kind, executed_gpu):
    exchange = kind(3, 301)
    for late, order in enumerate(drawn(3)):
        place = Place([exchange], limit=SECOND)
        results, heard, _ = run(
            executed_gpu, place, exchange, order=order, come=[int(rank != late) for rank in range(3)]
        )
        for rank in {0, 1, 2} - {late}:
            assert results[0][rank][0].isnan().all() and not heard[0][rank].any()
            assert place.control[rank].tolist() == [0, *(int(each == late) for each in range(3))]


def test_ranks_that_are_no_neighbours_do_not_wait_for_each_other(executed_gpu):
    """Ranks 0 and 1 hear each other; rank 2 never comes."""
    means = [NeighborMean(3, 301, edges=((0, 1), (1, 0)), seed=seed) for seed in range(4)]
    for order in drawn(3):
        place = Place(means)
        results, heard, _ = run(executed_gpu, place, *means, order=order, come=[4, 4, 0])
        for mean, values, all_heard in zip(means, results, heard, strict=True):
            assert all(values[rank][0].equal(mean.wanted[rank][0]) and all_heard[rank].all() for rank in (0, 1))


def test_a_neighbour_that_never_comes_is_named(executed_gpu):
    """Rank 0 writes to rank 1, which does not come: once before it waits, then no more. Rank 2 hears nobody."""
    means = [NeighborMean(3, 301, edges=((0, 1),), seed=seed) for seed in range(2)]
    for order in drawn(3):
        place = Place(means, limit=SECOND)
        results, heard, _ = run(executed_gpu, place, *means, order=order, come=[2, 0, 2])
        assert heard[0][0].all() and results[0][0][0].equal(means[0].wanted[0][0])
        assert not heard[1][0].any() and results[1][0][0].isnan().all()
        assert place.control[0].tolist() == [0, 0, 1, 0]
        assert all(heard[k][2].all() and results[k][2][0].equal(means[k].wanted[2][0]) for k in range(2))


def test_the_host_of_a_rank_ends_its_wait(executed_gpu):
    exchange = AllGather(3, 301)
    place = Place([exchange], limit=SECOND)
    place.control[1][0] = 1
    results, heard, _ = run(executed_gpu, place, exchange, come=[0, 1, 1])
    assert not heard[0][1].any() and results[0][1][0].isnan().all()
    assert wrong(place, results, {}, exchange) and unlike(results, exchange)
