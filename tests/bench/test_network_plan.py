"""Predicted steps beside measured ones, without a network: from tables made by hand."""

import pytest

import baguakit as bk
from bench.network import plan, steps
from bench.network.contenders import CONTENDERS, contender
from bench.network.tasks import task

LINE = bk.tune.Line(1e-4, 8.4e-8)
COMPRESSORS = list(plan.compressors_in([each.algorithm for each in CONTENDERS if each.algorithm is not None]))
CODECS = tuple(bk.tune.Codec(repr(each), 1e-9, 1e-9, 1e-9) for each in COMPRESSORS)
NETWORK = bk.tune.Network(4, 1, "cpu", 1, (bk.tune.Link("flat", 1, 4, LINE, LINE),), CODECS, copy=1e-10)


def predicted(name):
    compute = bk.tune.Compute(0.008, 0.016, 0.006)
    return bk.tune.predict(contender(name).algorithm, task("wide").model(), NETWORK, compute).seconds


def test_every_network_on_which_steps_are_measured_is_probed():
    for quick in (True, False):
        places = {(cell["rate"], cell["hosts"]) for cell in steps.cells(quick)}
        assert {(cell["rate"], cell["hosts"]) for cell in plan.cells(quick)} == places


@pytest.mark.parametrize("name", [each.name for each in CONTENDERS if each.algorithm is not None])
def test_every_contender_is_predicted(name):
    assert predicted(name) >= 0.03 - 1e-12
