"""The outputs in docs/command.md are what the commands print, but for what they measure."""

import re
import sys

import pytest
from commands import ROOT

sys.path.append(str(ROOT / "docs"))
import samples

# Fewer steps print the same lines, with other numbers in them.
FEWER = {"demo": ("--steps=6",), "probe": ("--seconds=0.02",), "plan": ("--seconds=0.02",)}
SHOWN = {"doctor", "bench.speed", *FEWER}
EVERY = [each for each in samples.samples(samples.PAGE.read_text()) if SHOWN & {*each.command.split()}]


def said(command, text):
    """Return the lines of an output without what is measured: numbers, and an order that follows from them."""
    if command == "baguakit doctor":  # what it looks at; what it finds is the machine's
        return re.findall(r"^(\S.{13}) (?:ok|note|missing|wrong) ", text, re.MULTILINE)
    if " plan " in command:  # its rows are sorted by time, and the pick is its own
        return sorted(re.findall(r"^ (?:→| ) (\S+(?: \S+)*) +[\d.]+ ms ", text, re.MULTILINE))
    return [re.sub(r"[\s\d.,–-]+", " ", line).strip() for line in text.splitlines()]


def test_the_page_has_samples():
    assert [re.findall(r"\b(?:doctor|speed|demo|probe|plan)\b", each.command) for each in EVERY] == [
        ["doctor"],
        ["speed"],
        ["demo"],
        ["demo"],
        ["probe"],
        ["plan"],
    ]
    assert all(said(each.command, each.output) for each in EVERY)


@pytest.mark.slow  # ranks import torch, and measure
@pytest.mark.timeout(600)
@pytest.mark.parametrize("sample", EVERY, ids=lambda sample: sample.command)
def test_a_sample_is_what_the_command_prints(sample):
    more = [word for name, words in FEWER.items() if name in sample.command.split() for word in words]
    assert said(sample.command, sample.output) == said(sample.command, samples.printed(sample.command, *more))


def test_a_table_is_cut_to_the_rows_of_the_page():
    text = (
        "before\n\nEach operation\n\nname\n---\nFloat8()  1\nUInt4()  2\nSign()  3\nTernary()  4\nmixing  5\n\ncopies\n"
    )
    shown = "Each operation\n\nname\n---\n…\nUInt4()  2\n…\nmixing  5\n\ncopies\n"
    assert samples.cut("python -m bench.speed", text) == shown and samples.cut("baguakit demo", text) == text
