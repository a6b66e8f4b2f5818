"""Attaching connects the ranks between which a topology sends, so that no step waits for connections."""

import os

import pytest
from pool import ranks
from training import loss, net_and_sgd

import baguakit as bk
from baguakit.comm import groups
from baguakit.runtime import start

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

    def exchange(self, x, sources, targets):
        self.told.append((set(sources), set(targets)))


def on_a_gpu(stage):
    """The exchanges of each rank."""
    x, comms = type("OnGpu", (), {"is_cuda": True})(), [Told(r) for r in range(N)]
    for comm in comms:
        start.connect([stage], x, comm)
    return [comm.told for comm in comms]


@pytest.mark.parametrize("topology", GOSSIP, ids=repr)
def test_every_first_message_meets_its_receiver(topology):
    """All ranks make as many exchanges, and in each they agree on who sends to whom: none can wait for ever."""
    told = on_a_gpu(bk.stages.NeighborMean(topology))
    for exchange in zip(*told, strict=True):
        for r, (_, targets) in enumerate(exchange):
            assert targets == {peer for peer, (sources, _) in enumerate(exchange) if r in sources}
    rounds = min(topology.period(N), start.ROUNDS)
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
