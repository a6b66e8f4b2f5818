"""The index of the documentation has every paper that the package cites."""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "docs"))

import papers  # noqa: E402


def test_the_index_has_every_paper_that_a_docstring_cites_with_its_names():
    cited = {number for path in (ROOT / "baguakit").rglob("*.py") for number in papers.CITED.findall(path.read_text())}
    rows = [line.split(" | ") for line in papers.papers().splitlines()[2:]]
    assert sorted(number for row in rows for number in re.findall(r"\[(.*)\]", row[2])) == sorted(cited)
    assert all("<baguakit." in row[3] for row in rows)
