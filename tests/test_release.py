"""The texts of a release agree, and noxfile.py tries the versions that the package promises."""

import re
import runpy
from pathlib import Path

import pytest

import baguakit as bk

ROOT = Path(__file__).parents[1]
noxfile = pytest.importorskip("nox") and runpy.run_path(str(ROOT / "noxfile.py"))

PYPROJECT = (ROOT / "pyproject.toml").read_text()


def found(pattern, path):
    return re.findall(pattern, (ROOT / path).read_text(), re.MULTILINE)


def test_the_changelog_and_the_citation_have_this_version():
    assert found(r"^## \[(.*?)\]", "CHANGELOG.md")[0] in (bk.__version__, "Unreleased")
    assert found(r"^  version = \{(.*)\}", "README.md") == [bk.__version__]
    assert found(r"^version:", "CITATION.cff") == []  # it has none, and cannot be out of date


def test_every_python_of_the_classifiers_is_one_that_ci_tests():
    classified = re.findall(r"Python :: (3\.\d+)", PYPROJECT)
    [alone], [others] = (found(p, ".github/workflows/ci.yml") for p in (r'python-version: "(.*)"', r"python: \[(.*)\]"))
    assert sorted([alone, *re.findall(r'"(.*?)"', others)]) == classified
    assert re.findall(r'requires-python = ">=(.*)"', PYPROJECT) == re.findall(r"\d+\.\d+", classified[0])


def test_links_of_the_readme_are_absolute_on_the_index():
    """By the patterns of pyproject.toml, which hatch-fancy-pypi-readme applies; scripts/wheel looks at the result."""
    text = '[a](docs/a.md) [![b](b.png)](c) ![d](d.png) [e\nf](#e) [g](https://g) <img src="h.png"> [i](mailto:i@j)'
    for pattern, replacement in re.findall(r"^pattern = '(.*)'\nreplacement = '(.*)'", PYPROJECT, re.MULTILINE):
        text = re.sub(pattern, replacement.replace("$HFPR_VERSION", "1"), text)
    files = "https://github.com/baguakit/baguakit/blob/v1/"
    raw = "https://raw.githubusercontent.com/baguakit/baguakit/v1/"
    assert text == (
        f"[a]({files}docs/a.md) [![b]({raw}b.png)]({files}c) ![d]({raw}d.png) [e\nf](#e) [g](https://g) "
        f'<img src="{raw}h.png"> [i](mailto:i@j)'
    )


@pytest.mark.parametrize("path", [".ci/run", "CONTRIBUTING.md", "Makefile"])
def test_scripts_that_are_named_are_there(path):
    named = found(r"\bscripts/[\w-]+(?:\.py)?", path)
    assert named and not [each for each in named if not (ROOT / each).exists()]


def test_the_oldest_and_the_newest_versions_are_those_of_the_project():
    pythons = re.findall(r"Python :: (3\.\d+)", PYPROJECT)
    assert (noxfile["oldest"].python, noxfile["newest"].python) == (pythons[0], pythons[-1])
    bounds = dict(re.findall(r'^ *"(numpy|torch|triton)([\d.><=,]+)', PYPROJECT, re.MULTILINE))
    for package, bound in bounds.items():
        assert noxfile["oldest_of"](package) == package + bound.split(",")[0].replace(">=", "==")
        assert sorted(noxfile["newest_of"](package).removeprefix(package).split(",")) == sorted(bound.split(","))
    assert bounds.keys() == {"numpy", "torch", "triton"}


def test_triton_is_bounded_by_the_newest_version_that_has_run():
    """So says the table of docs/status.md, and so do the packages that name the bound."""
    rows = found(r"^\| `(?:oldest|gpu|newest)` \|.*\| 3\.(\d+)\.\d+ \| [\d.]+ \|$", "docs/status.md")
    bound = f"triton>=3.6,<3.{max(map(int, rows)) + 1}"
    assert all(bound in (ROOT / path).read_text() for path in ("pyproject.toml", "ptx/pyproject.toml"))
    assert bound in (ROOT / "baguakit/command/doctor.py").read_text()


def test_the_tests_named_are_there():
    assert all((ROOT / path).exists() for path in noxfile["TESTS"])
    assert all([*ROOT.glob(pattern)] for pattern in noxfile["COMPILED"])


def test_security_names_every_file_that_unpickles():
    """And the package loads no state but with `weights_only=True`."""
    sources = {path.relative_to(ROOT).as_posix(): path.read_text() for path in (ROOT / "baguakit").rglob("*.py")}
    unpickling = {path for path, text in sources.items() if re.search(r"pickle\.loads?\b|Unpickler\(", text)}
    assert {*found(r"`(baguakit/[\w/]+\.py)`", "SECURITY.md")} == unpickling
    loads = [
        line for text in sources.values() for line in text.splitlines() if "torch.load(" in line and "`" not in line
    ]
    assert loads and all("weights_only=True" in line for line in loads)
