"""The list of everything is complete, and each algorithm in it trains; `make test` tests one of each kind at length."""

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
