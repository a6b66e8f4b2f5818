"""The checks of the documentation: raw markup is noticed, and every paper that the package cites is in the index."""

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "docs"))

import check_markup  # noqa: E402
import papers  # noqa: E402

RAW = [
    "| a | b | c |",
    "|---|---|",
    "a `name",
    "a **word**",
    "a *word* of these",
    ":param x: a tensor",
    ".. attribute:: x",
    "[page](page.md)",
    "## Heading",
    "{papers}",
]


@pytest.mark.parametrize("text", RAW)
def test_raw_markup_is_found_in_a_paragraph_and_not_in_code(text):
    assert len(check_markup.faults(f"<p>before</p><p>{text}</p>")) == 1
    assert check_markup.faults(f"<p>before <code>{text}</code></p><pre>{text}</pre>") == []


@pytest.mark.parametrize(
    "text", ["|x| + |y|", "‖x‖ | y", "2 * 3 * 4", "see: https://a.b", "x* and y*", "ratio 3:4", "#1"]
)
def test_what_only_resembles_markup_is_let_through(text):
    assert check_markup.faults(f"<p>{text}</p>") == []


def test_the_index_has_every_paper_that_a_docstring_cites_with_its_names():
    cited = {number for path in (ROOT / "baguakit").rglob("*.py") for number in papers.CITED.findall(path.read_text())}
    rows = [line.split(" | ") for line in papers.papers().splitlines()[2:]]
    assert sorted(number for row in rows for number in re.findall(r"\[(.*)\]", row[2])) == sorted(cited)
    assert all("<baguakit." in row[3] for row in rows)


def test_numbers_of_papers_become_links_outside_of_code():
    lines = ["As in arXiv:1705.09056 and doi:10.1109/TIT.2006.874516.", "    arXiv:1705.09056"]
    assert papers.linked(lines) == [
        "As in [arXiv:1705.09056](https://arxiv.org/abs/1705.09056) and "
        "[doi:10.1109/TIT.2006.874516](https://doi.org/10.1109/TIT.2006.874516).",
        lines[1],
    ]
