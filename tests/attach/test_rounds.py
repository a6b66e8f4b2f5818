"""`every`, `start` and `stop` as functions of the step, and intervals that an object decides during training."""

from collections.abc import Callable

import pytest
import torch
from pool import ranks
from training import net_and_sgd, run_steps

import baguakit as bk
from baguakit.algorithms import diloco, local_sgd
from baguakit.rules import Rule


def exchanges(rule: Rule, steps: int = 40) -> list[int]:
    return [step for step in range(steps) if rule.exchanges(step)]


def test_rounds_follow_one_another():
    lengths = {3: 1, 4: 5, 9: 2, 11: 30}
    rule = bk.after_step(bk.stages.Mean(), every=lengths.__getitem__, start=3, stop=40)
    assert exchanges(rule, 60) == [3, 8, 10]
    assert [rule._end_of_round(3, step) for step in (40, 3, 4, 8, 9)] == [40, 3, 8, 8, 10]
    assert repr(rule) == "after_step(Mean(), every=…, start=3, stop=40)"


@pytest.mark.parametrize("every", [1, 3, 8])
@pytest.mark.parametrize("start", [0, 5])
def test_a_constant_function_is_the_number(every, start):
    rule = bk.between_steps(bk.stages.Mean(), every=lambda step: every, start=start)
    assert exchanges(rule) == exchanges(bk.between_steps(bk.stages.Mean(), every=every, start=start))


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


# Bounds that are functions.


def from_step(step: int) -> Callable[[int], bool]:
    return lambda now: now >= step


@pytest.mark.parametrize("window", [bk.between_steps, bk.after_step])
@pytest.mark.parametrize("every", [1, 3, lambda step: 2 + step % 2])
def test_a_function_as_bound_is_the_first_step_in_which_it_is_true(window, every):
    for start, stop in ((0, None), (5, None), (0, 9), (5, 19)):
        numbers = window(bk.stages.Mean(), every=every, start=start, stop=stop)
        functions = window(bk.stages.Mean(), every=every, start=from_step(start), stop=stop and from_step(stop))
        assert exchanges(functions) == exchanges(numbers)
    only = bk.during_backward(bk.stages.Mean(), start=lambda step: step == 3, stop=lambda step: step in (5, 9))
    assert [step for step in range(12) if only.acts(step)] == [3, 4]
    assert repr(only) == "during_backward(Mean(), start=…, stop=…)"


def warm_up(stop, start) -> tuple[Rule, ...]:
    gossip = bk.stages.NeighborMean(bk.topology.Ring())
    return bk.during_backward(bk.stages.Mean(), stop=stop), bk.after_step(gossip, start=start)


def trained(algorithm, steps: int = 7) -> torch.Tensor:
    net, sgd = net_and_sgd()
    with bk.attach(net, sgd, algorithm):
        run_steps(net, sgd, range(steps))
    return torch.nn.utils.parameters_to_vector(net.parameters()).detach()


def test_training_with_functions_as_bounds_equals_that_with_numbers():
    def run():
        begins = from_step(3)
        return trained(warm_up(3, 3)), trained(warm_up(begins, begins))

    for numbers, functions in ranks(2, run):
        assert torch.equal(numbers, functions)


def test_rules_that_hand_over_by_one_function_do_not_meet_and_others_may():
    begins = from_step(3)
    mean = bk.during_backward(bk.stages.Mean(), stop=begins)
    assert not mean.overlaps(bk.during_backward(bk.stages.Mean(), start=begins))
    assert mean.overlaps(bk.during_backward(bk.stages.Mean(), start=from_step(3)))
    assert mean.overlaps(bk.during_backward(bk.stages.Mean(), start=3))

    def run():
        net, sgd = net_and_sgd()
        with pytest.raises(ValueError, match=r"both act on .* in the same window and steps"):
            bk.attach(net, sgd, mean, bk.during_backward(bk.stages.Mean(), start=from_step(3)))

    ranks(1, run)


def test_ranks_whose_functions_differ_are_told_at_attach():
    def run():
        net, sgd = net_and_sgd()
        at = 3 + torch.distributed.get_rank()
        for rule, said in (
            (local_sgd(every=lambda step: at), r"its first rounds end in steps \[2, 5, 8"),
            (local_sgd(every=2, start=from_step(at)), r"it acts in steps \[0, 1, 2\] where"),
        ):
            with pytest.raises(ValueError, match=said):
                bk.attach(net, sgd, rule)

    ranks(2, run)


def test_a_bound_that_is_no_truth_is_named_with_its_step():
    rule = bk.after_step(bk.stages.Mean(), start=lambda step: step - 2 if step == 2 else False)
    assert not rule.acts(1)
    with pytest.raises(TypeError, match=r"start\(2\) is True or False, not 0"):
        rule.acts(2)


# Intervals that are decided during training.


