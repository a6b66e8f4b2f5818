"""The list of everything is complete: each test names what of the package is missing in it."""

import everything
import pytest
from everything import ALGORITHMS, COMPRESSORS, family, made, stages

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
