"""The settings of the documentation: `make docs`. Everything is read offline: no CDN, no foreign inventories."""

import shutil
import sys
from importlib.metadata import version as installed
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

# Notebooks belong to no documentation, and Sphinx follows no links out of its folder: it is given copies.
shutil.rmtree(HERE / "notebooks", ignore_errors=True)
(HERE / "notebooks").mkdir()
for path in sorted((HERE.parent / "notebooks").glob("*.ipynb")):
    shutil.copy(path, HERE / "notebooks")

project = "baguakit"
author = copyright = "the baguakit authors"
version = release = installed("baguakit")

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx-mathjax-offline",
    "myst_nb",
    "docstrings",  # beside this file: docstrings as Markdown
    "pages",  # likewise: README and others as they stand
]
html_theme = "furo"
html_title = f"baguakit {release}"
html_theme_options = {"navigation_with_keys": True}
html_show_sphinx = False
html_static_path = ["static"]
html_css_files = ["wide.css"]
html_js_files = [("tables.js", {"defer": "defer"})]
exclude_patterns = ["_build", "notebooks/.ipynb_checkpoints"]

# Notebooks are shown with the outputs they were committed with: tests run them.
nb_execution_mode = "off"
nb_merge_streams = True
myst_enable_extensions = ["dollarmath", "colon_fence", "fieldlist"]
myst_heading_anchors = 3
copybutton_exclude = ".linenos, .gp, .go"

default_role = "code"  # single backticks around autodoc's directives, as in Markdown
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_default_options = {"members": True, "special-members": "__call__", "exclude-members": "operators"}
python_maximum_signature_line_length = 88
add_module_names = False
toc_object_entries_show_parents = "hide"

# Every name that a page mentions has to be found, but for those that live elsewhere and what only signatures know.
nitpicky = True
ELSEWHERE = r"(torch|numpy|np|nn|dist|collections|matplotlib|networkx|lightning|datetime|os|pathlib|contextlib|abc)\b.*"
INSIDE = r"baguakit\.(comm\.flows\.Flows|runtime\.agreement\.Setup"
INSIDE += r"|report\.timeline\.\w*Span|attach\.engine\.Engine|kernels\.blockwise\.format\.Format"
INSIDE += r"|ranks\.(live|serving)\.T|tune\.tuner\.Trial|topology\.chosen\.Choice)"
nitpick_ignore_regex = [
    ("py:.*", ELSEWHERE),
    ("py:.*", INSIDE),
    ("py:.*", r"Figure|Args|T|Every|dict\[str|tuple\[~typing\.Any"),
]
