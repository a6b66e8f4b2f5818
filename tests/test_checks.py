"""`bk.testing`: it finds planted mistakes, and none in parts that have none."""

import pytest
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
