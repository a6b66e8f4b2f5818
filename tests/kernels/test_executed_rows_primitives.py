"""Primitives that gather, scatter, or hear neighbours, in one kernel equal their definitions: run with `--ptx ARCH`."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

pytest.importorskip("triton")
from exchanges import CODECS, EXACT, FLOATS, USUAL
from hostile import difference, hostile
from row_exchanges import AllGather, AllToAll, NeighborMean, ReduceScatter, run, wrong
from through_primitives import HeldMemory, Rows, comm_of

import baguakit as bk
from baguakit.comm.sending import Rider
from baguakit.compressors import UInt4
from baguakit.primitives import differentiable
from baguakit.topology import Exponential, Grid2D, RandomMatching, Ring
from ptx.ranks import drawn

pytestmark = pytest.mark.usefixtures("only_executed")


def sent_by(exchange, rank):
    """Return the bytes that a rank sends."""

    def row(n, codec):
        return codec.row_bytes(n) if codec else n * exchange.dtype.itemsize

    if isinstance(exchange, NeighborMean):
        return len(exchange.links(rank)[2]) * row(exchange.length, None)
    if isinstance(exchange, AllToAll):
        parts = [n for peer, n in enumerate(exchange.splits[rank]) if peer != rank]
        return sum(row(n, exchange.codec if exchange.packs(n) else None) for n in parts)
    return (exchange.ranks - 1) * row(exchange.length, exchange.codec)


def differs(gpu, exchange, order):
    """Say what first differs from the definition, in the results or in what is noted, counted and launched."""
    place = Rows([exchange])
    results, heard, done = run(gpu, place, exchange, order=order)
    for rank in range(exchange.ranks):
        if place.sent[rank] != {"flat": sent_by(exchange, rank)}:
            return f"rank {rank} sent {place.sent[rank]}, not {sent_by(exchange, rank)}"
        if place.formats[rank][-1].reason != "in one kernel":
            return f"rank {rank} noted {place.formats[rank]}"
    return wrong(place, results, heard, exchange) or f"{done.launches} launches" * (set(done.launches) != {1})


def slow(*values):
    return pytest.param(*values, marks=[pytest.mark.slow, pytest.mark.timeout(900)])


@pytest.mark.parametrize(
    "exchange",
    [
        AllToAll(3, 901, UInt4(), seed=3),
        NeighborMean(3, 901, dtype=torch.bfloat16, topology=Grid2D(), kind="broken"),
        slow(ReduceScatter(3, 901, dtype=torch.bfloat16, average=True, kind="broken")),
        slow(AllGather(2, 901, dtype=torch.float16, kind="broken")),
        slow(AllGather(2, 901, UInt4(), kind="broken")),
        slow(ReduceScatter(2, 901, UInt4(), residual=True, kind="broken")),
        slow(NeighborMean(3, 901, edges=((0, 1), (1, 2), (0, 2)))),
    ],
    ids=["splits", "neighbours", "shards", "bytes", "rows in four bits", "shards in four bits", "weights"],
)
def test_a_primitive_equals_its_definition(exchange, executed_gpu):
    assert not differs(executed_gpu, exchange, next(drawn(1)))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", [*USUAL, EXACT])
def test_primitives_of_every_format_equal_their_definition(name, executed_gpu):
    source, codec = random.Random(f"primitives of {name}"), CODECS[name]
    for seed, kind in enumerate((AllGather, ReduceScatter, AllToAll)):
        more = {"residual": codec is not None, "average": seed % 2 == 0} if kind is ReduceScatter else {}
        exchange = kind(source.choice([2, 3, 4]), 2 * source.randrange(400, 2000) + 1, codec, FLOATS[seed], **more)
        assert not (found := differs(executed_gpu, exchange, next(drawn(1, seed)))), (exchange, found)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("topology", [Ring(), Exponential(), RandomMatching()], ids=repr)
def test_means_of_neighbours_equal_their_definition(topology, executed_gpu):
    for seed, ranks in enumerate((2, 3, 4)):
        mean = NeighborMean(ranks, 1001, None, FLOATS[seed], topology=topology, round=seed)
        if not bk.primitives.neighbors.is_mean(topology, ranks, seed % topology.period(ranks)):
            assert not (found := differs(executed_gpu, mean, next(drawn(1, seed)))), (mean, found)


@pytest.mark.slow
@pytest.mark.parametrize("codec", [UInt4(), None], ids=repr)
def test_parts_without_room_are_left_to_nccl(codec, executed_gpu):
    """Both ranks of such a part leave it out; all other parts go in one kernel."""
    exchange = AllToAll(3, 901, codec, seed=3)
    place, left = Rows([exchange]), {}
    longest = max(sent for rank, row in enumerate(exchange.splits) for peer, sent in enumerate(row) if peer != rank)
    room = codec.row_bytes(longest) if codec else 4 * longest
    place.half = 3 * (room // 16 * 16 - 16)

    def exchanged(comm, outgoing, incoming, device):
        sent = {p: [*each] for p, each in outgoing.items()}
        left[comm.rank] = sorted(sent), sorted(incoming)
        return iter(())

    with patch.object(differentiable, "exchanged", exchanged):
        results, _, done = run(executed_gpu, place, exchange, order=next(drawn(1)))
    assert set(done.launches) == {1}
    for rank in range(3):
        there = [p for p, n in enumerate(exchange.splits[rank]) if p != rank and n == longest]
        here = [p for p, n in enumerate(exchange.receives(rank)) if p != rank and n == longest]
        assert left[rank] == (there, here)
        wanted = exchange.wanted[rank][0].split(exchange.receives(rank))
        for peer, part in enumerate(results[0][rank][0].split(exchange.receives(rank))):
            assert peer in here or not difference(part, wanted[peer]), (rank, peer)
    assert any(there for there, _ in left.values())


@pytest.mark.slow
def test_results_that_share_memory_with_what_is_sent(executed_gpu):
    """A gathered tensor is a part of the result, a shard a part of what is summed: this rank's part, or another's."""
    for aside in (0, 1):
        for kind, codec in ((AllGather, None), (AllGather, UInt4()), (ReduceScatter, None), (ReduceScatter, UInt4())):
            exchange = kind(3, 901, codec)
            place, wholes = Rows([exchange]), []
            for rank, x in enumerate(exchange.values):
                whole = x.clone() if kind is ReduceScatter else torch.zeros(3 * 901)
                at = 901 * ((rank + aside) % 3)
                part = whole[at : at + 901]
                wholes.append((whole, part if kind is ReduceScatter else part.copy_(x)))

            def launch(rank, exchange=exchange, place=place, wholes=wholes):
                x, out = wholes[rank] if isinstance(exchange, ReduceScatter) else wholes[rank][::-1]
                place.begin(rank, exchange, x, [out])

            place.together(executed_gpu, launch, next(drawn(1)))
            for rank, (whole, part) in enumerate(wholes):
                found = part if kind is ReduceScatter else whole
                assert not difference(found, exchange.wanted[rank][0]), (exchange, aside, rank)


@pytest.mark.slow
def test_flags_of_a_flight_cross_beside_the_first_gathered_rows(executed_gpu):
    gather = AllGather(2, 77)
    place, riders = Rows([gather]), [Rider(torch.full((1, 5), 1 + rank, dtype=torch.uint8), 2) for rank in range(2)]
    outs = [torch.zeros(2 * 77) for _ in range(2)]

    def launch(rank):
        place.kernels._table.cache_clear()  # it is in the memory of each rank
        memory = HeldMemory(place.memory(rank))
        comm = comm_of(bk.Comm, rank, 2, _node=memory, _rider=riders[rank], _sent=place.sent[rank])
        bk.primitives.compressed_all_gather(gather.values[rank], None, comm, outs[rank])

    done = place.together(executed_gpu, launch, next(drawn(1)))
    assert set(done.launches) == {2} and place.sent == [{"flat": 4 * 77 + 5}] * 2
    for rank in range(2):
        assert riders[rank].rows.tolist() == [[1] * 5, [2] * 5]
        assert not difference(outs[rank], gather.wanted[rank][0])


class Crosswise(bk.stages.Stage):
    """The mean of two nodes, through a table of shards by the ranks of the whole."""

    def __init__(self, table):
        vars(self).update(table=table)

    def __call__(self, x, state, comm):
        self.table[comm.rank] = x.clone()
        comm.barrier.wait(60)
        return (self.table[comm.rank % 2] + self.table[2 + comm.rank % 2]) / 2


@pytest.mark.parametrize("dtype", [torch.float32, slow(torch.bfloat16)], ids=str)
def test_nodes_scatter_and_gather_in_one_kernel_each(dtype, executed_gpu):
    """Two nodes of two ranks. Kernels run when all ranks have launched theirs, so that none waits for another."""
    values = [hostile("many scales", 202, dtype, rank) for rank in range(4)]
    place, barrier = Rows([ReduceScatter(4, 101, None, dtype)]), threading.Barrier(4)
    stage, xs, phases = bk.stages.Hierarchical(Crosswise({})), [x.clone() for x in values], {}
    for rank in range(4):
        node, local = divmod(rank, 2)
        memory = place.memory(rank)
        memory = replace(memory, rank=local, ranks=2, addresses=memory.addresses[2 * node : 2 * node + 2].clone())
        held, noted = HeldMemory(memory, "intra"), {"_formats": place.formats[rank], "_sent": place.sent[rank]}
        intra = comm_of(bk.Comm, local, 2, _node=held, _part="intra", **noted)
        comm = SimpleNamespace(intra=intra, inter=comm_of(bk.Comm, rank, 4, barrier=barrier))
        phases[rank] = stage.phases(xs[rank], {"inner": {}}, comm)

    def launch(rank):
        place.kernels._table.cache_clear()  # it is in the memory of each rank
        next(phases[rank], None)

    first = place.together(executed_gpu, launch, next(drawn(1)))
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(next, phases.values()))
    last = place.together(executed_gpu, launch, next(drawn(1)))
    assert set(first.launches) == set(last.launches) == {1}
    within = [(values[at].float() * 0.5).to(dtype).float() + (values[at + 1].float() * 0.5).to(dtype) for at in (0, 2)]
    wanted = (within[0].to(dtype) + within[1].to(dtype)) / 2
    for rank in range(4):
        assert not difference(xs[rank], wanted), rank
        assert place.sent[rank] == {"intra": 2 * 101 * dtype.itemsize}
        assert {(each.reason, each.part) for each in place.formats[rank]} == {("in one kernel", "intra")}
