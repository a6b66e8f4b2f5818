"""Means in one kernel: what was counted, what is predicted of it, and the page."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from laboratory import ROOT

pytest.importorskip("triton")
from bench.exchange import buses, page
from bench.exchange.counting import CODECS, RANKS, phases
from bench.exchange.node import Node, wire_of

FOUND = page.read()
ROWS = [row for row in FOUND if "ranks" in row]


def test_the_page_is_that_of_the_counts(tmp_path):
    assert page.write(page.COUNTS, tmp_path / "README.md").read_text() == page.PAGE.read_text()


def test_every_format_is_counted_and_is_one_launch():
    assert {(row["format"], row["ranks"], row["one_hop"]) for row in ROWS} == {
        (name, ranks, one_hop) for name in CODECS for ranks in RANKS for one_hop in (False, True)
    }
    assert {row["launches"] for row in ROWS} == {1}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['format']}, {row['ranks']}, {row['one_hop']}")
def test_each_rank_sends_packed_rows_to_all_others_and_nothing_else(row):
    n, values = row["ranks"], row["values"]
    wire = wire_of(CODECS[row["format"]])
    rows = wire.row_bytes(values) if row["one_hop"] else 2 * wire.row_bytes(values // n)
    assert row["bus"]["bytes"] == (n - 1) * rows / values
    assert row["host"]["written"] == n * rows / values
    assert row["host"]["read"] >= n * rows / values  # parts of sectors, and headers of sums
    assert row["bus"]["bytes"] <= row["bus"]["packets"] * 128
    assert row["signals"] == (1 if row["one_hop"] else 2) * (n - 1)


def test_a_path_is_cut_from_the_first_signal_to_the_last_poll():
    names = ["MOV", "ST.E.STRONG.SYS", "ADD", "STG.E.STRONG.SYS", "LDG.E.STRONG.SYS", "BAR", "LDG.E.STRONG.SYS", "MUL"]
    assert phases(range(len(names)), names) == [[0], [7]]
    assert phases(range(16), 2 * names) == [[0], [7, 8], [15]]
    assert phases(range(2), ["MOV", "ADD"]) == [[0, 1]]


def test_orders_of_a_test_are_the_sums_of_its_cases_and_a_later_run_counts():
    row = {"arch": 90, "orders": 1, "exchanges": 2, "turns": 1000, "seconds": 0.6}
    rows = [row | {"test": "a::b[1]", "orders": 7}, row | {"test": "a::b[1]"}, row | {"test": "a::b[2]"}]
    assert page.ordered(rows).splitlines()[2:] == ["| `a::b` | 90 | 2 | 2 | 4 | 2,000 | 1 |"]


CLOCKS = {"send": 1980.0, "mean": 1980.0, "land": 1980.0}
ROW = {
    "ranks": 8, "one_hop": False, "tile": 4096, "signals": 0, "bus": {"bytes": 0.5, "packets": 1 / 128},
    "host": {"written": 1.0, "written packets": 1 / 128, "read": 1.0, "read packets": 1 / 128},
    "clocks": {"device": CLOCKS, "host": CLOCKS},
}  # fmt: skip


def test_a_phase_takes_as_long_as_its_programs_or_the_bus():
    bus = buses.Bus("", 1e9, 0, 0.0, 1e-6, 0.0)
    values = 2 * 32 * 8 * 4096  # two tiles of each shard for each program
    clocks = 2 * 1e-6
    assert buses.one_kernel(ROW, bus, values, 32) == pytest.approx(
        {"send": values * 0.25 / 1e9, "mean": values * 0.25 / 1e9, "land": clocks}
    )
    assert buses.one_kernel(ROW, buses.Bus("", 1e18, 0, 0.0, 1e-6, 0.0), values, 32) == pytest.approx(
        dict.fromkeys(("send", "mean", "land"), clocks)
    )
    slow = buses.Bus("", 1e18, 0, 0.0, 1e-6, 0.0, host_memory=1e18, reads=1e9)  # loads take longest
    assert buses.one_kernel(ROW, slow, values, 32) == pytest.approx(
        {"send": clocks, "mean": values / 2 / 1e9, "land": values / 2 / 1e9}
    )


def test_signals_take_a_packet_each():
    bus = buses.Bus("", 1e9, 20, 0.0, 1e-6, 0.0)
    with_signals, without = (
        buses.one_kernel(ROW | {"signals": signals}, bus, 1 << 20, 32)["send"] for signals in (10, 0)
    )
    assert with_signals - without == pytest.approx(10 / 2 * 32 * 24 / 1e9)


def test_a_program_releases_its_stores_to_all_ranks_at_once():
    slow, fast = (buses.Bus("", 1e9, 0, release, 3e-6, 0.0) for release in (1e-6, 0.0))
    parts = buses.one_kernel(ROW, fast, 1 << 20, 32)
    assert buses.exchange(ROW, fast, 1 << 20, 32) == pytest.approx(buses.LAUNCH + sum(parts.values()) + 2 * 3e-6)
    assert buses.exchange(ROW, slow, 1 << 20, 32) - buses.exchange(ROW, fast, 1 << 20, 32) == pytest.approx(2e-6)


def test_a_ring_of_two_ranks_sends_what_it_has_once():
    bus = buses.Bus("", 128e9, 0, 0.0, 1e-6, 5e-6)
    assert buses.ring(bus, 128_000, 2) == pytest.approx(8.4e-6 + 2 * 5e-6 + 1e-6)


def test_virtual_ranks_that_would_not_all_run_at_once_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    with pytest.raises(ValueError, match="8 ranks of 17 programs wait for each other, and this GPU has 132"):
        Node(8, 128, 17, "cuda")


@pytest.mark.slow  # starts a process that compiles and executes kernels
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name, one_hop", [("exact", True), ("UInt4()", False)])
def test_what_was_counted_is_counted_again(name, one_hop):
    """All but clocks, which depend on the assembler."""
    program = (
        f"import json; from bench.exchange.counting import count; print(json.dumps(count({name!r}, 2, {one_hop})))"
    )
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    ran = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=environment | {"PYTHONPATH": str(ROOT)}, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout.splitlines()[-1])
    [row] = [row for row in ROWS if (row["format"], row["ranks"], row["one_hop"]) == (name, 2, one_hop)]
    for key in ("bus", "host", "device", "signals"):
        assert found[key] == row[key], key
