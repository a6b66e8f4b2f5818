"""The front door holds: every block of code in the README and the guide runs, and whatever it names is there."""

import re

import pytest
from documents import ROOT, blocks, runs
from pool import ranks

import baguakit as bk

README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", *(ROOT / "docs" / name for name in ("guide.md", "own_algorithm.md"))]
PYTHON = [pytest.param(code, id=f"{page.stem}-{i}") for page in PAGES for i, code in enumerate(blocks(page))]


@pytest.mark.parametrize("code", PYTHON)
def test_python_blocks(code, capfd):
    if "bk.Ranks" in code:
        exec(compile(code, "document", "exec"), {"__name__": "__main__"})
        assert "[tensor([0.5000, 0.5000, 0.5000]), tensor([0.5000, 0.5000, 0.5000])]" in capfd.readouterr().out
        return
    (trained, one), (_, other) = ranks(2, runs, code)
    assert one == other
    if "optimizer.step()" in code:
        assert trained


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
        rules = made if isinstance(made, tuple) else (made,)
        stated = re.findall(r"`([^`]+)`", expression)
        if "fragments" in call or not stated:
            continue
        assert [
            repr(rule).replace("Exponential()", "graph") if "graph" in call else repr(rule) for rule in rules
        ] == stated
        seen += 1
    assert seen >= 15
