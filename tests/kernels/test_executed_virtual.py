"""Virtual ranks, one grid on one GPU, have the mean of ranks that run apart: run with `--ptx ARCH`."""

import pytest
import torch

pytest.importorskip("triton")
from exchanges import CODECS, EXACT, USUAL, Mean
from hostile import difference

from bench.exchange.node import Node, mean_of_virtual_ranks_, needed, separately
from ptx.ranks import drawn, together

pytestmark = pytest.mark.usefixtures("only_executed")

LENGTH = 5001  # in one hop a whole tile, and a rest


def check(gpu, mean, order):
    """Average as virtual ranks do, and compare with the definition."""
    node = Node(mean.ranks, needed(mean.ranks, mean.wire, mean.length, mean.one_hop), 2)
    values, residuals = torch.stack(mean.values), torch.zeros(mean.ranks, mean.length) if mean.residual else None
    signals = {f"signals of virtual rank {rank}": [each] for rank, each in enumerate(node.signals)}
    found = []

    def launch(_):
        found.append(mean_of_virtual_ranks_(node, mean.wire, values, residuals, mean.one_hop))

    done = together(gpu, 1, launch, signals=signals, order=order)
    value, lost = mean.wanted
    assert done.launches == (1,)
    assert [row.tolist() for row in found[0]] == [mean.good(2)] * mean.ranks
    for rank in range(mean.ranks):
        assert not difference(values[rank], value)
        assert residuals is None or not difference(residuals[rank], lost[rank])


def test_virtual_ranks_have_the_mean_of_ranks(executed_gpu):
    for order in drawn(2):
        check(executed_gpu, Mean(2, 501, one_hop=True), order)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("one_hop", [False, True], ids=["two hops", "one hop"])
@pytest.mark.parametrize("name", [*USUAL, EXACT])
def test_virtual_ranks_have_the_mean_of_ranks_in_every_format(name, one_hop, executed_gpu):
    [order] = drawn(1, len(name))
    check(executed_gpu, Mean(3, LENGTH, CODECS[name], residual=name != EXACT, one_hop=one_hop, kind="broken"), order)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("one_hop", [False, True], ids=["two hops", "one hop"])
@pytest.mark.parametrize("name", [*USUAL, EXACT])
def test_kernels_apart_have_the_mean_of_the_definition(name, one_hop, executed_gpu):
    mean = Mean(3, LENGTH, CODECS[name], residual=name != EXACT, one_hop=one_hop)
    residuals = [torch.zeros(mean.length) for _ in mean.values] if mean.residual else None
    value, lost = mean.wanted
    found = separately(mean.codec, mean.values, residuals, one_hop)
    assert not any(difference(each, value) for each in found)
    assert not any(difference(ours, theirs) for ours, theirs in zip(residuals or (), lost, strict=True))


def test_memory_that_is_too_small_is_refused(executed_gpu):
    mean = Mean(2, 1001)
    node = Node(2, 128, 2)
    with pytest.raises(ValueError, match=r"a mean of 1,001 values needs 8,\d+ bytes; half the memory is 128"):
        mean_of_virtual_ranks_(node, mean.wire, torch.stack(mean.values))
