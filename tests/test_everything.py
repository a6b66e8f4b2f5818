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
