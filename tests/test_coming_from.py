"""docs/coming_from.md and troubleshooting.md: what stands there exists, and every message quoted is the package's."""

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
    nobody_else_has = {"top_k", "choco", "quasi_global_momentum", "decoupled_diloco"}
    missing = {*bk.algorithms.__all__} - named - nobody_else_has
    assert not missing, f"name {missing} in docs/coming_from.md, or here if no other package has it"


ROOT = Path(__file__).parents[1]
TROUBLES = (ROOT / "docs" / "troubleshooting.md").read_text()


def template(node):
    """Return a string as the source has it, "…" standing for what is put in; None for other nodes."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value.replace("%s", "…")
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        parts = template(node.left), template(node.right)
        return "".join(part or "…" for part in parts) if any(parts) else None
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "message":
        name, wanted = (template(argument) or "…" for argument in node.args[:2])
        return f"{name} is {wanted}, not …"
    return None


def messages():
    """Return every string of the package's source that is no docstring."""
    found = set()
    for path in (ROOT / "baguakit").rglob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        docstrings = {node.value for node in nodes if isinstance(node, ast.Expr)}
        found |= {template(node) for node in nodes if node not in docstrings} - {None}
    return found


def test_the_package_says_what_is_quoted():
    quoted = [" ".join(text.split()) for text in re.findall(r"^```text\n(.*?)^```$", TROUBLES, re.M | re.S)]
    said = messages()
    assert len(quoted) > 30
    assert [quote for quote in quoted if not any(quote in each for each in said)] == []


def test_every_section_quotes_and_says_why_and_what_to_do():
    for section in re.split(r"^### ", TROUBLES, flags=re.M)[1:]:
        assert section.count("```text") == 1 and "**Cause.**" in section and "**Remedy.**" in section, section
