"""Messages divided over several connections: the same results, shares that follow rates, and nothing left behind."""

import gc
import os
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from pool import ranks
from training import train

import baguakit as bk

LONG = (1 << 20) + 24  # values: enough to be divided, and not evenly


def one_of_everything(flows):
    """Return the results of every kind of message, large and small."""
    comm, r, found = bk.Comm(flows=flows), dist.get_rank(), []
    for n in (LONG, 24, 0):
        x = torch.randn(n, generator=torch.Generator().manual_seed(r))
        found.append(bk.primitives.neighbor_mean_(x.clone(), bk.topology.OnePeerExponential(), comm.at(0)))
        found.append(bk.primitives.compressed_mean_(x.clone(), bk.compressors.BFloat16(), comm))
        found.append(bk.primitives.sparse_mean_(x.clone(), bk.compressors.TopK(0.3), comm))
        found += bk.primitives.neighbor_gather(x, bk.topology.Ring(), comm).values()
        found.append(comm.all_gather(x))
        whole = x[: n // comm.size * comm.size]
        found.append(comm.reduce_scatter((whole * 64).round()))  # whole numbers: sums are the same in any order
        found.append(comm.all_reduce((x * 64).round()))
    return found


@pytest.mark.parametrize("n", [2, 3])
def test_everything_arrives_as_over_one_flow(n):
    def run():
        one, three = one_of_everything(1), one_of_everything(3)
        return [torch.equal(a, b) for a, b in zip(one, three, strict=True)]

    assert all(all(same) for same in ranks(n, run))


def test_shares_follow_the_rates():
    """s_i ← s_i / T_i ends where all flows take as long, and stays there."""
    from baguakit.comm.own import LEAST, reweighed

    rates = [1.0, 4.0, 2.0, 1.0]
    shares = [0.25] * 4
    for _ in range(3):
        shares = reweighed(shares, [share / rate for share, rate in zip(shares, rates, strict=True)])
        torch.testing.assert_close(shares, [rate / 8 for rate in rates])
    slowed = reweighed([0.25] * 4, [1e9, 1.0, 1.0, 1.0])
    assert min(slowed) == slowed[0] > LEAST / 4 / 1.04 and abs(sum(slowed) - 1) < 1e-12


def test_the_parts_are_all_of_it():
    from baguakit.comm.own import SMALLEST, Flows

    flows = Flows([None] * 5)
    for shares in ([0.2] * 5, [0.9, 0.025, 0.025, 0.025, 0.025], [0.1, 0.2, 0.3, 0.25, 0.15]):
        flows.shares = shares
        for n in (SMALLEST // 4, SMALLEST // 4 + 1, LONG, 10_000_019):
            parts = flows.parts(n, 4 * n)
            assert [p.start for p in parts] == [0, *(p.stop for p in parts[:-1])] and parts[-1].stop == n
            assert all(p.start % 64 == 0 for p in parts)
        assert flows.parts(100, 400) == [slice(0, 100)]


def exchanges(caps, nbytes, enough, limit):
    """Exchange over flows with these caps until all ranks find `enough(shares)`, or the time is up: the shares.

    Every result is checked. Shares are agreed on, and so all ranks stop after the same message; the time is rank 0's.
    """
    from bench.netlab.capped import with_caps

    comm = bk.Comm()
    divided = with_caps(comm, caps, timedelta(seconds=60))
    flows, x, until, over = divided._flows["flat"], torch.ones(nbytes // 4), time.monotonic() + limit, False
    while not over:
        divided.all_reduce(x.fill_(1.0))
        assert (x == comm.size).all()
        over = comm.gather_objects(enough(flows.shares) or time.monotonic() > until)[0]
    divided.close()
    return flows.shares


def less_than_half(shares):
    """Return whether flow 1 carries less than half of the average of the others."""
    return shares[1] < (1 - shares[1]) / (len(shares) - 1) / 2


@pytest.mark.slow  # seconds of a connection at its cap
@pytest.mark.skipif(
    not os.path.isdir("/proc/self/fd"), reason="needs Linux: connections are paced by their descriptors"
)
def test_a_slow_flow_carries_less():
    """With one flow at a quarter of the others' cap, its share falls; where to, `reweighed` says."""
    caps = [20_000_000, 5_000_000, 20_000_000, 20_000_000]
    shares = ranks(2, exchanges, caps, 2 << 20, less_than_half, 60.0)
    assert shares[0] == shares[1] and less_than_half(shares[0]), shares


def test_an_attachment_takes_its_flows_along_and_leaves_nothing():
    def run():
        def held():
            gc.collect()
            return len(os.listdir("/proc/self/fd")), threading.active_count()

        def more_than(before):
            return any(now > then for now, then in zip(held(), before, strict=True))

        plain, comm = train(lambda bk: [bk.algorithms.decentralized()], 4), bk.Comm(flows=3)
        train(lambda bk: [bk.algorithms.decentralized()], 4, comm=comm)  # what is made once has been made
        time.sleep(0.2)
        before = held()
        for _ in range(3):
            divided = train(lambda bk: [bk.algorithms.decentralized()], 4, comm=comm)
        assert torch.equal(plain, divided)
        until = time.monotonic() + 30
        while more_than(before) and time.monotonic() < until:  # threads that have been told to end may take a while
            time.sleep(0.05)
        return before, held()

    for before, after in ranks(2, run):
        assert all(now <= then for now, then in zip(after, before, strict=True)), (before, after)


def test_flows_are_counted_in_words():
    def run():
        for flows in (0, 65, 2.5):
            with pytest.raises((TypeError, ValueError), match="flows is a whole number, 1 to 64, not"):
                bk.Comm(flows=flows)
        return bk.Comm(flows=2).flows

    assert ranks(1, run) == [2]
