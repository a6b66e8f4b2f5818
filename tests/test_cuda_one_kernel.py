"""Exchanges in one kernel, of two ranks that share a GPU, equal those over NCCL.

The functions that ranks run stand at the top of this file, so that they can be sent where cloudpickle is missing.
"""

import contextlib
import time

import pytest
import torch
import torch.distributed as dist
from pool import never_waiting, ranks
from training import batch, flat, net, sgd

import baguakit as bk

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(300),
]

c = bk.compressors
CODECS = [None, c.MinMaxUInt8(), c.Float8(), c.UInt4(), c.UInt2(), c.Sign(), c.BFloat16(), c.UInt4(stochastic=True)]
LENGTHS = (1, 5, 1027, 40_001, 1 << 17, 3_000_001)  # in one hop and in two; the last wants more memory
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def values(length, dtype, device="cuda"):
    source = torch.Generator().manual_seed(length + dist.get_rank())
    return torch.randn(length, generator=source).to(device, dtype)


def average(x, codec, comm):
    residual = torch.empty(len(x), dtype=torch.float32, device=x.device)
    if codec is None:
        bk.primitives.mean_(x, comm)
        return (x,)
    bk.primitives.compressed_mean_(x, codec, comm, residual)
    return x, residual


def both_ways(codec):
    """Return whether means of every length and dtype are the same, and how those with kernels flew."""
    formats, equal = [], []
    plain, kernels = bk.Comm(), bk.Comm(kernels=True)
    for length in LENGTHS:
        for dtype in DTYPES:
            wanted = average(values(length, dtype), codec, plain.at(0))
            found = average(values(length, dtype), codec, kernels.for_flight(0, None, 0, {}, formats))
            equal.append(all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True)))
    torch.cuda.synchronize()
    said = {str(each.reason) for each in formats if each.reason}
    kernels._node.close()
    return all(equal), "in one kernel" in said


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_means_equal_those_over_nccl(codec):
    one_kernel = not getattr(codec, "stochastic", False)  # few values fly so even where the codec does not
    for equal, there in ranks(2, both_ways, codec, cuda=True):
        assert equal and (there or not one_kernel)


def rows(x, codec, comm):
    """Return what every exchange of rows makes of `x`, and the error of what is scattered."""
    p, peer, even = bk.primitives, 1 - comm.rank, x[: len(x) // 2 * 2]
    lost = torch.empty(len(even), dtype=torch.float32, device=x.device)
    pairs = {"self_weight": 0.25, "src_weights": {peer: 0.75}, "dst_weights": {peer: 1.5}, "check": False}
    shard = p.compressed_reduce_scatter(even, codec, comm, lost, average=True)
    return (
        p.compressed_all_gather(x, codec, comm), shard, lost, p.compressed_all_to_all(even, codec, comm),
        p.neighbor_mean_(x.clone(), comm=comm, **pairs),
    )  # fmt: skip


def rows_both_ways(codec):
    """Return whether all exchanges of rows are the same, with splits and in a graph as well, and how they flew."""
    formats, equal, plain, kernels = [], [], bk.Comm(), bk.Comm(kernels=True)
    noted = kernels.for_flight(0, None, 0, {}, formats)
    for part in (9, 1000, 300_000):  # NCCL sends the last: there is no room for it
        splits = [part, 2 * part] if plain.rank == 0 else [2 * part, part]  # the shorter one is this rank's own
        x, exchange = values(3 * part, torch.float32), bk.primitives.compressed_all_to_all
        found, wanted = (exchange(x, codec, each, splits, splits) for each in (noted, plain.at(0)))
        equal.append(torch.equal(found, wanted))
    for length in LENGTHS[2:]:
        for dtype in DTYPES:
            x = values(length, dtype)
            found, wanted = (rows(x, codec, comm) for comm in (noted, plain.at(0)))
            equal.append(all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True)))
    x, out, graph = values(5000, torch.float32), torch.zeros(10_000, device="cuda"), torch.cuda.CUDAGraph()
    wanted = bk.primitives.compressed_all_gather(x, codec, plain.at(0))
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        bk.primitives.compressed_all_gather(x, codec, kernels, out)
    for _ in range(3):
        graph.replay()
        rows(x, codec, kernels)  # between two replays
        equal.append(torch.equal(out, wanted))
    torch.cuda.synchronize()
    kernels._node.close()
    return all(equal), {str(each.reason) for each in formats if each.reason}


