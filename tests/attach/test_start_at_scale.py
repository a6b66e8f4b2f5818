"""The start of an attachment costs each rank the same for any number of ranks, and connects those that will send."""

import math
import os
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from crowd import CountedStore
from pool import Pool, ranks
from tiers import slow_after
from training import loss, net_and_sgd, run_steps

import baguakit as bk
from baguakit.comm import Comm, groups
from baguakit.monitor import Monitor
from baguakit.runtime import runtime
from baguakit.runtime.agreement import Setup, agree

POLLS = ("add", "check")  # the requests of a rank that asks whether others are done


def setup_of(lines):
    return Setup((), {}, (), torch.device("cpu"), timedelta(seconds=600), None, tuple(lines))


def agreed(size, made):
    """Let ranks, each a thread, agree on `made(rank)`; return their stores, and what each returned or raised."""
    store, found = dist.HashStore(), {}
    stores = [CountedStore(store) for _ in range(size)]

    def run(rank):
        monitor = Monitor(stores[rank], rank, size, timedelta(seconds=600), lambda: None)
        try:
            found[rank] = agree(monitor, lambda: setup_of(made(rank)))
        except Exception as error:
            found[rank] = f"{type(error).__name__}: {error}"

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return stores, [found[rank] for rank in range(size)]


@pytest.mark.parametrize("size", [2, 32])
def test_an_agreement_takes_as_many_requests_with_many_ranks(size):
    stores, found = agreed(size, lambda rank: ["a long description of the model"] * 100)
    assert [each.lines[0] for each in found] == ["a long description of the model"] * size
    requests = [{name: n for name, n in each.requests.items() if name not in POLLS} for each in stores]
    assert requests[0] == {"set": 2, "multi_get": 1, "get": 1, "delete_key": 1}
    assert requests[1:] == [{"set": 1, "get": 1, "delete_key": 1}] * (size - 1)
    digests = (64 + len(" cpu")) * size  # each with a device
    assert sum(len(each.written) for each in stores) == digests + len("-1")  # and the verdict


@pytest.mark.parametrize("size", [3, 32])
def test_only_the_rank_that_differs_writes_its_text(size):
    stores, found = agreed(size, lambda rank: ["the same", "another" if rank >= 2 else "one"])
    said = "ValueError: ranks must attach the same: rank 0 has one where rank 2 has another"
    assert found == [said] * size
    assert [each.requests["set"] for each in stores] == [3, 1, 2] + [1] * (size - 3)


@pytest.mark.parametrize("algorithm", ["decentralized()", "gradient_allreduce()", "qadam()"])
def test_attach_gathers_nothing(algorithm):
    def run():
        def refuse(self, *_):
            raise AssertionError("all ranks send to all")

        names = ("gather_objects", "all_gather", "all_to_all_later")
        kept = {name: getattr(Comm, name) for name in names}
        model, optimizer = net_and_sgd()
        try:
            for name in names:
                setattr(Comm, name, refuse)
            att = bk.attach(model, optimizer, eval(f"bk.algorithms.{algorithm}"))
        finally:
            for name in names:
                setattr(Comm, name, kept[name])
        att.detach()
        return True

    assert ranks(2, run) == [True, True]


def descriptors_added(algorithm, rounds):
    """Attach, train for some rounds, and return how many descriptors both have added."""

    def count():
        return len(os.listdir("/proc/self/fd"))

    model, optimizer = net_and_sgd()
    before = count()
    with bk.attach(model, optimizer, algorithm, timeout=600):
        run_steps(model, optimizer, range(rounds))
        return count() - before


@pytest.mark.parametrize("size", slow_after(1, [4, 64]))
@pytest.mark.parametrize("topology", [bk.topology.Ring(), bk.topology.OnePeerExponential()], ids=repr)
def test_an_attachment_opens_connections_to_neighbours_only(size, topology):
    """And to its parent and children in the tree of a broadcast: log2 n of them at most."""
    period = topology.period(size)
    rows = [topology.weights(0, size, round) for round in range(period)]
    sources = {peer for row in rows for peer in row} - {0}
    targets = {r for r in range(1, size) for round in range(period) if 0 in topology.weights(r, size, round)}
    neighbours = len(sources | targets)
    with Pool(size) as pool:
        added = pool.run(descriptors_added, bk.algorithms.decentralized(topology), 2 * period)
    assert max(added[1:]) <= neighbours + 16  # of one lane and one flow; rank 0 holds the store
    assert max(added[1:]) <= neighbours + 7 + math.ceil(math.log2(size))


T = bk.topology
N = 12
GOSSIP = [T.Ring(), T.OnePeerExponential(), T.Exponential(), T.BaseK(1), T.ShiftOne(), T.FullyConnected(), T.Star()]


class Told:
    """One of `N` ranks over NCCL, that keeps the peers of its exchanges."""

    def __init__(self, rank):
        self.rank, self.size, self.group, self.told = rank, N, None, []

    @property
    def inter(self):
        return self

    def _by_nccl(self, device):
        return True

    def exchange(self, x, sources, targets):
        self.told.append((set(sources), set(targets)))


def on_a_gpu(stage):
    """The exchanges of each rank."""
    x, comms = torch.empty(0, device="meta"), [Told(r) for r in range(N)]
    for comm in comms:
        runtime.connect([stage], x, comm)
    return [comm.told for comm in comms]


@pytest.mark.parametrize("topology", GOSSIP, ids=repr)
def test_every_first_message_meets_its_receiver(topology):
    """All ranks make as many exchanges, and in each they agree on who sends to whom: none can wait for ever."""
    told = on_a_gpu(bk.stages.NeighborMean(topology))
    for exchange in zip(*told, strict=True):
        for r, (_, targets) in enumerate(exchange):
            assert targets == {peer for peer, (sources, _) in enumerate(exchange) if r in sources}
    rounds = min(topology.period(N), runtime.ROUNDS)
    peers = [{p for i in range(rounds) for p in topology.weights(r, N, i)} - {r} for r in range(N)]
    met = [set().union(*(sources for sources, _ in each)) for each in told]
    assert met == ([set()] * N if topology == T.FullyConnected() else peers)


def test_stages_in_others_and_between_nodes_are_met_and_chosen_weights_are_not():
    ring = on_a_gpu(bk.stages.NeighborMean(T.Ring()))
    assert on_a_gpu(bk.stages.Hierarchical(bk.stages.NeighborMean(T.Ring()))) == ring
    assert on_a_gpu(bk.stages.NeighborMean(T.Chosen())) == [[]] * N


def test_no_step_opens_a_connection():
    """Over gloo that connects with first messages, as it does among many ranks."""

    def run():
        def sockets():
            links = (f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd"))
            return {
                held for each in links if os.path.islink(each) and (held := os.readlink(each)).startswith("socket:")
            }

        connected, groups.CONNECTED = groups.CONNECTED, 1
        try:
            model, optimizer = net_and_sgd()
            with bk.attach(model, optimizer, bk.algorithms.decentralized(T.OnePeerExponential()), broadcast=False):
                before = sockets()
                for step in range(3):
                    loss(model, 0, step).backward()
                    optimizer.step()
                return len(sockets() - before)  # others may close meanwhile
        finally:
            groups.CONNECTED = connected

    assert ranks(4, run) == [0] * 4
