"""The benchmark of networks, without one: its formulas, and its table that goes on where it was."""

import json
import os
import textwrap
from unittest import mock

import pytest
import torch
from pool import ranks

import baguakit as bk
from baguakit.compressors import BFloat16, MinMaxUInt8, TopK
from baguakit.kernels.cpu import units
from baguakit.topology import OnePeerExponential, Ring
from bench.network import backend, collectives, exchanges, few, flows, formulas, reports, runs, steps
from bench.network.contenders import CONTENDERS, FOUR_BITS, contender
from bench.network.reports import of_flows
from bench.network.table import Table
from bench.network.train import blocks_of

SHAPES = [(64, 48), (64,), (32, 16, 3, 3)]
N = 64 * 48 + 64 + 32 * 16 * 9


def test_formulas_by_hand():
    assert formulas.count(SHAPES) == N
    assert formulas.all_reduce(SHAPES, 4) == 1.5 * 4 * N
    assert formulas.all_reduce(SHAPES, 2, value_bytes=2) == 2 * N
    assert formulas.compressed_all_reduce(SHAPES, 4, BFloat16()) == 6 * 2 * N / 4
    assert formulas.sparse(SHAPES, 4, TopK(0.01)) == 3 * TopK(0.01).row_bytes(N)
    assert formulas.gossip(SHAPES, 8, OnePeerExponential()) == 4 * N
    assert formulas.gossip(SHAPES, 8, Ring()) == 2 * 4 * N
    assert formulas.gossip(SHAPES, 2, Ring()) == 4 * N
    assert formulas.gossip(SHAPES, 4, Ring(), MinMaxUInt8()) == 2 * MinMaxUInt8().row_bytes(N)
    low = 2 * (64 + 48) + 64 + 2 * (32 + 144)
    assert formulas.low_rank(SHAPES, 4, 2) == 1.5 * 4 * low
    assert formulas.low_rank_where_it_pays(SHAPES, 4, 2) == 1.5 * 4 * low
    assert formulas.low_rank_where_it_pays(SHAPES, 4, 20) == 1.5 * 4 * N


FAST = ["bytegrad", "low_precision_decentralized"]
SLOW = [
    "gradient_allreduce",
    "bytegrad, BFloat16",
    "power_sgd",
    "top_k",
    "qadam",
    "decentralized, ATC",
    "choco",
    "local_sgd",
]


