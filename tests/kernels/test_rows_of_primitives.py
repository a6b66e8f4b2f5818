"""The definitions of exchanges in one kernel equal the primitives, on real ranks."""

import pytest
import torch
from pool import ranks

pytest.importorskip("triton")
import baguakit as bk
from baguakit.compressors import BFloat16, UInt2, UInt4
from baguakit.topology import Grid2D, OnePeerExponential, RandomMatching


def compared():
    from hostile import difference
    from row_exchanges import AllGather, AllToAll, NeighborMean, ReduceScatter

    comm, primitives, found = bk.Comm(), bk.primitives, []
    for seed, (codec, dtype) in enumerate(
        ((UInt4(), torch.float32), (UInt2(), torch.bfloat16), (BFloat16(), torch.float32), (None, torch.float16))
    ):
        more = {"residual": codec is not None, "average": seed % 2 == 0}
        for kind, extra in ((AllGather, {}), (ReduceScatter, more), (AllToAll, {})):
            exchange = kind(comm.size, 901, codec, dtype, "many scales", seed, **extra)
            x = exchange.values[comm.rank].clone()
            if kind is AllGather:
                ours = [primitives.compressed_all_gather(x, codec, comm)]
            elif kind is AllToAll:
                splits = exchange.receives(comm.rank), exchange.splits[comm.rank]
                ours = [primitives.compressed_all_to_all(x, codec, comm, *splits)]
            elif codec:  # gloo adds numbers of two bytes in another order
                lost = torch.empty(len(x))
                ours = [primitives.compressed_reduce_scatter(x, codec, comm, lost, exchange.average), lost]
            else:
                continue
            found += [difference(*each) for each in zip(ours, exchange.wanted[comm.rank], strict=True)]
    for k, topology in enumerate((Grid2D(), OnePeerExponential(), RandomMatching())):
        mean = NeighborMean(comm.size, 901, None, torch.bfloat16, "broken", k, topology, k)
        x = mean.values[comm.rank].clone()
        primitives.neighbor_mean_(x, topology, comm.at(k))
        found.append(difference(x, mean.wanted[comm.rank][0]))
    mean = NeighborMean(comm.size, 901, edges=((0, 1), (1, 2), (0, 2)))
    own, sources, targets = mean.links(comm.rank)
    x = mean.values[comm.rank].clone()
    primitives.neighbor_mean_(x, comm=comm, self_weight=own, src_weights=sources, dst_weights=targets)
    return [*filter(None, found), *filter(None, [difference(x, mean.wanted[comm.rank][0])])]


def test_the_definitions_of_exchanges_are_what_primitives_compute():
    assert ranks(3, compared) == [[]] * 3
