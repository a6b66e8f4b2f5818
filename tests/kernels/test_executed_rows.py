"""Exchanges in one hop in one kernel equal the primitives': run with `--ptx ARCH` (test_executed_here.py)."""

import random

import pytest
import torch

pytest.importorskip("triton")
from exchanges import CODECS, FLOATS, USUAL
from hostile import KINDS
from row_exchanges import INTEGERS, AllGather, AllToAll, NeighborMean, Place, ReduceScatter, checked, run, wrong

from baguakit.compressors import UInt4
from baguakit.kernels.exchange.tiles_gpu import Wire
from baguakit.topology import BaseK, Exponential, FullyConnected, Grid2D, OnePeerExponential, RandomMatching, Ring, Star
from ptx.ranks import drawn

pytestmark = pytest.mark.usefixtures("only_executed")

TOPOLOGIES = (
    Ring(), Star(), Grid2D(), Exponential(), FullyConnected(), BaseK(1), OnePeerExponential(), RandomMatching(),
)  # fmt: skip

PACKED = (ReduceScatter, AllGather, AllToAll)


def slow(*values):
    return pytest.param(*values, marks=[pytest.mark.slow, pytest.mark.timeout(900)])


@pytest.mark.parametrize(
    "exchange, orders",
    [
        (AllToAll(3, 901, UInt4(), seed=3), 1),
        (ReduceScatter(3, 901, dtype=torch.bfloat16, average=True, kind="broken"), 2),
        (NeighborMean(3, 901, dtype=torch.bfloat16, topology=Grid2D(), kind="broken"), 1),
        slow(AllGather(2, 901, dtype=torch.float16, kind="broken"), 3),
        slow(AllGather(2, 901, UInt4(), kind="broken"), 3),
        slow(ReduceScatter(2, 901, UInt4(), residual=True, kind="broken"), 3),
    ],
    ids=["splits", "shards", "neighbours", "bytes", "rows in four bits", "shards in four bits"],
)
def test_an_exchange_equals_its_definition(exchange, orders, executed_gpu):
    for order in drawn(orders):
        checked(executed_gpu, exchange, order=order)


def odd(source, most):
    """Return a length whose parts begin at odd places, so that all of them have the same code."""
    return round(most ** source.random()) // 2 * 2 + 1


def packed(name):
    """Yield exchanges of a format: of few variants, each at two lengths."""
    source, codec = random.Random(f"rows of {name}"), CODECS[name]
    for place, (kind, ranks) in enumerate(zip(PACKED, source.sample([2, 3, 4], 3), strict=True)):
        dtype = FLOATS[(place + source.randrange(2)) % 3]
        more = {"residual": True, "average": source.random() < 0.5} if kind is ReduceScatter else {}
        for seed, values in enumerate(source.sample(KINDS, 2)):
            yield kind(ranks, odd(source, 70_000 // ranks), codec, dtype, values, seed + 10 * ranks, **more)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", [name for name, codec in CODECS.items() if codec])
def test_exchanges_of_every_format_equal_their_definition(name, executed_gpu):
    if executed_gpu.arch != 90 and name not in USUAL:
        pytest.skip("formats that are seldom used, on one architecture")
    for seed, exchange in enumerate(packed(name)):
        for order in drawn(3 if seed % 2 else 1, seed):
            checked(executed_gpu, exchange, order=order)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("dtype", [*FLOATS, torch.float64, *INTEGERS], ids=str)
def test_bytes_of_any_dtype_come_as_they_are(dtype, executed_gpu):
    source = random.Random(str(dtype))
    for seed, (kind, ranks) in enumerate([(AllGather, 2), (AllGather, 3), (AllToAll, 3), (AllToAll, 4)]):
        for kind_of_values in source.sample(KINDS, 2):
            exchange = kind(ranks, odd(source, 70_000 // ranks), None, dtype, kind_of_values, seed)
            checked(executed_gpu, exchange, order=next(drawn(1, seed)))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_exact_sums_and_means_of_neighbours_equal_their_definition(dtype, executed_gpu):
    source = random.Random(str(dtype))
    for seed, ranks in enumerate((2, 3, 4, 4)):
        values = source.choice(KINDS)
        exchanges = [
            ReduceScatter(ranks, odd(source, 70_000 // ranks), None, dtype, values, seed, average=seed % 2 == 0)
        ]
        edges = tuple((s, r) for s in range(ranks) for r in range(ranks) if s != r and source.random() < 0.6)
        for topology in source.sample(TOPOLOGIES, 3):
            at = source.randrange(5)
            exchanges.append(NeighborMean(ranks, odd(source, 35_000), None, dtype, values, seed, topology, at))
        exchanges.append(NeighborMean(ranks, odd(source, 35_000), None, dtype, values, seed, edges=edges))
        for exchange in exchanges:
            checked(executed_gpu, exchange, order=next(drawn(1, seed)))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("codec", [UInt4(), None], ids=repr)
def test_exchanges_of_whole_tiles_equal_their_definition(codec, executed_gpu):
    """Tiles without masks, accessed in sixteen bytes; and parts that begin anywhere."""
    means = () if codec else (NeighborMean(3, 2 * 4096),)
    for exchange in (ReduceScatter(2, 3 * 4096, codec), AllGather(2, 3 * 4096, codec), *means):
        for apart in (0, 1, 2):
            checked(executed_gpu, exchange, order=next(drawn(1, apart)), apart=apart)


@pytest.mark.slow
def test_an_exchange_of_no_values(executed_gpu):
    for exchange in (AllToAll(2, 0, UInt4()), AllToAll(2, 0), NeighborMean(2, 0)):
        checked(executed_gpu, exchange)


@pytest.mark.slow
def test_memory_that_is_too_small_or_for_other_exchanges_is_refused(executed_gpu):
    gather, mean = AllGather(2, 1001), NeighborMean(2, 1001)
    before = len(executed_gpu.launches)
    place = Place([gather])
    place.half -= 16
    with pytest.raises(ValueError, match=r"an all-gather needs 8,\d+ bytes; half the memory is 8,\d+"):
        run(executed_gpu, place, gather)
    with pytest.raises(
        ValueError, match="a mean of neighbours is an exchange between neighbours, and the memory is for"
    ):
        run(executed_gpu, Place([gather]), mean)
    with pytest.raises(ValueError, match="an all-gather is an exchange of all ranks, and the memory is for those betw"):
        run(executed_gpu, Place([mean]), gather)
    with pytest.raises(TypeError, match=r"adds float32, bfloat16 or float16, not torch\.float64"):
        run(executed_gpu, Place([gather]), NeighborMean(2, 11, dtype=torch.float64))
    with pytest.raises(TypeError, match=r"not torch\.int32"):
        Wire(None, dtype=torch.int32, exact=True)
    assert len(executed_gpu.launches) == before


@pytest.mark.slow
def test_the_comparison_finds_a_value_that_differs(executed_gpu):
    exchange = AllGather(2, 129)
    place = Place([exchange])
    results, heard, _ = run(executed_gpu, place, exchange)
    assert not wrong(place, results, heard, exchange)
    results[0][1][0][128] += 1
    assert "exchange 0, rank 1: " in wrong(place, results, heard, exchange)