@pytest.mark.parametrize("codec", [None, c.MinMaxUInt8(), c.UInt4(), c.BFloat16()], ids=repr)
def test_exchanges_of_rows_equal_those_over_nccl(codec):
    for equal, reasons in ranks(2, rows_both_ways, codec, cuda=True):
        assert equal and "in one kernel" in reasons


def on_streams():
    """Means on two streams by turns, and in a graph that is repeated, beside the same one after another."""
    comm, streams = bk.Comm(kernels=True), [torch.cuda.Stream(), torch.cuda.Stream()]
    wanted, found = [], []
    for step in range(6):
        wanted.append(average(values(5000 + step, torch.float32), c.UInt4(), comm)[0].clone())
    torch.cuda.synchronize()
    for step in range(6):
        with torch.cuda.stream(streams[step % 2]):
            found.append(average(values(5000 + step, torch.float32), c.UInt4(), comm)[0])
    torch.cuda.synchronize()
    alike = all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    x, graph, given = torch.zeros(5000, device="cuda"), torch.cuda.CUDAGraph(), values(5000, torch.float32)
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        average(x, c.UInt4(), comm)
    for _ in range(3):
        x.copy_(given)
        graph.replay()
        average(values(5001, torch.float32), c.UInt4(), comm)  # between two replays
        alike &= torch.equal(x, wanted[0])
    with contextlib.suppress(RuntimeError), torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
        average(torch.zeros(5_000_000, device="cuda"), None, comm)
        alike = False  # there is no memory for it
    average(torch.zeros(5_000_000, device="cuda"), None, comm)  # the graph keeps the smaller one
    x.copy_(given)
    graph.replay()
    torch.cuda.synchronize()
    alike &= torch.equal(x, wanted[0])
    comm._node.close()
    return alike


def test_streams_and_graphs():
    assert ranks(2, on_streams, cuda=True) == [True, True]


def trained(kernels):
    model = net().cuda()
    optimizer = sgd(model.parameters())
    rule = bk.algorithms.bytegrad(c.MinMaxUInt8(block=64), error_feedback=True)
    with bk.attach(model, optimizer, rule, comm=bk.Comm(kernels=kernels), bucket_bytes=200) as att:
        for step in range(8):
            x, y = (t.cuda() for t in batch(dist.get_rank(), step))
            with never_waiting() if step > 2 else contextlib.nullcontext():
                optimizer.zero_grad()
                (model(x) - y).square().mean().backward()
                optimizer.step()
        report = str(att.report())
    torch.cuda.synchronize()
    return flat(model).cpu(), "in one kernel" in report


def test_training_is_that_over_nccl():
    there, here = (ranks(2, trained, kernels, cuda=True) for kernels in (True, False))
    assert all(torch.equal(a, b) for (a, _), (b, _) in zip(there, here, strict=True))
    assert [said for _, said in there + here] == [True, True, False, False]


def never_coming():
    """One rank leaves out a mean. The other's kernel ends with NaN, and its next mean names the rank."""
    comm = bk.Comm(kernels=True)
    average(values(5000, torch.float32), c.UInt4(), comm)
    space = comm._node.spaces[torch.device("cuda", torch.cuda.current_device())]
    space.limit, said = 10**9, ""
    if dist.get_rank() == 0:
        x, began = values(5000, torch.float32), time.monotonic()
        average(x, c.UInt4(), comm)
        torch.cuda.synchronize()
        assert x.isnan().all() and 0.9 < time.monotonic() - began < 60
        try:
            average(x, c.UInt4(), comm)
        except RuntimeError as error:
            said = str(error)
    comm._node.close()
    return said


def test_a_rank_that_does_not_come_is_named():
    said, nothing = ranks(2, never_coming, cuda=True)
    assert "rank 1 has not come to an exchange in one kernel within 1 s" in said and not nothing
