"""Means of primitives in one kernel equal those over collectives, bit for bit: run with `--ptx ARCH`."""

from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("triton")
from exchanges import CODECS, EXACT, FLOATS, USUAL, Mean, run
from hostile import difference
from pool import ranks
from through_primitives import Primitives, by_collectives

import baguakit as bk
from baguakit.comm import blocks, symmetric
from baguakit.compressors import UInt4
from baguakit.primitives import compressed
from ptx.ranks import drawn

pytestmark = pytest.mark.usefixtures("only_executed")


def differs(gpu, mean, order):
    """Say what first differs from the mean over collectives, or from the definition of the exact one."""
    node = Primitives(mean.ranks, mean.bytes, 2)
    found = run(gpu, node, mean, order=order)
    values, residuals, sent = by_collectives(mean) if mean.codec else ([mean.wanted[0]] * mean.ranks, [], None)
    for rank in range(mean.ranks):
        if said := difference(found.values[0][rank], values[rank]):
            return f"rank {rank}: {said}"
        if mean.residual and (said := difference(found.residuals[0][rank], residuals[rank])):
            return f"rank {rank}, residual: {said}"
        if sent and node.sent[rank] != sent[rank]:
            return f"rank {rank} sent {node.sent[rank]}, not {sent[rank]}"
        if [each.reason for each in node.formats[rank] if each.reason] != ["in one kernel"]:
            return f"rank {rank} noted {node.formats[rank]}"
    return ""


def of_hops(mean, patch):
    """Have primitives take the hops of `mean`."""
    patch.setattr(compressed, "ONE_HOP_VALUES", 1 << 60 if mean.one_hop else 0)
    patch.setattr(compressed, "ONE_HOP_BYTES", 1 << 60)
    return mean


@pytest.mark.parametrize(
    "mean",
    [Mean(3, 901, UInt4(), residual=True), Mean(2, 4099, dtype=torch.bfloat16)],
    ids=["in four bits", "exact"],
)
def test_a_mean_equals_that_over_collectives(mean, executed_gpu, monkeypatch):
    assert not differs(executed_gpu, of_hops(mean, monkeypatch), next(iter(drawn(1))))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("one_hop", [False, True])
@pytest.mark.parametrize("name", [*USUAL, EXACT])
def test_means_of_every_format_equal_those_over_collectives(name, one_hop, executed_gpu, monkeypatch):
    """With lengths that no number of ranks divides, and with fewer values than ranks."""
    codec = CODECS[name]
    for place, length in enumerate((3, 1027, 5003)):
        dtype = FLOATS[place]
        if codec is None or compressed.pays(length, dtype.itemsize, codec, 3):
            mean = Mean(3, length, codec, dtype, codec is not None and place != 1, one_hop, seed=place)
            assert not (found := differs(executed_gpu, of_hops(mean, monkeypatch), next(iter(drawn(1))))), (mean, found)


def in_two_processes(arch, length):
    """Compare means in one kernel, through a file that both processes map, with those over gloo."""
    from ptx.driver import executed

    rank, plain, found = dist.get_rank(), bk.Comm(), []
    settled = {"settle": lambda device: None, "reaches_all": lambda device, facts: False}
    settled["facts_of"] = lambda rank, device: blocks.Facts(rank, "here", 0, "a GPU", "")
    registered = {"register": lambda address, nbytes: address, "unregister": lambda address: None}
    with (
        patch.multiple(symmetric, **settled),
        patch.multiple(blocks, **registered),
        patch.object(compressed, "ONE_HOP_VALUES", 0),
        executed(arch),
    ):
        node = symmetric.NodeMemory(plain.group, "flat", rank)
        space = node.grow(torch.device("cpu"), 1)
        kernels = plain._with(_node=SimpleNamespace(part="flat", memory=lambda x, needed: space))
        for seed in range(2):
            given = torch.randn(length, generator=torch.Generator().manual_seed(2 * seed + rank))
            for comm in (kernels, plain):
                x, residual = given.clone(), torch.zeros(length)
                bk.primitives.compressed_mean_(x, UInt4(), comm, residual)
                found.append(torch.stack([x, residual]))
        node.close()
    return [torch.equal(a, b) for a, b in zip(found[::2], found[1::2], strict=True)], space.counters.tolist()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_processes_reach_each_others_memory(executed_gpu):
    """Signals and values cross between processes, while each executes the kernel of its rank."""
    assert ranks(2, in_two_processes, executed_gpu.arch, 601) == [([True] * 2, [2] * symmetric.CTAS)] * 2
