"""docs/coming_from.md: every call on its right-hand side exists and takes those arguments, and its code runs."""

import ast
import inspect
import re
from pathlib import Path

import pytest
from pool import ranks

import baguakit as bk
from baguakit.attach import Attachment

PAGE = (Path(__file__).parents[1] / "docs" / "coming_from.md").read_text()
ROWS = [line.split("|")[1:-1] for line in PAGE.splitlines() if line.startswith("| ") and not line.startswith("|--")]
OURS = {"bk": bk, "att": Attachment, "comm": bk.Comm}


def calls():
    """Every piece of code on the right that begins with a name of ours."""
    for left, right in ROWS:
        for code in re.findall(r"`([^`]+)`", right):
            if re.match(r"(bk|att|comm)\b", code):
                yield pytest.param(code, id=f"{left.strip()[:40]}: {code[:60]}")


def root(node):
    """The name with which a chain of attributes and calls begins."""
    while not isinstance(node, ast.Name):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id


def resolved(node):
    """Return the object of a chain of attributes, or raise an AttributeError."""
    if isinstance(node, ast.Name):
        return OURS[node.id]
    if ast.unparse(node).startswith("bk.interop.lightning"):
        pytest.importorskip("lightning")
    return getattr(resolved(node.value), node.attr)


@pytest.mark.parametrize("code", list(calls()))
def test_what_is_on_the_right_exists(code):
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Call) and root(node) in OURS:
            called = resolved(node.func)
            itself = [None] * (inspect.isfunction(called) and root(node) in ("att", "comm"))
            inspect.signature(called).bind(*itself, *node.args, **{k.arg: k.value for k in node.keywords})
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in OURS:
            resolved(node)


def test_every_row_has_two_cells_and_says_something():
    assert len(ROWS) > 100
    assert all(len(row) == 2 and all(cell.strip() for cell in row) for row in ROWS)


@pytest.mark.parametrize("code", re.findall(r"```python\n(.*?)```", PAGE, re.S))
def test_its_code_runs(code):
    def run():
        exec(compile(code, "coming_from.md", "exec"), {})
        return True

    assert ranks(2, run) == [True, True]


def test_every_algorithm_is_named():
    """Every name of `bk.algorithms` and of `bk.topology` that somebody comes for can be found."""
    named = set(re.findall(r"bk\.algorithms\.(\w+)", PAGE))
    nobody_else_has = {"top_k", "choco", "quasi_global_momentum"}
    assert {*bk.algorithms.__all__} - named <= nobody_else_has
