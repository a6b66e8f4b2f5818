"""Tables: plain text without a terminal, drawn by rich in one, and never wider than 80 columns."""

import io
import sys

import pytest

from baguakit.command import screen
from baguakit.command.screen import Column, Table, say

COLUMNS = (Column("name", 10), Column("a\nnumber", 8, right=True), Column("words", 40))
LONG = "words " * 20


def rows(capsys, **options):
    with Table(COLUMNS, total=2, **options) as table:
        table.step("working", 1)
        table.row("one", "1", LONG, style="bold")
        table.step("done", 1)
    return capsys.readouterr().out


def test_plain_tables_align_and_wrap_the_last_column(capsys):
    lines = rows(capsys).splitlines()
    assert lines[:3] == [
        "                   a",
        "name          number  words",
        "-" * 10 + "  " + "-" * 8 + "  " + "-" * 40,
    ]
    assert lines[3].startswith("one                1  words words")
    assert " ".join(line[22:].strip() for line in lines[3:]) == LONG.strip()


def test_a_silent_table_shows_nothing(capsys):
    assert rows(capsys, silent=True) == ""


def test_rich_draws_the_same_cells_in_80_columns(capsys, monkeypatch):
    pytest.importorskip("rich")
    monkeypatch.setattr(screen, "rich_terminal", lambda: True)
    drawn = rows(capsys)
    assert all(word in drawn for word in ("name", "number", "one", "words words"))
    assert max(map(len, drawn.splitlines())) <= 80


def test_rich_is_used_in_terminals_only(monkeypatch):
    pytest.importorskip("rich")

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setenv("TERM", "xterm")
    assert not screen.rich_terminal()
    monkeypatch.setattr(sys, "stdout", Terminal())
    assert screen.rich_terminal()
    monkeypatch.setenv("TERM", "dumb")
    assert not screen.rich_terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert not screen.rich_terminal()


def test_paragraphs_are_wrapped_and_code_is_not(capsys):
    say("word " * 30 + "\n    " + "code" * 30)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and len(lines[0]) <= 80 and lines[2] == "    " + "code" * 30
