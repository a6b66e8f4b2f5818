"""The notebooks are committed with what they show. `scripts/test` runs them by nbmake, as slow tests."""

import copy
import importlib.util
import re
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat")

HERE = Path(__file__).parents[2] / "notebooks"
NOTEBOOKS = sorted(HERE.glob("*.ipynb"))
PATHS = re.compile(r"(?<![\w.:/])/(home|root|tmp|work|usr|opt|mnt|var|srv|Users)/")


def tidy(notebook):
    """Return what notebooks/conftest.py makes of a notebook."""
    spec = importlib.util.spec_from_file_location("conftest_of_notebooks", HERE / "conftest.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.tidy(notebook)


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


def test_it_is_committed_as_it_ran_from_top_to_bottom(notebook):
    ran = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in ran] == list(range(1, len(ran) + 1))
    assert all(o.output_type != "error" and o.get("name") != "stderr" for o in outputs(notebook))


def test_it_names_no_place_on_a_machine(notebook):
    assert not [text for text in texts(notebook) if PATHS.search(text)]


def test_it_carries_nothing_that_changes_for_no_reason(notebook):
    assert tidy(copy.deepcopy(notebook)) == notebook


def test_tidying_removes_what_changes_from_run_to_run():
    def ran(cell_id, seconds, *texts):
        cell = nbformat.v4.new_code_cell(
            "print(1)", id=cell_id, metadata={"execution": {"iopub.execute_input": seconds}}
        )
        cell.outputs = [nbformat.v4.new_output("stream", name="stdout", text=text) for text in texts]
        cell.outputs.append(nbformat.v4.new_output("display_data", {"text/plain": "1"}, metadata={"needs": seconds}))
        return nbformat.v4.new_notebook(
            cells=[cell], metadata={"language_info": {"name": "python", "version": seconds}}
        )

    one, other = tidy(ran("a", "1", "1\n", "2\n")), tidy(ran("b", "2", "1\n2\n"))
    assert one == other
    assert [output.get("text") for output in one.cells[0].outputs] == ["1\n2\n", None]


def test_its_links_lead_somewhere(notebook):
    links = re.findall(r"\]\(([^)#]+)\)", "".join(c.source for c in notebook.cells if c.cell_type == "markdown"))
    assert all(link.startswith("https://") or (HERE / link).exists() for link in links)
