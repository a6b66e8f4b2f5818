"""The effect of every algorithm on training, and the plan that names none."""

from dataclasses import replace

import pytest
from everything import ALGORITHMS, averages_gradients, delayed, exact, made
from pool import ranks
from torch import nn

import baguakit as bk
from baguakit.rules import rules_of, together
from baguakit.tune.planning import compressors_in, every
from baguakit.tune.prediction import effect, measured

a, c = bk.algorithms, bk.compressors


@pytest.mark.parametrize(
    "algorithm, text, kept",
    [
        (a.gradient_allreduce(), "as DDP", True),
        (bk.hierarchical(a.gradient_allreduce()), "as DDP", True),
        (a.bytegrad(), "8-bit", True),
        (a.bytegrad(c.BFloat16()), "16-bit", True),
        (a.bytegrad(error_feedback=True), "8-bit, feedback", True),
        (bk.hierarchical(a.bytegrad()), "8-bit", True),
        (a.bytegrad(c.UInt4(), error_feedback=True), "4-bit, feedback", False),
        (a.bytegrad(error=1e-3), "2-bit", False),
        (a.power_sgd(), "different", False),
        (a.top_k(), "different", False),
        (a.qadam(), "different", False),
        (a.gradient_allreduce(delay=1), "different", False),
        (a.local_sgd(), "different", False),
        (a.decentralized(), "different", False),
        (a.async_model_average(), "different", False),
    ],
)
def test_effects(algorithm, text, kept):
    found = effect(algorithm)
    assert (str(found), found.keeps_loss) == (text, kept)


@pytest.mark.parametrize("expression", ALGORITHMS)
def test_an_algorithm_is_the_same_as_ddp_if_it_averages_gradients_exactly(expression):
    algorithm = made(expression)
    steady = together(rule for rule in rules_of(algorithm) if rule.stop is None)
    same = str(effect(algorithm)) == "as DDP"
    in_time = averages_gradients(steady) and not delayed(steady)
    assert same == (exact(steady) and in_time and all(r.stage.averages for r in steady.rules))
    assert not effect(algorithm).keeps_loss or (averages_gradients(algorithm) and not delayed(algorithm))


def test_steps_to_a_loss_are_known_of_algorithms_that_were_trained():
    assert all(steps > 0 for steps in measured().values())
    assert repr(a.bytegrad(c.Float16(), error_feedback=True)) not in measured()


def test_a_plan_that_names_no_algorithm_predicts_all_and_picks_one_that_keeps_the_loss():
    def work():
        model = nn.Linear(64, 64)
        codecs = [bk.tune.Codec(repr(each), 1e-9, 1e-9, 1e-9) for each in compressors_in(list(every()))]
        line = bk.tune.Line(1e-4, 1e-7)
        links = (bk.tune.Link("flat", 1, 3, line, line),)
        network = bk.tune.Network(3, 1, "cpu", 1, links, tuple(codecs), copy=1e-10)
        plan = bk.tune.plan(model, None, network, 0.01)
        few = bk.tune.plan(model, None, replace(network, codecs=()), 0.01)  # as of a probe for other compressors
        exact = {repr(bk.algorithms.gradient_allreduce()), repr(bk.algorithms.local_sgd())}
        assert exact <= {repr(row.algorithm) for row in few.rows}
        assert "nothing is known of the speed of MinMaxUInt8()" in few.left_out[repr(bk.algorithms.bytegrad())]
        return [repr(row.algorithm) for row in plan.fastest()], dict(plan.left_out), str(plan.best.effect), str(plan)

    told = ranks(3, work)
    rows, left_out, picked, text = told[0]
    assert all(each == told[0] for each in told)
    assert len(rows) + len(left_out) == len(every())
    assert {repr(each) for each in every()} >= set(rows)
    assert picked == "8-bit" and all(reason in text for reason in left_out.values())
