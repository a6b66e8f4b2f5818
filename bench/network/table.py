"""The folder of results, and their tables: lines of JSON that outlive an interruption."""

from pathlib import Path

from baguakit.compare.table import Table, machine

__all__ = ["RESULTS", "Table", "machine"]

RESULTS = Path(__file__).parents[1] / "results"
