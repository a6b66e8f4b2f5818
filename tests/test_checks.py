"""`bk.testing`: it finds planted mistakes, and none in parts that have none."""

import re
import subprocess
import sys

import pytest
from commands import ROOT, blocks_of
from faulty import FAULTLESS, FAULTY

import baguakit as bk
from baguakit.rules import Rule
from baguakit.testing import CheckFailed, checks_of


def slow(part, *_):
    """Return the marks of a case: algorithms take seconds, and their own checks are in test_parts.py."""
    return [pytest.mark.slow] if isinstance(part, Rule) else []


@pytest.mark.parametrize(
    "part, name, words",
    [pytest.param(*each, marks=slow(*each), id=f"{each[0]!r}-{each[1]}-{i}") for i, each in enumerate(FAULTY)],
)
def test_a_mistake_is_found_by_its_check_in_a_sentence(part, name, words):
    (check,) = (each for each in checks_of(part) if each.name == name)
    with pytest.raises(CheckFailed) as caught:
        check(part)
    said = str(caught.value)
    assert said.startswith(f"{part!r} fails the check {name}: {check.promise}, but ") and words in said, said


@bk.testing.parametrize_with_checks(FAULTLESS, slow)
def test_no_false_alarm(part, check):
    check(part)


@pytest.mark.slow
@pytest.mark.timeout(600)  # a new process compiles and trains
def test_the_page_is_followed(tmp_path):
    """The check of docs/own_algorithm.md passes its example, and has the page's sentence for the mistake it names."""
    page = ROOT / "docs" / "own_algorithm.md"
    code, command = blocks_of(page)[0], re.search(r'^python -c "(.*)"$', page.read_text(), re.MULTILINE)[1]
    memory = code.replace('state["m"].lerp_', 'self.held.setdefault("m", state["m"].clone()).lerp_').replace(
        "    elementwise", "    held: ClassVar = {}\n    elementwise"
    )
    for source, words in ((code, ""), (memory, "OneBitMomentum(compressor=Sign()) fails the check determinism")):
        (tmp_path / "mine.py").write_text(source)
        found = subprocess.run([sys.executable, "-c", command], cwd=tmp_path, capture_output=True, text=True)
        said = found.stderr.splitlines()[-1] if words else ""
        assert words in said and bool(words) == bool(found.returncode), found.stderr
        if words:
            shown = " ".join(page.read_text().split())
            assert re.sub(r"by up to \S+", "", said.partition(": ")[2]) in re.sub(r"by up to \S+", "", shown)
