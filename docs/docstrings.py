"""Docstrings are Markdown: Napoleon turns their sections into lists, and MyST parses the rest."""

import re
from typing import Any

from docutils import nodes
from docutils.utils import new_document
from myst_parser.parsers.sphinx_ import MystParser
from papers import linked
from sphinx.application import Sphinx
from sphinx.ext.napoleon import Config, GoogleDocstring
from sphinx.util.docutils import SphinxDirective

# A line of Args or Attributes may name several, which Sphinx's own fields for them cannot.
SECTIONS = Config(
    napoleon_use_param=False, napoleon_use_rtype=False, napoleon_custom_sections=[("Attributes", "params_style")]
)

RANGED = re.compile(r"[~.\w]*Annotated\[([~.\w]+), [~.\w]*Range\([^()]*\)\]")


class Markdown(SphinxDirective):
    """Markdown inside of reStructuredText, which is what autodoc writes."""

    has_content = True

    def run(self) -> list[nodes.Node]:
        document = new_document(self.get_source_info()[0], self.state.document.settings)
        document.reporter = self.state.document.reporter
        MystParser().parse("\n".join(self.content), document)
        return document.children


def _process(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    # Napoleon takes what stands before a colon in a property's first line for its type: all are classes to it.
    fields = GoogleDocstring(linked(lines), SECTIONS, what="class", obj=obj).lines()
    lines[:] = [".. markdown::", "", *(f"   {line}" for line in fields)]


def _plain(app: Sphinx, what: str, name: str, obj: Any, options: Any, signature: str | None, result: str | None) -> Any:
    """Show the type of a number without its range, which the docstring says."""
    shown = [part and RANGED.sub(r"\1", part) for part in (signature, result)]
    return tuple(shown)


def setup(app: Sphinx) -> dict[str, Any]:
    """Parse each docstring that autodoc finds."""
    app.add_directive("markdown", Markdown)
    app.connect("autodoc-process-docstring", _process)
    app.connect("autodoc-process-signature", _plain)
    return {"parallel_read_safe": True}
