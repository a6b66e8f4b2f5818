"""Pages as they stand in the repository, whose links are made to hold here, and parts of pages that are generated."""

import os
import re
from pathlib import Path
from typing import Any

from papers import papers

HERE = Path(__file__).parent
ROOT = HERE.parent
SHOWN = {
    "readme": "README.md",
    "benchmarks": "bench/README.md",
    "networks": "bench/network/README.md",
    "scaling": "bench/scaling/README.md",
    "many": "bench/scaling/many/README.md",
    "accuracy": "bench/accuracy/README.md",
    "frontier": "bench/frontier/README.md",
    "replaced": "bench/elastic/README.md",
    "control": "bench/control/README.md",
    "exchange": "bench/exchange/README.md",
    "changelog": "CHANGELOG.md",
    "contributing": "CONTRIBUTING.md",
    "security": "SECURITY.md",
}
LINK = re.compile(r"(!?\[[^\]]*\])\(([^)#\s]+)\)")


def mended(name: str, text: str) -> str:
    """Return the text of a page: links to shown pages lead to them, and all others to the files in the repository."""
    file = ROOT / SHOWN.get(name, f"docs/{name}.md")
    folder = HERE if name in SHOWN else file.parent
    pages = {(ROOT / path).resolve(): HERE / f"{page}.md" for page, path in SHOWN.items()}
    pages |= {path: HERE / "notebooks" / path.name for path in (ROOT / "notebooks").glob("*.ipynb")}

    def link(found: re.Match[str]) -> str:
        if "://" in found[2]:
            return found[0]
        target = (file.parent / found[2]).resolve()
        if not target.exists():
            raise FileNotFoundError(f"{file.relative_to(ROOT)} links to {found[2]}, which is not there")
        if target.is_dir():
            return found[1][1:-1]  # words alone: there is no page of a folder
        return f"{found[1]}({os.path.relpath(pages.get(target, target), folder)})"

    return LINK.sub(link, text)


def about() -> str:
    """Return the beginning of README.md, as far as its second heading."""
    return mended("readme", (ROOT / SHOWN["readme"]).read_text().split("\n## ")[0].removeprefix("# baguakit"))


def equations() -> str:
    """Return a section for each module of algorithms, with its docstring."""
    import baguakit as bk

    modules: dict[str, list[str]] = {}
    for name in bk.algorithms.__all__:
        modules.setdefault(getattr(bk.algorithms, name).__module__, []).append(name)
    return "\n\n".join(
        f"### {', '.join(names)}\n\n```{{eval-rst}}\n.. automodule:: {module}\n   :no-members:\n   :noindex:\n```"
        for module, names in modules.items()
    )


def classes() -> str:
    """Return a line for each exported compressor, their base first."""
    import baguakit as bk

    names = sorted(bk.compressors.__all__, key=lambda name: (name != "Compressor", name))
    return "\n".join(f".. autoclass:: {name}" for name in names)


MADE = {"{about}": about, "{equations}": equations, "{classes}": classes, "{papers}": papers}


def _read(app: Any, name: str, source: list[str]) -> None:
    if name in SHOWN:
        source[0] = (ROOT / SHOWN[name]).read_text()
        app.env.note_dependency(str(ROOT / SHOWN[name]))
    if not name.startswith("notebooks/"):
        source[0] = mended(name, source[0])
    for mark, text in MADE.items():
        if mark in source[0] and name not in SHOWN:
            source[0] = source[0].replace(mark, text())


def setup(app: Any) -> dict[str, Any]:
    """Put the text in the place of the page's own."""
    app.connect("source-read", _read)
    return {"parallel_read_safe": True}
