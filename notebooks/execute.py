"""Run the notebooks and keep what they show.

    python notebooks/execute.py                     all of them, each in place
    python notebooks/execute.py 03_mixing.ipynb     one
    python notebooks/execute.py --check             only see that they run; write nothing

A notebook fails if one of its assertions does. What is written is the same whoever runs it, but for what it measured:
no names of machines, no times of execution, and cells numbered as they stand.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).parent
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def notebooks() -> list[Path]:
    """All of them, in order."""
    return sorted(HERE.glob("*.ipynb"))


def executed(path: Path, seconds: int = 300) -> Any:
    """The notebook with new outputs.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell failed.
    """
    notebook = nbformat.read(path, as_version=4)
    options = {"timeout": seconds, "kernel_name": "python3", "record_timing": False, "coalesce_streams": True}
    options |= {"extra_arguments": ["--log-level=ERROR"], "resources": {"metadata": {"path": str(path.parent)}}}
    NotebookClient(notebook, **options).execute()
    return tidy(notebook)


def tidy(notebook: Any) -> Any:
    """The notebook without what changes from run to run for no reason."""
    notebook.metadata = nbformat.from_dict(METADATA)
    for number, cell in enumerate(notebook.cells, start=1):
        cell.id = f"cell-{number:02d}"
        cell.metadata = nbformat.from_dict({})
        for output in cell.get("outputs", []):
            output.pop("metadata", None) if output.output_type == "stream" else output.update(metadata={})
    nbformat.validate(notebook)
    return notebook


def main() -> None:
    """Run those that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", type=Path, metavar="NOTEBOOK", help="all, if none is named")
    parser.add_argument("--check", action="store_true", help="write nothing")
    asked = parser.parse_args()
    for path in asked.paths or notebooks():
        path = path if path.exists() else HERE / path
        began = time.perf_counter()
        notebook = executed(path)
        if not asked.check:
            nbformat.write(notebook, path)
        print(f"{path.name}: {time.perf_counter() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
