"""Messages divided over several connections: the same results, shares that follow rates, and nothing left behind."""

import os
import time

import pytest
import torch
from pool import ranks
from training import train

LONG = (1 << 20) + 24  # values: enough to be divided, and not evenly


def one_of_everything(flows):
    """What every kind of message brings, with messages large and small."""
    import torch.distributed as dist

    import baguakit as bk

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
    from baguakit.comm.flows import LEAST, reweighed

    rates = [1.0, 4.0, 2.0, 1.0]
    shares = [0.25] * 4
    for _ in range(3):
        shares = reweighed(shares, [share / rate for share, rate in zip(shares, rates, strict=True)])
        torch.testing.assert_close(shares, [rate / 8 for rate in rates])
    slowed = reweighed([0.25] * 4, [1e9, 1.0, 1.0, 1.0])
    assert min(slowed) == slowed[0] > LEAST / 4 / 1.04 and abs(sum(slowed) - 1) < 1e-12


def test_the_parts_are_all_of_it():
    from baguakit.comm.flows import SMALLEST, Flows

    flows = Flows([None] * 5)
    for shares in ([0.2] * 5, [0.9, 0.025, 0.025, 0.025, 0.025], [0.1, 0.2, 0.3, 0.25, 0.15]):
        flows.shares = shares
        for n in (SMALLEST // 4, SMALLEST // 4 + 1, LONG, 10_000_019):
            parts = flows.cut(n, 4 * n)
            assert [p.start for p in parts] == [0, *(p.stop for p in parts[:-1])] and parts[-1].stop == n
            assert all(p.start % 64 == 0 for p in parts)
        assert flows.cut(100, 400) == [slice(0, 100)]


def paced(before, rate):
    """Let no TCP connection that was made since `before` carry more than `rate` bytes a second."""
    import socket

    new = {fd for fd in os.listdir("/proc/self/fd") if _is_socket(fd)} - before
    for fd in new:
        with socket.socket(fileno=os.dup(int(fd))) as s:
            s.setsockopt(socket.SOL_SOCKET, 47, rate)  # SO_MAX_PACING_RATE
    return before | new


def _is_socket(fd):
    try:
        return os.readlink(f"/proc/self/fd/{fd}").startswith("socket:")
    except OSError:
        return False


def exchanges(caps, messages, nbytes):
    """Seconds that each of some all-reduces took, and the shares at the end, over flows with these caps."""
    from dataclasses import replace
    from datetime import timedelta

    import baguakit as bk
    from baguakit.comm.flows import Flows
    from baguakit.comm.groups import own_group

    comm, groups = bk.Comm(), []
    store = comm.group.get_group_store()
    name = comm.gather_objects(os.urandom(8).hex())[0]
    sockets = {fd for fd in os.listdir("/proc/self/fd") if _is_socket(fd)}
    for i, cap in enumerate(caps):
        groups.append(own_group(comm.group, store, f"{name}/{i}", timedelta(seconds=60), torch.device("cpu")))
        sockets = paced(sockets, cap)
    comm = replace(comm, group=groups[0], flows=len(groups), _flows={"flat": Flows(groups)} if len(groups) > 1 else {})
    comm = comm if len(groups) > 1 else replace(comm, flows=1)
    x, taken = torch.ones(nbytes // 4), []
    for _ in range(messages):
        comm.all_reduce(torch.zeros(1))
        began = time.perf_counter()
        comm.all_reduce(x.fill_(1.0))
        taken.append(time.perf_counter() - began)
        assert (x == comm.size).all()
    shares = comm._flows["flat"].shares if comm._flows else [1.0]
    comm.close()
    return taken, shares


@pytest.mark.skipif(
    not os.path.isdir("/proc/self/fd"), reason="needs Linux: connections are paced by their descriptors"
)
def test_a_slow_flow_carries_less():
    """With one flow at a quarter of the others' cap, its share tends to a quarter of theirs."""
    caps = [20_000_000, 5_000_000, 20_000_000, 20_000_000]
    for _, shares in ranks(2, exchanges, caps, 34, 2 << 20):
        even = [shares[0], shares[2], shares[3]]
        assert max(even) < 1.25 * min(even) and 0.15 < shares[1] / (sum(even) / 3) < 0.4


def test_an_attachment_takes_its_flows_along_and_leaves_nothing():
    def run():
        import gc
        import threading

        import baguakit as bk

        plain, comm, held = train(lambda bk: [bk.algorithms.decentralized()], 4), bk.Comm(flows=3), []
        for _ in range(4):
            divided = train(lambda bk: [bk.algorithms.decentralized()], 4, comm=comm)
            gc.collect()
            held.append((len(os.listdir("/proc/self/fd")), threading.active_count()))
        assert torch.equal(plain, divided)
        return all(a >= b for a, b in zip(held[0], held[-1], strict=True)), held

    for nothing_left, held in ranks(2, run):
        assert nothing_left, held


def test_flows_are_counted_in_words():
    def run():
        import baguakit as bk

        for flows in (0, 65, 2.5):
            with pytest.raises(ValueError, match="flows is the number of connections"):
                bk.Comm(flows=flows)
        return bk.Comm(flows=2).flows

    assert ranks(1, run) == [2]
