"""The report says when the first bucket is launched, of forward and backward."""

from types import SimpleNamespace

import pytest
import torch

from baguakit.flights.clock import BACKWARD, Logbook, StepRecord
from baguakit.report.report import Report, Row, launched_after


def runner(*launched, buckets=2, what="grad", delay=0):
    """Return what a report reads of a runner whose first bucket was launched in each step at these seconds."""

    def flight(step, seconds):
        return SimpleNamespace(step=step, flight=SimpleNamespace(over=lambda: True, launched=seconds))

    rule = SimpleNamespace(what=what, delay=delay)
    ledgers = [SimpleNamespace(flights=[flight(*x) for x in enumerate(launched)])]
    return SimpleNamespace(rule=rule, buckets=[None] * buckets, ledgers=ledgers)


def log(*records):
    """Return a log of steps that begin, end their backward passes, and end at these seconds."""
    held = Logbook(torch.device("cpu"), on=True)
    for step, (begin, *ends, end, accumulated) in enumerate(records):
        parts = tuple((BACKWARD, begin, each) for each in ends)
        held.steps.append(StepRecord(step, begin, end, parts, accumulated))
    return held


def test_it_is_the_mean_over_steps_of_one_backward():
    two = log((0.0, 8.0, 9.0, False), (10.0, 18.0, 19.0, False))
    assert launched_after([runner(6.0, 12.0)], two) == (6 / 8 + 2 / 8) / 2
    assert launched_after([runner(6.0, 12.0, buckets=1), runner(7.0, 11.0, buckets=1)], two) == (6 / 8 + 2 / 8) / 2


@pytest.mark.parametrize(
    "runners, steps",
    [
        ([runner(6.0, buckets=1)], [(0.0, 8.0, 9.0, False)]),  # one bucket cannot overlap
        ([runner(6.0, what="data")], [(0.0, 8.0, 9.0, False)]),
        ([runner(6.0, delay=1)], [(0.0, 8.0, 9.0, False)]),
        ([runner(6.0)], [(0.0, 8.0, 9.0, True)]),  # accumulated under no_sync before
        ([runner(6.0)], [(0.0, 4.0, 8.0, 9.0, False)]),  # two backward passes
        ([runner(6.0)], []),
    ],
)
def test_else_it_is_not_known(runners, steps):
    assert launched_after(runners, log(*steps)) is None


def test_a_report_says_that_little_overlaps():
    row = Row("Mean", 0, 0, 500_000, "float32", 1, 1, {"flat": 2e6}, ())
    late, early = (str(Report(1, 2, 1, (row,), None, share)).splitlines() for share in (0.9, 0.2))
    assert late[1].startswith("the first bucket is launched when 90% of forward and backward are over")
    assert [late[0], *late[2:]] == early