class At:
    """Exchanges in given steps, and records what it was asked."""

    def __init__(self, *steps: int) -> None:
        self.steps, self.asked = steps, list[tuple[int, int]]()

    def due(self, step: int, comm: bk.Comm) -> bool:
        self.asked.append((step, comm.round))
        return step in self.steps


@pytest.mark.parametrize(
    "make",
    [
        lambda every: bk.after_step(bk.stages.Mean(), every=every),
        lambda every: bk.between_steps(bk.stages.Mean(), every=every),
        lambda every: bk.after_step(bk.stages.Mean(), every=every, delay=2),
        lambda every: bk.after_step(bk.stages.Mean(), every=every, delay=1, mix=0.5),
        lambda every: diloco(every=every, lr=0.5),
    ],
)
def test_training_with_an_object_equals_that_with_a_function(make):
    def run():
        every = At(2, 5, 7)
        lengths = {0: 3, 3: 3, 6: 2, 8: 90, 98: 90}
        return trained(make(every), 9), trained(make(lambda step: lengths.get(step, 90)), 9), every.asked

    for decided, told, asked in ranks(2, run):
        assert torch.equal(decided, told)
        steps, rounds = zip(*asked, strict=True)
        assert len({*steps}) == len(steps) and rounds == tuple(sum(due < step for due in (2, 5, 7)) for step in steps)


def test_an_object_is_not_asked_while_its_exchange_is_in_the_air():
    def run():
        every = At(*range(20))
        trained(bk.after_step(bk.stages.Mean(), every=every, delay=3), 8)
        return every.asked

    assert ranks(2, run) == [[(0, 0), (3, 1), (6, 2)]] * 2


def test_a_flight_of_a_decided_step_lands_where_training_is_resumed():
    def run():
        whole = trained(bk.after_step(bk.stages.Mean(), every=At(2), delay=3), 8)
        net, sgd = net_and_sgd()
        rule = bk.after_step(bk.stages.Mean(), every=At(2), delay=3)
        with bk.attach(net, sgd, rule) as att:
            run_steps(net, sgd, range(4))
            saved = att.state_dict(), net.state_dict(), sgd.state_dict()
            saved = torch.utils._pytree.tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, saved)
        net, sgd = net_and_sgd()
        with bk.attach(net, sgd, rule) as att:
            for each, state in zip((att, net, sgd), saved, strict=True):
                each.load_state_dict(state)
            run_steps(net, sgd, range(4, 8))
        return whole, torch.nn.utils.parameters_to_vector(net.parameters()).detach()

    for whole, resumed in ranks(2, run):
        assert torch.equal(whole, resumed)


class ByDrift:
    """Averages when the mean of what ranks have moved since the last average is large: agreed on without waiting."""

    def __init__(self, net: torch.nn.Module, most: float) -> None:
        self.net, self.most, self.steps = net, most, list[int]()
        self.comm, self.flight = bk.Comm(torch.distributed.new_group()), None
        self.start = self.now()

    def now(self) -> torch.Tensor:
        return torch.nn.utils.parameters_to_vector(self.net.parameters()).detach()

    def due(self, step: int, comm: bk.Comm) -> bool:
        flight, moved = self.flight, (self.now() - self.start).square().mean().reshape(1)
        self.flight = bk.primitives.launch(bk.stages.Mean(), moved, self.comm)
        if flight is None or float(flight.result()) < self.most:  # of the step before: it has arrived long ago
            return False
        self.flight.result()
        self.start, self.flight = self.now(), None
        self.steps.append(step)
        return True


def test_ranks_agree_on_an_interval_that_follows_what_they_measure():
    def run():
        net, sgd = net_and_sgd()
        every = ByDrift(net, 1e-4)
        with bk.attach(net, sgd, bk.after_step(bk.stages.Mean(), every=every)) as att:
            run_steps(net, sgd, range(30))
            flown = sum(row.flights for row in att.report().rows)
        return every.steps, flown

    (steps, flown), other = ranks(2, run)
    assert (steps, flown) == other and 1 < len(steps) < 30 and flown % len(steps) == 0


def test_what_is_no_interval_and_no_answer_is_named():
    with pytest.raises(TypeError, match="every is a whole number, a function of the step, or an object with due"):
        bk.after_step(bk.stages.Mean(), every="often")
    rule = bk.after_step(bk.stages.Mean(), every=At(3))
    assert repr(rule) == "after_step(Mean(), every=At(…))"
    with pytest.raises(ValueError, match="decides during training when it exchanges"):
        rule.exchanges(3)
    with pytest.raises(ValueError, match="offset=1 needs a number as every"):
        bk.after_step(bk.stages.Mean(), every=At(3), offset=1)

    class Wrong:
        def due(self, step, comm):
            return None

    def run():
        net, sgd = net_and_sgd()
        named = pytest.raises(TypeError, match=r"Wrong.due\(0, comm\) is True or False, not None")
        with bk.attach(net, sgd, bk.after_step(bk.stages.Mean(), every=Wrong())), named:
            run_steps(net, sgd, range(1))

    ranks(1, run)
