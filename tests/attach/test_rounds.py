"""`every` as a function of the step: rounds of any lengths follow one another."""

import pytest
import torch
from pool import ranks
from training import net_and_sgd, run_steps

import baguakit as bk
from baguakit.algorithms import decentralized, diloco, local_sgd
from baguakit.rules import Rule


def exchanges(rule: Rule, steps: int = 40) -> list[int]:
    return [step for step in range(steps) if rule.exchanges(step)]


def test_rounds_follow_one_another():
    lengths = {3: 1, 4: 5, 9: 2, 11: 30}
    rule = bk.after_step(bk.stages.Mean(), every=lengths.__getitem__, start=3, stop=40)
    assert exchanges(rule, 60) == [3, 8, 10]
    assert [rule._last_step(step) for step in (40, 3, 4, 8, 9)] == [40, 3, 8, 8, 10]
    assert repr(rule) == "after_step(Mean(), every=…, start=3, stop=40)"


@pytest.mark.parametrize("every", [1, 3, 8])
@pytest.mark.parametrize("start", [0, 5])
def test_a_constant_function_is_the_number(every, start):
    rule = bk.between_steps(bk.stages.Mean(), every=lambda step: every, start=start)
    assert exchanges(rule) == exchanges(bk.between_steps(bk.stages.Mean(), every=every, start=start))


@pytest.mark.parametrize("make", [local_sgd, decentralized, lambda every: diloco(every, delay=1)])
def test_training_with_a_constant_function_equals_that_with_the_number(make):
    def run():
        found = []
        for every in (3, lambda step: 3):
            net, sgd = net_and_sgd()
            with bk.attach(net, sgd, make(every=every)):
                run_steps(net, sgd, range(7))
            found.append(torch.nn.utils.parameters_to_vector(net.parameters()).detach())
        return found

    for number, function in ranks(2, run):
        assert torch.equal(number, function)


def test_ranks_whose_functions_differ_are_told_at_attach():
    def run():
        net, sgd = net_and_sgd()
        length = 3 + torch.distributed.get_rank()
        with pytest.raises(ValueError, match=r"its first rounds end in steps \[2, 5, 8"):
            bk.attach(net, sgd, local_sgd(every=lambda step: length))

    ranks(2, run)


@pytest.mark.parametrize("length, said", [(0, "every.5. is a whole number, 1 or more, not 0"), (1.5, "every.5.*1.5")])
def test_an_impossible_round_is_named_with_its_step(length, said):
    rule = bk.after_step(bk.stages.Mean(), every=lambda step: 5 if step == 0 else length)
    assert exchanges(rule, 5) == [4]
    with pytest.raises((TypeError, ValueError), match=said):
        rule.exchanges(5)


def test_a_delay_longer_than_a_round_is_named():
    rule = bk.after_step(bk.stages.Mean(), every=lambda step: 4 - step // 4, delay=3)
    with pytest.raises(ValueError, match=r"delay=3 must be at most every\(10\)=2"):
        exchanges(rule)


def test_what_needs_a_number_says_so():
    with pytest.raises(ValueError, match="offset=1 needs a number as every"):
        bk.after_step(bk.stages.Mean(), every=lambda step: 4, offset=1)
    with pytest.raises(ValueError, match="fragments=2 take turns within rounds of one length"):
        diloco(every=lambda step: 4, fragments=2)
