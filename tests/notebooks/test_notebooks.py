"""The notebooks run, and are committed with what they show.

Each starts a kernel, and most of them ranks, which import torch: hence the seconds.
"""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat")
pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")
pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")

HERE = Path(__file__).parents[2] / "notebooks"
NOTEBOOKS = sorted(HERE.glob("*.ipynb"))
PATHS = re.compile(r"(?<![\w.:/])/(home|root|tmp|work|usr|opt|mnt|var|srv|Users)/")


def program():
    """notebooks/execute.py."""
    spec = importlib.util.spec_from_file_location("execute_notebooks", HERE / "execute.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(path):
    return subprocess.run(
        [sys.executable, HERE / "execute.py", "--check", path], capture_output=True, text=True, check=False
    )


def outputs(notebook):
    return [output for cell in notebook.cells for output in cell.get("outputs", [])]


def texts(notebook):
    """All that a reader reads: sources, and what was printed or returned."""
    for cell in notebook.cells:
        yield cell.source
    for output in outputs(notebook):
        yield output.get("text", "") or output.get("data", {}).get("text/plain", "")


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def notebook(request):
    return nbformat.read(request.param, as_version=4)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs(path):
    ran = run(path)
    assert ran.returncode == 0, ran.stderr


def test_it_is_committed_as_it_ran_from_top_to_bottom(notebook):
    ran = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in ran] == list(range(1, len(ran) + 1))
    assert all(o.output_type != "error" and o.get("name") != "stderr" for o in outputs(notebook))


def test_it_names_no_place_on_a_machine(notebook):
    assert not [text for text in texts(notebook) if PATHS.search(text)]


def test_it_carries_nothing_that_changes_for_no_reason(notebook):
    assert notebook.metadata == program().METADATA
    assert [cell.id for cell in notebook.cells] == [f"cell-{n:02d}" for n in range(1, len(notebook.cells) + 1)]
    assert all(not cell.metadata for cell in notebook.cells)


def test_its_links_lead_somewhere(notebook):
    links = re.findall(r"\]\(([^)#]+)\)", "".join(c.source for c in notebook.cells if c.cell_type == "markdown"))
    assert all(link.startswith("https://") or (HERE / link).exists() for link in links)
