"""The list of everything is complete, and each algorithm in it trains; `make test` tests one of each kind at length."""

import everything
import pytest
import torch
from everything import ALGORITHMS, COMPRESSORS, family, made, stages
from pool import ranks
from training import flat, net_and_sgd, run_steps

import baguakit as bk
from baguakit.rules import rules_of


@pytest.mark.parametrize("entry", ALGORITHMS + COMPRESSORS)
def test_every_algorithm_and_compressor_has_an_entry_that_can_be_made(entry):
    assert isinstance(made(entry), bk.compressors.Compressor) if entry in COMPRESSORS else rules_of(made(entry))
    assert {family(each) for each in ALGORITHMS} == set(bk.algorithms.__all__)


def test_every_stage_is_in_a_listed_algorithm_or_wraps_one():
    used = {type(stage).__name__ for each in ALGORITHMS for stage in stages(made(each))}
    exported = {name for name in bk.stages.__all__ if isinstance(getattr(bk.stages, name), type)}
    assert used >= exported - {"Stage", "Hierarchical"}


@pytest.mark.parametrize("entry", ALGORITHMS + COMPRESSORS)
def test_an_entry_is_listed_once_and_has_small_arguments(entry):
    value = made(entry)
    assert [other for other in ALGORITHMS + COMPRESSORS if made(other) == value] == [entry]


def test_every_algorithm_trains():
    """Five steps with each: all weights are finite, and where gradients are averaged, equal on both ranks."""

    def run():
        found = {}
        for entry in ALGORITHMS:
            model, optimizer = net_and_sgd()
            with bk.attach(model, optimizer, made(entry)) as att:
                run_steps(model, optimizer, range(5))
                found[entry] = att.step, flat(model)
        return found

    one, other = ranks(2, run)
    for entry, (step, weights) in one.items():
        assert step == other[entry][0] == 5 and weights.isfinite().all() and other[entry][1].isfinite().all(), entry
        if everything.averages_gradients(made(entry)):
            assert torch.equal(weights, other[entry][1]), entry


def test_the_first_of_each_kind_is_tested_always_and_the_others_are_slow():
    found = everything.of_each_kind()
    assert found[0] == ALGORITHMS[0] and len({everything.kind(made(each)) for each in ALGORITHMS}) == len(found)
    parameters = everything.others_slow()
    assert [each for each in parameters if isinstance(each, str)] == found
    assert [each if isinstance(each, str) else each.values[0] for each in parameters] == list(ALGORITHMS)
    assert all([mark.name for mark in each.marks] == ["slow"] for each in parameters if not isinstance(each, str))


@pytest.mark.parametrize(
    "entry, one, alike",
    [
        ("gradient_allreduce()", "bytegrad(MinMaxUInt8(block=64))", True),
        ("gradient_allreduce()", "gradient_allreduce(delay=1)", False),
        ("bytegrad(MinMaxUInt8(block=64), error_feedback=True)", "bytegrad(MinMaxUInt8(block=64))", False),
        ("decentralized()", "decentralized(order='atc')", False),
        ("local_sgd(every=2)", "decentralized(order='atc')", False),
        ("local_sgd(every=2)", "local_sgd(every=2, start=5)", False),
    ],
)
def test_a_kind_is_read_from_the_rules(entry, one, alike):
    assert (everything.kind(made(entry)) == everything.kind(made(one))) == alike


@pytest.mark.parametrize(
    "entry, averages, free, late, exact, joins",
    [
        ("gradient_allreduce()", True, False, False, True, True),
        ("gradient_allreduce(delay=1)", True, False, True, True, True),
        ("bytegrad(MinMaxUInt8(block=64))", True, False, False, False, True),
        ("power_sgd(rank=2)", True, False, False, False, True),
        ("choco()", False, False, False, False, True),
        ("gradient_tracking()", False, False, False, True, False),
        ("diloco(every=4, delay=2)", False, False, False, True, True),
        ("local_sgd(every=2, start=5)", False, False, False, True, True),
        ("async_model_average(warmup_steps=2)", False, True, False, True, False),
    ],
)
def test_facts_are_read_from_the_rules(entry, averages, free, late, exact, joins):
    algorithm = made(entry)
    found = (
        everything.averages_gradients,
        everything.runs_free,
        everything.delayed,
        everything.exact,
        everything.joins,
    )
    assert [fact(algorithm) for fact in found] == [averages, free, late, exact, joins]
