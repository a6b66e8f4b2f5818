"""Calls that differ between ranks would train on wrongly: one sentence on every rank names the rank and the call."""

import pytest
import torch
import torch.distributed as dist
from pool import ranks
from saying import TIMEOUT, said, train
from tiers import slow_after
from training import net, sgd

import baguakit as bk

FEEDBACK = "bytegrad(MinMaxUInt8(block=64), error_feedback=True)"
LOCAL = "local_sgd(every=3)"
# Calls that all ranks must make


@pytest.mark.parametrize(
    "size, algorithm",
    [
        (3, FEEDBACK),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in ((2, FEEDBACK), (3, LOCAL), (3, "decentralized()"))),
    ],
)
def test_a_collective_call_on_one_rank_only_is_named(own_pools, size, algorithm):
    def each(att, model, optimizer, step, rank):
        if step == 4 and rank == 0:
            att.merge()

    for sentence in own_pools(size).run(said, train, algorithm, each):
        assert sentence.startswith("PeerError: rank") and "merge()" in sentence, sentence
        if size == 3:
            assert sentence.startswith("PeerError: rank 0 has diverged from ranks 1, 2:"), sentence


def test_a_collective_call_on_one_rank_at_the_end_is_named(own_pools):
    def run():
        model = net()
        with bk.attach(model, sgd(model.parameters()), bk.algorithms.local_sgd(), timeout=TIMEOUT) as att:
            if dist.get_rank() == 1:
                att.consensus_distance()

    first, second = own_pools(2).run(said, run)
    assert first == "" and second.startswith("PeerError: rank 0 has left after") and "consensus_distance()" in second


def test_a_parameter_that_one_rank_alone_adds_is_named(own_pools):
    def each(att, model, optimizer, step, rank):
        if step == 3 and rank == 1:
            model.added = torch.nn.Parameter(torch.zeros(1))

    for sentence in own_pools(3).run(said, train, FEEDBACK, each):
        assert sentence.startswith("PeerError: rank 1 has diverged from ranks 0, 2:"), sentence
        assert "other parameters" in sentence


@pytest.mark.parametrize("difference", ["broadcast", "optimizer"])
def test_options_that_differ_between_ranks_are_refused(difference):
    def run():
        odd = dist.get_rank() == 1
        model = net()
        kind = torch.optim.Adam if odd and difference == "optimizer" else torch.optim.SGD
        broadcast = not odd if difference == "broadcast" else True
        bk.attach(model, kind(model.parameters(), lr=0.1), bk.algorithms.bytegrad(), broadcast=broadcast)

    wanted = {"broadcast": "broadcast=True where rank 1 has broadcast=False", "optimizer": "where rank 1 has Adam with"}
    for sentence in ranks(2, said, run):
        assert sentence.startswith("ValueError: ranks must attach the same: ") and wanted[difference] in sentence


@pytest.mark.parametrize("algorithm", slow_after(1, [FEEDBACK, "decentralized()"]))
def test_a_rank_that_loads_an_older_state_is_named(own_pools, algorithm):
    def run():
        held = {}

        def each(att, model, optimizer, step, rank):
            if step == 2:
                held.update(att.state_dict())
            if step == 6 and rank == 2:
                att.load_state_dict(held)

        train(algorithm, each, steps=40)

    sentences = own_pools(3).run(said, run)
    for sentence in sentences:
        assert sentence.startswith("PeerError: rank 2 has diverged from ranks 0, 1:"), sentences


def test_a_rank_that_steps_without_a_backward_is_named(own_pools):
    def each(att, model, optimizer, step, rank):
        if step == 3 and rank == 1:
            optimizer.step()
            return "skip"

    for sentence in own_pools(3).run(said, train, FEEDBACK, each, 40):
        assert sentence.startswith("PeerError: rank 1 has diverged from ranks 0, 2:"), sentence
