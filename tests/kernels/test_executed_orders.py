"""Means over ranks in one kernel are the same in every order of programs: run with `--ptx ARCH`."""

import random

import pytest

pytest.importorskip("triton")
from exchanges import CODECS, EXACT, USUAL, Mean, Node, checked, run, wrong

from baguakit.compressors import MinMaxUInt8, UInt4
from ptx.ranks import drawn, every

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800), pytest.mark.usefixtures("only_executed")]


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", [*USUAL, EXACT])
def test_a_hundred_orders(name, ranks, executed_gpu):
    """Of two lengths, with a rest behind whole tiles; two hops and one in turns."""
    codec, source = CODECS[name], random.Random(f"{name} of {ranks} ranks")
    one_hop = bool(list(USUAL).index(name) % 2 if codec else ranks % 2)
    shards = [source.randrange(8192 // (1 if one_hop else ranks)) // 2 * 2 + 1 for _ in range(2)]
    for seed in range(100):
        length = shards[seed % 2] if one_hop else (shards[seed % 2] - 1) * ranks + 1
        mean = Mean(ranks, length, codec, residual=codec is not None, one_hop=one_hop, seed=seed % 2)
        [order] = drawn(1, seed)
        checked(executed_gpu, mean, order=order)


@pytest.mark.parametrize("one_hop", [False, True], ids=["two hops", "one hop"])
@pytest.mark.parametrize("codec", [MinMaxUInt8(), None], ids=repr)
def test_every_order_with_two_preemptions(codec, one_hop, executed_gpu):
    """Of two ranks with two programs each, of which the first has values."""
    mean = Mean(2, 129, codec, one_hop=one_hop)
    for order in every(preemptions=2):
        checked(executed_gpu, mean, order=order)


@pytest.mark.parametrize("one_hop", [False, True], ids=["two hops", "one hop"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_means_one_after_another(ranks, one_hop, executed_gpu):
    """Of the same length and of others: the rows then lie elsewhere in the memory."""
    lengths = (4001, 4001, 77, 8191, 1)
    means = [
        Mean(ranks, n if one_hop else (n - 1) * ranks + 1, UInt4(), residual=True, one_hop=one_hop, seed=place)
        for place, n in enumerate(lengths)
    ]
    for order in drawn(5):
        checked(executed_gpu, *means, order=order)


def test_means_in_one_hop_and_in_two_of_several_formats_one_after_another(executed_gpu):
    means = [
        Mean(2, 1001, UInt4(), residual=True, one_hop=True),
        Mean(2, 1001),
        Mean(2, 8001, UInt4(), residual=True),
        Mean(2, 1001, one_hop=True),
    ]
    for order in drawn(5):
        checked(executed_gpu, *means, *means, order=order)


@pytest.mark.parametrize("begun", [2**32 - 150, 2**31 - 150], ids=["2^32", "2^31"])
@pytest.mark.parametrize("one_hop", [False, True], ids=["two hops", "one hop"])
def test_three_hundred_means_while_the_numbers_wrap(begun, one_hop, executed_gpu):
    source = random.Random(begun)
    means = [Mean(2, source.choice([1, 65, 129, 257]), one_hop=one_hop, seed=place) for place in range(20)] * 15
    [order] = drawn(1, begun)
    checked(executed_gpu, *means, order=order, begun=begun)


@pytest.mark.parametrize("ctas", [1, 3])
def test_other_numbers_of_programs(ctas, executed_gpu):
    """One takes all tiles; of three one has none."""
    for order in drawn(5):
        checked(executed_gpu, Mean(2, 2 * 8193 - 1), order=order, ctas=ctas)


def test_memory_that_is_too_small_is_refused_before_anything_is_launched(executed_gpu):
    mean = Mean(2, 1001)
    rows = 4 * mean.wire.row_bytes(mean.shard)
    node, before = Node(2, rows - 16, 2), len(executed_gpu.launches)
    with pytest.raises(ValueError, match=r"a mean of 1,001 values needs 8,\d+ bytes; half the memory is 8,\d+"):
        run(executed_gpu, node, mean)
    assert len(executed_gpu.launches) == before


def test_the_comparison_finds_a_value_that_differs(executed_gpu):
    mean = Mean(2, 129)
    node = Node(2, mean.bytes, 2)
    results = run(executed_gpu, node, mean)
    assert not wrong(node, results, mean)
    results.values[0][1][128] += 1
    assert "mean 0, rank 1: " in wrong(node, results, mean) and "value 128 of 129" in wrong(node, results, mean)
