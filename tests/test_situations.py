"""The README and docs: every block of Python runs on two ranks, and the tables of docs/situations are the model's.

A page whose code another test runs says so: `<!-- Its code runs in tests/….py. -->`. Pages of docs/trainers run in the
files of tests/trainers.
"""

import contextlib
import itertools
import json
import os
import re
import urllib.request
from importlib.util import find_spec
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from commands import ROOT, blocks_of
from pool import ranks

import baguakit as bk
from bench.scaling import situations

PAGES = [path for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))] if "_build" not in path.parts]
ELSEWHERE = re.compile(r"<!-- Its code runs in (\S+)\. -->")
SLOW = "bk.tune.plan"  # a probe of the network takes seconds
SMALLER = {"every=500": "every=2"}  # so that there are exchanges


def runs(code: str) -> tuple[bool, list[object]]:
    """Run code on this rank; return whether the model was trained, and its parameters."""
    torch.manual_seed(0)
    batches = [(torch.randn(4, 3), torch.randn(4, 2)) for _ in range(3)]
    names = {"__name__": "__main__", "batches": batches, "loader": batches, "Net": lambda: torch.nn.Linear(3, 2)}
    names |= {"loss": torch.nn.functional.mse_loss, "model": torch.nn.Linear(3, 2), "device": torch.device("cpu")}
    names |= {"os": os, "torch": torch, "dist": dist, "bk": bk, "path": "state.pt", "train": lambda: train(names)}
    names["optimizer"] = torch.optim.SGD(names["model"].parameters(), lr=0.1)
    before = [p.detach().clone() for p in names["model"].parameters()]
    for large, small in SMALLER.items():
        code = code.replace(large, small)
    with contextlib.ExitStack() as stack:
        # This rank has a group already, and keeps it.
        stack.enter_context(
            mock.patch.multiple(dist, init_process_group=mock.DEFAULT, destroy_process_group=mock.DEFAULT)
        )
        if re.search(r"\batt\.", code) and "bk.attach" not in code:
            names["att"] = stack.enter_context(bk.attach(names["model"], names["optimizer"], bk.algorithms.bytegrad()))
        if "prometheus_client" in code:
            stack.enter_context(served())
        exec(compile(code, "document", "exec"), names)
    if "sign_sgd" in names:
        with bk.attach(names["model"], names["optimizer"], names["sign_sgd"]):
            train(names)
        assert all(p.grad.abs().eq(1).logical_or(p.grad.eq(0)).all() for p in names["model"].parameters())
    after = [p.detach() for p in names["model"].parameters()]
    trained = any(not torch.equal(p, q) for p, q in zip(after, before, strict=True))
    return trained, [p.tolist() for p in after]


def train(names):
    """Take the steps of some batches."""
    for x, y in names["batches"]:
        names["loss"](names["model"](x), y).backward()
        names["optimizer"].step()


@contextlib.contextmanager
def served():
    """Let Prometheus's client serve at a port of the system's choice, and read there what it serves in the end."""
    import prometheus_client

    began, start = [], prometheus_client.start_http_server
    with mock.patch("prometheus_client.start_http_server", lambda port, addr: began.append(start(0, addr))):
        yield
    [(server, thread)] = began
    with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/metrics") as answer:
        assert re.search(r'^baguakit\{figure="bytes_per_step"\} [1-9]', answer.read().decode(), re.MULTILINE)
    server.shutdown()
    server.server_close()
    thread.join()


def cases():
    """Every block, with its page and number."""
    for page in PAGES:
        for i, code in enumerate([] if tests_of(page) else blocks_of(page)):
            yield pytest.param(code, id=f"{page.stem}-{i}", marks=[pytest.mark.slow] * (SLOW in code))


def tests_of(page):
    """Return the files of other tests that run the code of a page."""
    if page.parent.name == "trainers":
        return sorted((ROOT / "tests" / "trainers").glob("*.py"))
    return [ROOT / name for name in ELSEWHERE.findall(page.read_text())]


def test_pages_whose_code_runs_elsewhere_are_named_there():
    named = {page: files for page in PAGES if blocks_of(page) and (files := tests_of(page))}
    assert len(named) > 3
    for page, files in named.items():
        assert any(re.search(rf"\b{page.stem}\b", file.read_text()) for file in files), page


