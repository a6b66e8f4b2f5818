"""Every link of the built pages leads somewhere, and nothing is fetched: `python docs/check_links.py docs/_build/html`.

Links to other sites are listed, not followed: this runs offline.
"""

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADED = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src"}


class Page(HTMLParser):
    """The links of a page, the files it loads, and its anchors."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.anchors = {"", "top"}
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value for name, value in attrs if value}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        elif tag in LOADED and LOADED[tag] in values:
            self.loads.append(values[LOADED[tag]])


def faults(root: Path) -> tuple[list[str], set[str]]:
    """Return a sentence for each error, and the links to other sites."""
    pages = {path.resolve(): Page(path) for path in sorted(root.rglob("*.html")) if "_static" not in path.parts}
    wrong, outside = [], set()
    for path, page in pages.items():
        # Listings of source lead back by the first public name of their file, which the others need not share.
        listing = "_modules" in path.parts
        for target in {*page.links, *page.loads}:
            parts = urlsplit(target)
            where = path.relative_to(root.resolve())
            if parts.scheme in ("http", "https"):
                outside.add(target)
                if target in page.loads:
                    wrong.append(f"{where} loads {target}, and so cannot be read offline")
            elif not parts.scheme:
                file = (path.parent / unquote(parts.path)).resolve() if parts.path else path
                file = file / "index.html" if file.is_dir() else file
                if not file.exists():
                    wrong.append(f"{where} leads to {target}, which is not there")
                elif file in pages and not listing and unquote(parts.fragment) not in pages[file].anchors:
                    wrong.append(f"{where} leads to {target}, and the page has no such place")
    return wrong, outside


if __name__ == "__main__":
    wrong, outside = faults(Path(sys.argv[1]))
    print("\n".join(wrong) or f"every link inside holds; {len(outside)} lead to other sites")
    sys.exit(bool(wrong))
