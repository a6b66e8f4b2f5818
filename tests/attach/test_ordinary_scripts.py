"""Training scripts that do more than a plain loop: nothing else changes."""

import pytest
import torch
import torch.distributed as dist
from everything import ALGORITHMS, made, stages
from pool import ranks
from torch import nn
from training import flat, net, net_and_sgd, run_steps

import baguakit as bk

GOSSIP = [lambda bk: bk.algorithms.decentralized(), lambda bk: bk.algorithms.decentralized(order="atc")]


@pytest.mark.parametrize("algorithm", GOSSIP)
@pytest.mark.parametrize(
    "write", [lambda p: p.zero_(), lambda p: p.data.zero_(), lambda p: p.copy_(torch.ones_like(p))]
)
def test_weights_written_between_steps_are_kept(algorithm, write):
    """Loading a checkpoint, swapping in averaged weights or clamping: what an exchange brings is added to it."""

    def run():
        m = nn.Linear(8, 8, bias=False)
        o = torch.optim.SGD(m.parameters(), lr=0.0)
        with bk.attach(m, o, algorithm(bk)):
            for step in range(3):
                m(torch.ones(1, 8)).sum().backward()
                o.step()
                if step == 1:
                    with torch.no_grad():
                        write(m.weight)
                    held = m.weight.detach().clone()
        return torch.allclose(held, m.weight, atol=1e-6), dist.get_rank()

    assert all(kept for kept, _ in ranks(2, run))


@pytest.mark.parametrize(
    "algorithm",
    [each for each in ALGORITHMS if any(part.follows for stage in stages(made(each)) for part in stage.whole())],
)
def test_copies_of_the_weights_follow_a_checkpoint_loaded_after_attach(algorithm):
    """At lr 0 the loaded weights stay: no stale anchor or replica pulls them back."""

    def run():
        m = net()
        o = torch.optim.SGD(m.parameters(), lr=0.0)
        with bk.attach(m, o, made(algorithm)):
            m.load_state_dict({name: value + 1 for name, value in net().state_dict().items()})
            before = flat(m)
            run_steps(m, o, range(4), rank=0)
        return float((flat(m) - before).abs().max())

    assert max(ranks(2, run)) < 1e-5


def test_two_rules_that_look_alike():
    """Rules are told apart by their place: equal ones on other parameters do not share flights or state."""

    def run():
        m, o = net_and_sgd()
        mean = bk.stages.CompressedMean(bk.compressors.MinMaxUInt8(block=64))
        rules = [
            bk.during_backward(bk.stages.ErrorFeedback(mean), where=lambda name, p: p.ndim > 1),
            bk.during_backward(bk.stages.ErrorFeedback(mean), where=lambda name, p: p.ndim == 1),
        ]
        with bk.attach(m, o, rules) as att:
            run_steps(m, o, range(3))
            return (
                att.consensus_distance(),
                [row.rule for row in att.report().rows],
                [row.flights for row in att.report().rows],
            )

    for apart, names, flights in ranks(2, run):
        assert apart == 0.0 and len(set(names)) == 1 and flights == [3, 3]
