"""`pytest --nbmake -m "" notebooks` runs the notebooks; with `--overwrite` they keep what they show.

What is written is the same whoever runs it, but for what it measured: no names of machines, no times of execution, and
cells numbered as they stand.
"""

from collections.abc import Iterator
from typing import Any

import pytest

METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the notebooks as slow tests. What warns in them, or in Jupyter, is not for the tests to refuse."""
    for item in items:
        if hasattr(item, "nbmake"):
            for mark in (pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.filterwarnings("default")):
                item.add_marker(mark)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Tidy a notebook that has been written."""
    yield
    if hasattr(item, "nbmake") and item.config.getoption("overwrite"):
        import nbformat

        nbformat.write(tidy(nbformat.read(item.path, as_version=4)), item.path)


def tidy(notebook: Any) -> Any:
    """Return the notebook without what changes from run to run for no reason."""
    import nbformat

    notebook.metadata = nbformat.from_dict(METADATA)
    for number, cell in enumerate(notebook.cells, start=1):
        cell.id = f"cell-{number:02d}"
        cell.metadata = nbformat.from_dict({})
        if "outputs" in cell:
            cell.outputs = joined(cell.outputs)
    return notebook


def joined(outputs: list[Any]) -> list[Any]:
    """Return outputs without metadata, and texts that follow each other on one stream as one."""
    found: list[Any] = []
    for output in outputs:
        if output.output_type != "stream":
            output.metadata = {}
        elif found and found[-1].get("name") == output.name:
            found[-1].text += output.text
            continue
        found.append(output)
    return found
