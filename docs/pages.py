"""Pages of the repository that are shown as they stand: their links are made to hold from here."""

import os
import re
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent
SHOWN = {
    "readme": "README.md",
    "benchmarks": "bench/README.md",
    "networks": "bench/network/README.md",
    "scaling": "bench/scaling/README.md",
    "changelog": "CHANGELOG.md",
    "contributing": "CONTRIBUTING.md",
}
LINK = re.compile(r"(!?\[[^\]]*\])\(([^)#\s]+)\)")


def shown(name: str) -> str:
    """The text of a page; links to other shown pages lead to them, and all others to the files in the repository."""
    file = ROOT / SHOWN[name]
    pages = {(ROOT / path).resolve(): page for page, path in SHOWN.items()}

    def mended(link: re.Match[str]) -> str:
        if "://" in link[2]:
            return link[0]
        target = (file.parent / link[2]).resolve()
        if not target.exists():
            raise FileNotFoundError(f"{SHOWN[name]} links to {link[2]}, which is not there")
        if target.is_dir():
            return link[1][1:-1]  # words alone: there is no page of a folder
        if HERE in target.parents and target.suffix == ".md":
            return f"{link[1]}({target.relative_to(HERE)})"
        return f"{link[1]}({pages[target]}.md)" if target in pages else f"{link[1]}({os.path.relpath(target, HERE)})"

    return LINK.sub(mended, file.read_text())


def _read(app: Any, name: str, source: list[str]) -> None:
    if name in SHOWN:
        source[0] = shown(name)
        app.env.note_dependency(str(ROOT / SHOWN[name]))


def setup(app: Any) -> dict[str, Any]:
    """Put the text in the place of the page's own."""
    app.connect("source-read", _read)
    return {"parallel_read_safe": True}
