"""The benchmark of networks, without one: its formulas, and its table that goes on where it was."""

import itertools
import os
from pathlib import Path

import late_device
import pytest
import torch
from pool import ranks

import baguakit as bk
from bench.network import collectives, exchanges, staged, versions
from bench.network.contenders import contender
from bench.network.table import RESULTS, Table

ROOT = Path(__file__).parents[2]
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


def test_exchanges_are_checked_and_counted():
    """Over loopback: all ranks tell the same, and messages without computing are as many bytes as with it."""

    def work():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
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
        return collectives.measure({"hosts": 4, "rate": "unshaped", "mib": 1, "repeats": 2})

    here, *others = ranks(4, work)
    assert others == [here] * 3 and here.keys() == collectives.COLLECTIVES.keys()
    assert all(each["seconds"] > 0 for each in here.values())
    assert all(0 < each["formula"] <= each["busiest"] for each in here.values())


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


@pytest.mark.slow
@pytest.mark.skipif(not late_device.supported(), reason="this torch has no devices in Python")
def test_steps_through_the_memory_of_the_host_are_compared_with_those_of_the_cpu():
    """The comparison itself refuses weights that are not equal."""

    def work():
        return staged.measure({"algorithm": "bytegrad", "repeats": 2})

    here, there = ranks(2, work, late=True)
    assert here == there and list(here) == list(staged.STREAMS)
    assert all(0 < each["least"] <= each["seconds"] for each in here.values())


def test_changed_weights_take_fewer_bytes_than_all():
    def run():
        return versions.measure({"mib": 1, "share": 0.03, "repeats": 2})

    here, there = ranks(2, run)
    assert here == there
    assert here["3% changed"]["busiest"] < 0.05 * here["broadcast"]["busiest"] == 0.05 * (1 << 20)


def test_the_page_of_devices_shows_the_measured_steps():
    """Its rows hold the steps of a device with streams, which are those of GPUs, and all of them."""
    measured = {(cell["rate"], cell["algorithm"]): result for cell, result in Table(RESULTS / "network-staged.jsonl")}
    names = ["`gradient_allreduce()`", "`bytegrad()`", "`bytegrad(UInt4(), error_feedback=True)`"]
    shown, rows = dict(zip(staged.ALGORITHMS[1:], names, strict=True)), []
    for rate, name in itertools.product(staged.REPEATS, shown):
        if (rate, name) in measured:
            (cpu, there), (alone, own) = (
                (result["CPU"]["seconds"] * 1e3, result["staged"]["seconds"] * 1e3)
                for result in (measured[rate, name], measured[rate, staged.ALONE])
            )
            times = f"{cpu:.0f} ms | {there:.0f} ms | {there / cpu:.2f} × | {(there - own + alone) / cpu:.2f} ×"
            rows.append(f"| {rate.removesuffix('mbit')} Mb/s | {shown[name]} | {times} |")
    page = (ROOT / "docs" / "any_device.md").read_text().splitlines()
    assert [line for line in page if " Mb/s | `" in line] == rows
