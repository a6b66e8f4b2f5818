"""docs/troubleshooting.md: every message that it quotes is one of the package's, so that the page cannot go stale."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()


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
    quoted = [" ".join(text.split()) for text in re.findall(r"^```text\n(.*?)^```$", PAGE, re.M | re.S)]
    said = messages()
    assert len(quoted) > 30
    assert [quote for quote in quoted if not any(quote in each for each in said)] == []


def test_every_section_quotes_and_says_why_and_what_to_do():
    for section in re.split(r"^### ", PAGE, flags=re.M)[1:]:
        assert section.count("```text") == 1 and "**Cause.**" in section and "**Remedy.**" in section, section
