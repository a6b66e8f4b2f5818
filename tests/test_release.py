"""The texts of a release agree, and `scripts/versions` tries the versions that the package promises."""

import re
import sys
from pathlib import Path

import pytest

import baguakit as bk

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "scripts"))
from versions_list import COMPILED, ENVIRONMENTS, TESTS  # noqa: E402

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


BY_NAME = {each.name: each for each in ENVIRONMENTS}


def test_the_oldest_and_the_newest_versions_are_those_of_the_project():
    floors = dict(re.findall(r'^ *"(numpy|torch|triton)>=([\d.]+)', PYPROJECT, re.MULTILINE))
    assert {f"{name}=={version}" for name, version in floors.items()} < {*BY_NAME["oldest"].packages}
    assert BY_NAME["triton"].packages == (f"triton=={floors['triton']}",)
    pythons = re.findall(r"Python :: (3\.\d+)", PYPROJECT)
    assert (BY_NAME["oldest"].python, BY_NAME["newest"].python) == (pythons[0], pythons[-1])
    assert f'requires-python = ">={pythons[0]}"' in PYPROJECT


def test_the_tests_named_are_there():
    assert all((ROOT / path).exists() for path in TESTS)
    assert all([*ROOT.glob(pattern)] for pattern in COMPILED)
