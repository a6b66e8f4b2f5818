"""Every operation that has a kernel is measured beside a copy, and wrong results are said."""

import dataclasses

import torch

from bench import speed


def few(monkeypatch):
    """Operations are measured for a moment."""
    monkeypatch.setattr(speed, "TIMED", dict.fromkeys(speed.TIMED, 1 << 12))
    monkeypatch.setattr(speed, "CHECKED", 1000)
    monkeypatch.setattr(speed, "SECONDS", 0.0)


def test_bench_measures_every_operation(capsys, monkeypatch):
    few(monkeypatch)
    assert speed.bench()
    said = capsys.readouterr().out
    for each in speed.operations():
        assert f"\n{each.family}, {each.name} " in said
    assert "wrong" not in said and max(map(len, said.splitlines())) <= 80


def test_a_kernel_that_differs_from_its_definition_is_said_and_has_no_speed(capsys, monkeypatch):
    few(monkeypatch)
    right, *_ = speed.operations()
    made = []  # of each call another result
    wrong = dataclasses.replace(
        right, name="odd", ready=lambda n, device: lambda: [torch.tensor(made.append(0) or len(made))]
    )
    monkeypatch.setattr(speed, "operations", lambda: [right, wrong])
    assert not speed.bench()
    said = capsys.readouterr().out
    (row,) = (line for line in said.splitlines() if "odd" in line)
    assert row.endswith(" wrong") and said.count(" wrong\n") == 1
    assert "A result that is wrong differs from its definition" in said
