"""Tables and paragraphs are plain text, never wider than 80 columns."""

from baguakit.command.screen import Table, say

COLUMNS = {"name": "<10", "a\nnumber": ">8", "words": "<40"}
LONG = "words " * 20


def rows(capsys):
    Table(COLUMNS).row("one", "1", LONG)
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


def test_paragraphs_are_wrapped_and_code_is_not(capsys):
    say("word " * 30 + "\n    " + "code" * 30)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and len(lines[0]) <= 80 and lines[2] == "    " + "code" * 30