@pytest.mark.parametrize("name", [*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_formulas_are_what_attachments_count(name):
    """One bucket on four ranks: the attachment's own count of a step, after the warm-up, is the formula's."""
    each = contender(name)

    def work():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(96, 192), torch.nn.Linear(192, 96))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

        def train(count, attachment):
            for _ in range(count):
                optimizer.zero_grad()
                model(torch.randn(2, 96)).square().mean().backward()
                optimizer.step()
            return attachment.report().bytes_sent

        with bk.attach(model, optimizer, each.algorithm) as attachment:
            before = train(24, attachment)
            sent = (train(24, attachment) - before) / 24
        return sent, each.sends([p.shape for p in model.parameters()], 4)

    for sent, formula in ranks(4, work):
        assert sent == pytest.approx(formula, rel=0.02)  # padding to whole lines of bytes


def test_cells_are_all_different():
    for quick in (True, False):
        cells = steps.cells(quick)
        assert len({json.dumps(cell) for cell in cells}) == len(cells)
    assert {cell["algorithm"] for cell in steps.cells(False)} == {each.name for each in (*CONTENDERS, *FOUR_BITS)}
    assert {cell["algorithm"] for cell in steps.cells(False, ["DDP"])} == {"DDP"}


def test_exchanges_are_checked_and_counted():
    """Over loopback: all ranks tell the same, and messages without computing are as many bytes as with it."""

    def work():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        with units.eager():  # what is compiled, and how, is not asked here
            return exchanges.measure({"hosts": 2, "rate": "unshaped", "mib": 1, "repeats": 2})

    here, there = ranks(2, work)
    assert here == there and here.keys() == exchanges.EXCHANGES.keys()
    assert all(each["seconds"] > 0 for each in here.values())
    computed, alone = here["compressed_mean_"], here["its messages alone"]
    assert alone["formula"] == computed["formula"] < alone["payload"]  # and what loopback carries besides


@pytest.mark.slow
def test_collectives_are_checked_and_counted():
    """Likewise; 1 MiB is one piece of each."""

    def work():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        with units.eager():
            return collectives.measure({"hosts": 4, "rate": "unshaped", "mib": 1, "repeats": 2})

    here, *others = ranks(4, work)
    assert others == [here] * 3 and here.keys() == collectives.COLLECTIVES.keys()
    assert all(each["seconds"] > 0 for each in here.values())
    assert all(0 < each["formula"] <= each["busiest"] for each in here.values())


def test_means_of_few_values_are_measured_and_told(tmp_path):
    """Over loopback; their results are checked where they are measured."""
    cell = {"hosts": 2, "rate": "unshaped", "values": [16, 4096], "repeats": 3}

    def work():
        return few.measure(cell)

    here, there = ranks(2, work)
    assert here == there and list(here) == ["16", "4096"] and all(set(r) == set(few.NAMES) for r in here.values())
    table = Table(tmp_path / "table.jsonl")
    plain, compressed = ({"seconds": s, "quartiles": [0.9 * s, s, 1.1 * s]} for s in (4e-4, 6e-4))
    table.add({**cell, "rate": "1gbit"}, {"16": {few.PLAIN: plain, few.COMPRESSED: compressed}})
    assert reports.of_few(table).splitlines()[1].split() == ["1gbit", "2", "16", "400", "20%", "600", "20%", "1.50"]


@pytest.mark.slow
def test_programs_over_the_backend_are_measured():
    """Over loopback: what they send is what the formula says."""

    def work():
        with mock.patch.dict(os.environ, {"GLOO_SOCKET_IFNAME": "lo"}):
            return backend.measure({"hosts": 2, "rate": "unshaped", "steps": 2})

    here, there = ranks(2, work)
    assert here == there and set(here) == {
        "compute",
        *(f"{p}, {b}" for p in backend.PROGRAMS for b in ("gloo", "bagua")),
    }
    for name, row in here.items():
        # Loopback carries the store's messages, too; FSDP2 gathers the weights of its root once.
        assert row["payload"] > 0.98 * row["formula"], name


@pytest.mark.slow
def test_flows_are_measured_and_told(tmp_path):
    """Over loopback: against one flow, and with one that is slow; results are checked where they are measured."""
    even = {"hosts": 2, "rate": "unshaped", "mib": 1, "repeats": 2}
    slow = {"hosts": 2, "rate": "unshaped", "caps": ["800mbit", "200mbit"], "mib": 1, "messages": 17}

    def work():
        return flows.measure(even), flows.measure(slow)

    here, there = ranks(2, work)
    assert here == there
    against_one, one_slow = here
    assert set(against_one) == set(flows.NAMES) and set(against_one["mean_"]) == {"1", "8", "formula"}
    assert against_one["mean_"]["formula"] == 1 << 20
    assert len(one_slow["shares"]) == 2 and sum(one_slow["shares"]) == pytest.approx(1)
    table = Table(tmp_path / "table.jsonl")
    fixed = {"seconds": 4.0, "quartiles": [3.9, 4.0, 4.1]}
    fast = {"seconds": 0.5, "quartiles": [0.5, 0.5, 0.5]}
    table.add({**even, "flow_cap": "160mbit"}, {"mean_": {"1": fixed, "8": fast, "formula": 80e6}})
    table.add({**even, "rate": "1gbit"}, {"mean_": {"8": fast, "formula": 125e6 / 4}})
    table.add(slow, {**one_slow, **fixed, "formula": 375e6})
    _, one, eight, shaped, last = of_flows(table).splitlines()
    assert one.split() == ["unshaped", "160mbit", "2", "1", "mean_", "1", "4.000", "5%", "4.000", "1.00", "1.00"]
    assert eight.split() == ["unshaped", "160mbit", "2", "1", "mean_", "8", "0.500", "0%", "0.500", "1.00", "8.00"]
    assert shaped.split() == ["1gbit", "none", "2", "1", "mean_", "8", "0.500", "0%", "0.250", "2.00", "1.00"]
    assert " ".join(last.split()) == "unshaped one a quarter 2 1 mean_ 2 4.000 5% 3.000 1.33 –"


def test_a_table_outlives_its_program(tmp_path):
    table = Table(tmp_path / "new" / "table.jsonl")
    assert len(table) == 0
    table.add({"rate": "1gbit", "hosts": 4}, {"step": 1.5})
    table.fail({"rate": "2gbit", "hosts": 4}, "it broke")
    with table.path.open("a") as file:
        file.write('{"cell": {"rate": "3gb')  # killed while writing
    again = Table(table.path)
    assert {"hosts": 4, "rate": "1gbit"} in again  # in any order
    assert {"hosts": 4, "rate": "2gbit"} not in again
    assert again[{"hosts": 4, "rate": "1gbit"}] == {"step": 1.5}
    assert list(again) == [({"hosts": 4, "rate": "1gbit"}, {"step": 1.5})]
    again.add({"rate": "2gbit", "hosts": 4}, {"step": 1})
    assert len(Table(table.path)) == 2  # the half line has gone


WORKER = """
import json, os, sys
for cell in json.loads(sys.argv[1]):
    if cell["number"] == 2:
        sys.exit("two is too much")
    if os.environ["RANK"] == "0":
        print("RESULT " + json.dumps({"double": 2 * cell["number"]}), flush=True)
"""


def test_a_run_goes_on_behind_what_fails_and_where_it_was(tmp_path, monkeypatch, capsys):
    (tmp_path / "worker_of_test_network.py").write_text(textwrap.dedent(WORKER))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(runs, "obstacle", lambda: "this is a test")  # hence over loopback
    path = tmp_path / "table.jsonl"
    cells = [{"hosts": 1, "rate": "unshaped", "number": number} for number in (1, 2, 3)]
    slow = {"hosts": 1, "rate": "1gbit", "number": 4}
    assert runs.measure([*cells, slow], Table(path), "worker_of_test_network") == 1
    assert "two is too much" in capsys.readouterr().err
    done = {cell["number"]: result["double"] for cell, result in Table(path)}
    assert done == {1: 2, 3: 6}
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert ["error" in row for row in rows] == [False, True, False]
    runs.measure(cells[:1], Table(path), "a_module_that_is_not_there")  # nothing is due, and so nothing starts
    assert len(path.read_text().splitlines()) == 3


def test_steps_are_means_over_whole_periods():
    assert blocks_of([1.0, 2.0, 4.0, 8.0, 9.0], 1) == [1, 1, 2, 4, 1]
    assert blocks_of([1.0, 2.0, 4.0, 8.0, 9.0], 2) == [1, 3]
    assert blocks_of([1.0, 2.0], 8) == [1]