@pytest.mark.parametrize("code", list(cases()))
def test_code_runs(code, tmp_path, capfd):
    if "bk.Ranks" in code:
        exec(compile(code, "document", "exec"), {"__name__": "__main__"})
        assert "[tensor([0.5000, 0.5000, 0.5000]), tensor([0.5000, 0.5000, 0.5000])]" in capfd.readouterr().out
        return
    for module in ("prometheus_client", "tensorboard", "wandb"):
        if module in code and not find_spec(module):
            pytest.skip(f"{module} is not installed")

    def run():
        before = os.getcwd()
        os.chdir(tmp_path)  # loggers write there
        try:
            return runs(code)
        finally:
            os.chdir(before)

    (trained, one), (_, other) = ranks(2, run)
    assert one == other
    if "optimizer.step()" in code:
        assert trained
    if "SummaryWriter" in code:
        assert list((tmp_path / "runs").iterdir())
    if "wandb" in code:
        assert list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))


def test_predictions_are_the_models():
    for page, tables in situations.tables().items():
        text = (ROOT / "docs" / "situations" / f"{page}.md").read_text()
        assert all(table in text for table in tables), (
            f"python -m bench.scaling.situations has new tables for {page}.md"
        )


def milliseconds(task, names, **cells):
    """Return the rows of a table of measured steps: for each algorithm a step in each of some cells."""
    steps = {}
    for line in (ROOT / "bench" / "results" / "network-steps.jsonl").read_text().splitlines():
        found = json.loads(line)
        cell = found["cell"]
        if "result" in found and (cell["task"], cell["hosts"]) == (task, 4):
            steps[cell["algorithm"], cell["rate"], cell["straggler"]] = found["result"]["step"]
    places = list(itertools.product(cells.get("rates", ["500mbit"]), cells.get("stragglers", [False])))
    for shown, name in names.items():
        values = " | ".join(f"{1e3 * steps[(name, *place)]:.0f}" for place in places)
        yield f"| {shown} | {values} |"


def test_measured_steps_are_those_of_the_results():
    names = {"DDP": "DDP", "`bytegrad()`": "bytegrad"}
    few = {**names, "`power_sgd()`": "power_sgd", "`local_sgd(8)`": "local_sgd"}
    text = (ROOT / "docs" / "situations" / "ethernet.md").read_text()
    for row in milliseconds("wide", few, rates=["100mbit", "500mbit", "1gbit", "unshaped"]):
        assert row in text
    text = (ROOT / "docs" / "situations" / "stragglers.md").read_text()
    more = {"`decentralized()`": "decentralized, AWC"}
    more["`async_model_average(interval=0.5)`"] = "async_model_average, 0.5 s"
    for row in milliseconds("deep", names | more, stragglers=[False, True]):
        assert row in text


def test_links_and_names():
    """Links lead to files, and everything in backticks that begins with `bk.` exists."""
    for page in PAGES:
        if page.parent.name == "api":  # made into pages by Sphinx, whose links scripts/docs checks
            continue
        text = page.read_text()
        for target in re.findall(r"\]\((?!http)([^)#]+)\)", text):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
        for name in set(re.findall(r"`bk((?:\.\w+)+)", text)):
            thing = bk
            for part in name[1:].split("."):
                if part == "lightning":  # asked for only where it is installed
                    break
                assert hasattr(thing, part), f"{page.name}: bk{name}"
                thing = getattr(thing, part)


def test_expressions_of_the_table_are_what_prints():
    """The column \"is\" of the table of algorithms begins with the repr of what the column before it calls."""
    page = (ROOT / "docs" / "algorithms.md").read_text()
    rows = re.findall(r"^\| `((?:bk\.hierarchical|\w+)\(.*?\))` \| (.*?) \|", page, re.MULTILINE)
    known = vars(bk.algorithms) | vars(bk.stages) | {"bk": bk, "graph": bk.topology.Exponential()}
    seen = 0
    for call, expression in rows:
        if call.split("(")[0] not in bk.algorithms.__all__ and not call.startswith("bk.hierarchical"):
            continue
        made = eval(call, known)
        stated = re.findall(r"`([^`]+)`", expression)
        if "fragments" in call or not stated:
            continue
        assert [
            repr(rule).replace("Exponential()", "graph") if "graph" in call else repr(rule) for rule in made.rules
        ] == stated
        seen += 1
    assert seen >= 15
