"""The built pages show no markup that was meant to be parsed: `python docs/check_markup.py docs/_build/html`.

Code, equations and listings of source are not looked at.
"""

import re
import sys
from html.parser import HTMLParser
from pathlib import Path

UNREAD = {"code", "kbd", "pre", "script", "style", "svg", "title"}
BREAKS = {"dd", "div", "dt", "h1", "h2", "h3", "h4", "li", "p", "section", "td", "th", "tr"}
RAW = {
    "a row of a table": re.compile(r"\|\s?:?-{2,}|\|(?:[^|\n]*\s\|){2}"),
    "a backtick": re.compile(r"`"),
    "asterisks": re.compile(r"\*\*|(?<![\w*])\*\w[^*\n]*\w\*(?!\w)"),
    "a field": re.compile(r"(?:^|\s):(?:param|type|returns?|rtype|raises?|ivar|vartype|class|func|meth|ref)\b[^:\n]*:"),
    "a directive": re.compile(r"(?:^|\s)(?:\.\. [\w-]+::|:::)"),
    "a link": re.compile(r"\]\([^)\s]+\)"),
    "a heading": re.compile(r"^\s*#{1,6} "),
    "a mark of the page": re.compile(r"^\s*\{\w+\}\s*$"),
}


class Text(HTMLParser):
    """The paragraphs of a page, as a reader sees them, without code and equations."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.paragraphs = [""]
        self.unread: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        classes = (dict(attrs).get("class") or "").split()
        if self.unread:
            self.unread += [tag] * (tag == self.unread[0])
        elif tag in UNREAD or "math" in classes or "sig" in classes:
            self.unread.append(tag)
        elif tag in BREAKS:
            self.paragraphs.append("")

    def handle_endtag(self, tag: str) -> None:
        if self.unread and tag == self.unread[0]:
            self.unread.pop()
        elif not self.unread and tag in BREAKS:
            self.paragraphs.append("")

    def handle_data(self, data: str) -> None:
        if not self.unread:
            self.paragraphs[-1] += data


def faults(html: str) -> list[str]:
    """Return a description of each piece of raw markup in a page."""
    texts = [" ".join(text.split()) for text in Text(html).paragraphs]
    return [f"{name}: {text[:100]}" for text in texts for name, raw in RAW.items() if raw.search(text)]


def main(root: Path) -> list[str]:
    """Return a sentence for each piece of raw markup in the pages of a folder."""
    unread = {"_static", "_modules", "genindex.html", "search.html"}
    pages = [path for path in sorted(root.rglob("*.html")) if not unread & set(path.parts)]
    return [f"{path.relative_to(root)} shows {fault}" for path in pages for fault in faults(path.read_text())]


if __name__ == "__main__":
    wrong = main(Path(sys.argv[1]))
    print("\n".join(wrong) or "no page shows raw markup")
    sys.exit(bool(wrong))
