"""Exchanges in one kernel are probed by themselves, and costs take their lines; a stand-in exchanges nothing."""

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from pool import ranks
from torch.distributed.device_mesh import init_device_mesh

import baguakit as bk
from baguakit.comm.symmetric import CTAS, Space
from baguakit.compressors import MinMaxUInt8, TopK, UInt4
from baguakit.costs import Cost, Line, Link, Load, Place, exchange
from baguakit.primitives import one_kernel
from baguakit.stages import CompressedMean, Hierarchical, Mean, NeighborMean
from baguakit.topology import Exponential

NAMES = ("mean", "neighbors", "shards", "UInt4()")


class Standing:
    """The memory of a node, which has room for all."""

    def __init__(self, part):
        self.part, self.for_neighbors = part, self

    def another(self, group, device):
        return Standing(self.part)

    def memory(self, x, needed, differs=False):
        words = [torch.zeros(n, dtype=torch.int32) for n in (2, CTAS, 3)]
        return Space(0, *words, 1 << 40, 10**9, [0, 1])

    def close(self):
        pass


def probed(part):
    kinds = []
    mesh = None if part == "flat" else init_device_mesh("cpu", (1, 2), mesh_dim_names=("inter", "intra"))
    comm = bk.Comm(mesh=mesh)._with(_node=Standing(part))
    with patch.object(one_kernel.operators, "exchange_in_one_kernel_", lambda *given: kinds.append(given[12])):
        found = bk.tune.probe(comm, flows=(1,), compressors=[UInt4(), TopK(0.1)], seconds=0.02)
    return found, {*kinds}


@pytest.mark.slow  # a probe takes seconds
@pytest.mark.parametrize("part", ["flat", "intra"])
def test_a_probe_runs_what_goes_in_one_kernel_by_itself(part):
    """Two ranks average their pair; what is sparse, or of another part, goes by collectives only."""
    for found, kinds in ranks(2, probed, part):
        assert kinds == {"mean_", "all_gather", "reduce_scatter"}
        joint = [link for link in found.links if ":" in link.part]
        assert sorted(link.part for link in joint) == sorted(f"{part}: {name}" for name in NAMES)
        assert all(link.ranks == 2 and link.exchange == link.all_reduce for link in joint)
        assert bk.tune.Network.from_json(found.to_json()) == found and f"{part}: UInt4()" in str(found)


LINES = {name: Line(1e-5 * (1 + at), 1e-10 * (1 + at), 0.0) for at, name in enumerate(NAMES)}
APART = bk.tune.Network(
    8, 4, "cuda", 1,
    tuple(Link(part, 1, n, *[Line(1e-4, 1e-9)] * 2) for part, n in (("flat", 8), ("intra", 4), ("inter", 2))),
    (bk.tune.Codec("UInt4()", 1e-11, 1e-11, 1e-11), bk.tune.Codec("MinMaxUInt8()", 1e-11, 1e-11, 1e-11)), copy=1e-11,
)  # fmt: skip


def joint(part, ranks):
    links = [Link(f"{part}: {name}", 1, ranks, line, line) for name, line in LINES.items()]
    return replace(APART, links=(*APART.links, *links))


def test_costs_are_those_of_the_lines():
    load, N, S = Load(1 << 20), 1 << 20, 4 << 20
    place = Place(joint("flat", 8))
    assert Mean().cost(load, place) == Cost(1e-5 + 1e-10 * S, 0.0, 7 / 4 * S)
    sent = 14 * UInt4().row_bytes(N // 8)
    assert CompressedMean(UInt4()).cost(load, place) == replace(exchange(LINES["UInt4()"], 1, S), sent=sent)
    few = Load(1000)
    sent = 7 * UInt4().row_bytes(1000)
    assert CompressedMean(UInt4()).cost(few, place) == replace(exchange(LINES["UInt4()"], 1, 4000), sent=sent)
    neighbors = NeighborMean(Exponential()).cost(load, place)
    assert neighbors == replace(exchange(LINES["neighbors"], 1, 3 * S), sent=3 * S)
    # Other formats, and messages that no kernel exchanges, cost what they did.
    other, push_sum = CompressedMean(MinMaxUInt8()), bk.algorithms.push_sum(Exponential()).rules[0].stage
    for stage in (other, push_sum):
        assert stage.cost(load, place) == stage.cost(load, Place(APART))


def test_within_nodes_shards_are_scattered_and_gathered_in_one_kernel_each():
    load, S = Load(1 << 20), 4 << 20
    stage = Hierarchical(CompressedMean(UInt4()))
    there, apart = (stage.cost(load, Place(each)) for each in (joint("intra", 4), APART))
    ring = exchange(APART.link("intra").exchange, 6, 6 * S / 4)
    assert there.sent == apart.sent and there.beside == apart.beside
    assert there.seconds - LINES["shards"].seconds(S) == pytest.approx(apart.seconds - ring.seconds, rel=1e-9)
    assert CompressedMean(UInt4()).cost(load, Place(joint("intra", 4))) == CompressedMean(UInt4()).cost(
        load, Place(APART)
    )
