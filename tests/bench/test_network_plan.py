"""Predicted steps beside measured ones, without a network: from tables made by hand."""

import json

import pytest

import baguakit as bk
from bench.network import plan, steps
from bench.network.contenders import CONTENDERS, contender
from bench.network.table import Table
from bench.network.tasks import task

LINE = bk.tune.Line(1e-4, 8.4e-8)
COMPRESSORS = list(plan.compressors_in([each.algorithm for each in CONTENDERS if each.algorithm is not None]))
CODECS = tuple(bk.tune.Codec(repr(each), 1e-9, 1e-9, 1e-9) for each in COMPRESSORS)
NETWORK = bk.tune.Network(4, 1, "cpu", 1, (bk.tune.Link("flat", 1, 4, LINE, LINE),), CODECS, copy=1e-10)


@pytest.fixture
def tables(tmp_path):
    trained, probed = Table(tmp_path / "steps.jsonl"), Table(tmp_path / "probes.jsonl")
    probed.add(plan.cells(True)[0], {"network": json.loads(NETWORK.to_json())})
    return trained, probed


def measured(seconds):
    return {"step": seconds, "compute": 0.03, "forward_backward": 0.024}


def predicted(name):
    compute = bk.tune.Compute(0.008, 0.016, 0.006)
    return bk.tune.predict(contender(name).algorithm, task("wide").model(), NETWORK, compute).seconds


def test_what_is_compared(tables):
    """Of one place: what the package trains, without a straggler and on a network that has been probed."""
    trained, probed = tables
    names = ("gradient_allreduce", "bytegrad", "local_sgd", "DDP", "no communication")
    for name in names:
        trained.add(steps.cell(name, rate="100mbit"), measured(1.0))
    trained.add(steps.cell("bytegrad", rate="500mbit"), measured(1.0))
    trained.add(steps.cell("bytegrad", rate="100mbit", straggler=True), measured(1.0))
    rows = plan.compared(trained, probed)
    assert [row.algorithm for row in rows] == ["gradient_allreduce", "bytegrad", "local_sgd"]
    assert [row.error for row in rows] == pytest.approx([predicted(name) - 1 for name in names[:3]])


def test_what_picks_come_to(tables, tmp_path):
    trained, probed = tables
    true = {name: predicted(name) for name in ("gradient_allreduce", "bytegrad", "local_sgd")}
    assert true["local_sgd"] < true["bytegrad"] < true["gradient_allreduce"]
    for name, seconds in true.items():
        trained.add(steps.cell(name, rate="100mbit"), measured(seconds * (1.25 if name == "local_sgd" else 1.0)))
    rows = plan.compared(trained, probed)
    kept, every = plan.picks(rows)
    assert (kept.picked, kept.fastest, kept.regret) == ("bytegrad", "bytegrad", 0.0)
    assert (every.picked, every.fastest, every.regret) == ("local_sgd", "local_sgd", 0.0)
    text = plan.report(rows)
    assert "3 steps: the median error is 0.0%, the largest 20%." in text
    assert "2 of 2 picks are within 5 % of the fastest." in text
    plan.save(rows, tmp_path / "plan.json")
    found = json.loads((tmp_path / "plan.json").read_text())
    assert [step["algorithm"] for step in found["steps"]] == list(true) and len(found["picks"]) == 2


def test_every_network_on_which_steps_are_measured_is_probed():
    for quick in (True, False):
        places = {(cell["rate"], cell["hosts"]) for cell in steps.cells(quick)}
        assert {(cell["rate"], cell["hosts"]) for cell in plan.cells(quick)} == places


@pytest.mark.parametrize("name", [each.name for each in CONTENDERS if each.algorithm is not None])
def test_every_contender_is_predicted(name):
    assert predicted(name) >= 0.03 - 1e-12
