"""The index of papers, from the docstrings that cite them."""

import re
from collections import defaultdict
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from types import ModuleType

import baguakit

CITED = re.compile(r"\b(arXiv:\d{4}\.\d{4,5}|doi:10\.[\w./-]*\w)")
NAME = r"[A-Z][\w-]+(?:(?:,? | and )[A-Z][\w-]+)*"
FULL = re.compile(rf'({NAME}(?: et al\.)? (?:19|20)\d\d), "([^"]+)"(?: \([^)]*\))?, {CITED.pattern}')


def address(cited: str) -> str:
    """Return the address of a paper, from `arXiv:…` or `doi:…`."""
    kind, number = cited.split(":", 1)
    return f"https://arxiv.org/abs/{number}" if kind == "arXiv" else f"https://doi.org/{number}"


def linked(lines: list[str]) -> list[str]:
    """Return the lines of a docstring with links to the papers, outside of code."""
    links = (CITED.sub(lambda cited: f"[{cited[1]}]({address(cited[1])})", line) for line in lines)
    return [line if line.startswith("    ") else link for line, link in zip(lines, links, strict=True)]


def section(doc: str, name: str) -> str:
    """Return what the docstring of a module says of one of its functions: all, unless `**name.**` begins a section."""
    first, *sections = re.split(r"^\*\*([a-z_0-9]+)\.\*\* ", doc, flags=re.MULTILINE)
    return dict(zip(sections[::2], sections[1::2], strict=True)).get(name, first)


def texts() -> dict[str, str]:
    """Return the docstring of each public function and class; an algorithm's with that of its module."""
    found: dict[int, tuple[str, str]] = {}
    for room in [import_module(f"baguakit.{m.name}") for m in iter_modules(baguakit.__path__) if m.name != "__main__"]:
        for name in sorted(getattr(room, "__all__", ())):
            value = getattr(room, name)
            if not isinstance(value, ModuleType):
                home = import_module(value.__module__) if room is baguakit.algorithms else None
                above = section(home.__doc__ or "", name) if home else ""
                paragraphs = re.split(r"\n\s*\n", f"{above}\n\n{value.__doc__ or ''}")
                text = " / ".join(" ".join(paragraph.split()) for paragraph in paragraphs)
                found.setdefault(id(value), (f"{room.__name__}.{name}", text))
    return dict(found.values())


def papers() -> str:
    """Return a table of all papers that the package cites, and of the public names that cite them."""
    names: dict[str, list[str]] = defaultdict(list)
    titles: dict[str, tuple[str, str]] = {}
    for name, text in texts().items():
        for who, title, cited in FULL.findall(text):
            titles[cited] = max(titles.get(cited, (who, "")), (who, title), key=lambda paper: len(paper[1]))
        for cited in sorted(set(CITED.findall(text))):
            names[cited].append(f"{{py:obj}}`{name.removeprefix('baguakit.')} <{name}>`")
    for path in sorted(Path(baguakit.__file__).parent.rglob("*.py")):
        if missing := set(CITED.findall(path.read_text())) - titles.keys():
            numbers = ", ".join(sorted(missing))
            raise ValueError(
                f'{path} cites {numbers}, and no public docstring does as: Author 2020, "Title", {numbers}'
            )
    rows = sorted((who, title, cited) for cited, (who, title) in titles.items())
    head = "| paper | title | number | cited by |\n|---|---|---|---|\n"
    return head + "\n".join(
        f"| {who} | {title} | [{cited}]({address(cited)}) | {', '.join(names[cited])} |" for who, title, cited in rows
    )
