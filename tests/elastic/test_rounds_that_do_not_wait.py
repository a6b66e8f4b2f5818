"""Rounds that nobody waits for, in a group whose ranks die: `decoupled_diloco` in processes that are killed."""

import itertools

import pytest
import torch
from crew import Quadratic, centre, crew, gather, step
from tiers import slow_after

LR = 0.05
RULE = "decoupled_diloco(every=READY, quorum={}, lr=0.5, momentum=0.5, nesterov=True)"


def rounds_of(here):
    """Return (round, anchor, whether it flies) of each process."""
    for each in here:
        each.tell("round")
    return [each.hear("round") for each in here]


def one_round(here, ready):
    """Let a round be flown when the processes `ready` have made a step; return what all have then."""
    (before, *_), *_ = rounds_of(here)
    for each in ready:
        each.tell("ready", True)
    step(here)
    for each in ready:
        each.tell("ready", False)
    while any(round == before or flies for round, _, flies in rounds_of(here)):
        step(here)
    return rounds_of(here)


def alike(found):
    """Return the anchor that all have in the same round, to the bit."""
    (round, anchor, _), *others = found
    assert all(each[0] == round and torch.equal(each[1], anchor) for each in others)
    return anchor


def trained(name, weights, steps):
    """Return the weights of a process after these steps of its own, without any exchange."""
    model = Quadratic()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    torch.nn.utils.vector_to_parameters(weights.clone(), model.parameters())
    for each in steps:
        optimizer.zero_grad()
        model(centre(name, each)).backward()
        optimizer.step()
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("quorum, killed", slow_after(0, itertools.product((2, None), (2, 0))))
def test_a_rank_that_dies_between_rounds_costs_nobody_anything(quorum, killed):
    """The others keep their anchor and all their steps, to the bit; the newcomer counts in the next round."""
    with crew(RULE.format(quorum), lr=LR) as ranks:
        here = ranks.start("a", "b", "c")
        gather(here)
        one_round(here, here)
        anchor = alike(one_round(here, here[:quorum]))  # with a quorum, the third keeps its progress
        before = step(here, 3)
        assert len({tuple(each["weights"].tolist()) for each in before}) == 3  # each has progress of its own
        here.pop(killed).kill()
        del before[killed]
        for each in here:
            each.tell("gather", 2)
        after = [each.hear("stepped") for each in here]
        assert torch.equal(alike(rounds_of(here)), anchor)
        for process, old, new in zip(here, before, after, strict=True):
            made = [each for each in new["present"] if each >= old["step"]]  # the numbers of one go on at the other's
            assert made[0] == old["step"]
            assert torch.equal(new["weights"], trained(process.name, old["weights"], made))
        here += ranks.start("d")
        for each in here:
            each.tell("gather", 3)
        new = [each.hear("stepped") for each in here][2]
        torch.testing.assert_close(alike(rounds_of(here)), anchor, rtol=1e-6, atol=0)  # 3/2 of each of 2, over 3
        made = trained("d", anchor, new["present"])  # from the anchor on
        torch.testing.assert_close(new["weights"], made, rtol=1e-5, atol=1e-6)
        for ready in (here, here[1:], here):
            moved = alike(one_round(here, ready if quorum else here))
            assert not torch.equal(moved, anchor)
            anchor = moved
