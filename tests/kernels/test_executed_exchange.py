"""A mean over the ranks of a node in one kernel equals its definition: run with `--ptx ARCH` (test_executed_here.py).

The kernel's code is compiled for a number of variants, of which compiling takes most of the time: a format is tried
with few of them, and with many lengths, ranks and orders.
"""

import random

import pytest
import torch

pytest.importorskip("triton")
from exchanges import CODECS, EXACT, FLOATS, USUAL, Mean, checked
from hostile import KINDS
from tiers import slow

from baguakit.compressors import UInt4
from ptx.ranks import drawn

pytestmark = pytest.mark.usefixtures("only_executed")


@pytest.mark.parametrize(
    "mean, orders",
    [
        slow((Mean(3, 9001, UInt4(), residual=True), 1)),
        (Mean(3, 901, UInt4(), residual=True, kind="broken"), 1),
        (Mean(2, 4099, dtype=torch.bfloat16), 2),
    ],
    ids=["in four bits", "in four bits, broken", "exact"],
)
def test_a_mean_equals_its_definition(mean, orders, executed_gpu):
    for order in drawn(orders):
        checked(executed_gpu, mean, order=order)


def cases(name, arch):
    """Yield means of a format: of few variants, each at two lengths."""
    source, codec = random.Random(f"cases of {name}"), CODECS[name]
    usual = name in (*USUAL, EXACT)
    for place, ranks in enumerate(source.sample([2, 3, 4, 8], 4)[: 4 if usual and arch == 90 else 2]):
        one_hop, residual = place % 2 == 1, place < 2 and codec is not None
        kinds = source.sample(KINDS, 2)
        dtype = FLOATS[(place + source.randrange(2)) % 3]
        for kind in kinds:
            # Shards of an odd length, so that the code is one variant.
            shard = round((70_000 / (1 if one_hop else ranks)) ** source.random()) // 2 * 2 + 1
            length = shard if one_hop else shard * ranks - source.randrange(ranks)
            yield Mean(ranks, length, codec, dtype, residual, one_hop, kind, place)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", CODECS)
def test_means_of_every_format_equal_their_definition(name, executed_gpu):
    if executed_gpu.arch != 90 and name not in (*USUAL, EXACT):
        pytest.skip("formats that are seldom used, on one architecture")
    for seed, mean in enumerate(cases(name, executed_gpu.arch)):
        for order in drawn(3 if seed % 2 else 1, seed):
            checked(executed_gpu, mean, order=order)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("codec", [UInt4(), None], ids=repr)
def test_means_of_whole_tiles_equal_their_definition(codec, ranks, executed_gpu):
    """Tiles without masks, accessed in sixteen bytes."""
    for one_hop, tiles in ((False, 3 * ranks), (True, 5)):
        mean = Mean(ranks, 4096 * tiles, codec, residual=codec is not None, one_hop=one_hop)
        for order in drawn(3):
            checked(executed_gpu, mean, order=order)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("length", [2 * 4096, 2 * 4100, 2 * 4101])
@pytest.mark.parametrize("apart", [1, 2, 4, 8])
def test_means_of_tensors_that_begin_anywhere(apart, length, executed_gpu):
    """Tiles are whole, and accessed in as many bytes as the address allows."""
    checked(executed_gpu, Mean(2, length, dtype=torch.bfloat16), apart=apart)
