"""Results that outlive an interruption: a line of JSON for each finished cell."""

import datetime
import json
import os
import platform
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any


class Table:
    """Cells, what was asked, and results, what was found; kept in a file from the moment they are added.

    A line that was being written when the program was killed is dropped. A cell that failed is in the file with its
    error, and counts as not done.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._results: dict[str, Mapping[str, Any]] = {}
        self.machines: list[dict[str, Any]] = []  # on which it was measured, and on which days
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        for number, line in enumerate(lines, start=1):
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                if number < len(lines):
                    raise ValueError(f"line {number} of {path} is not JSON; mend it or delete it") from None
                path.write_text("".join(lines[:-1]))
                break
            if "result" in row:
                self._keep(row)

    def __contains__(self, cell: Mapping[str, Any]) -> bool:
        return _key(cell) in self._results

    def __getitem__(self, cell: Mapping[str, Any]) -> Mapping[str, Any]:
        return self._results[_key(cell)]

    def __iter__(self) -> Iterator[tuple[dict[str, Any], Mapping[str, Any]]]:
        for key, result in self._results.items():
            yield json.loads(key), result

    def __len__(self) -> int:
        return len(self._results)

    def add(self, cell: Mapping[str, Any], result: Mapping[str, Any]) -> None:
        self._keep(row := {"cell": cell, "result": result, "on": machine()})
        self._write(row)

    def fail(self, cell: Mapping[str, Any], error: str) -> None:
        self._write({"cell": cell, "error": error, "on": machine()})

    def _keep(self, row: Mapping[str, Any]) -> None:
        self._results[_key(row["cell"])] = row["result"]
        self.machines += [row["on"]] if row["on"] not in self.machines else []

    def _write(self, row: Mapping[str, Any]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def _key(cell: Mapping[str, Any]) -> str:
    return json.dumps(cell, sort_keys=True)


def in_words(on: Mapping[str, Any]) -> str:
    return f"{on['cpu']}, {on['cores']} cores, Linux {on['kernel']}, torch {on['torch']}, {on['date']}"


def machine() -> dict[str, Any]:
    """Return the machine and versions that a result was measured with."""
    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "cpu": models[0].partition(":")[2].strip() if models else platform.processor(),
        "cores": os.cpu_count(),
        "kernel": platform.release().partition("-")[0],
        "torch": version("torch"),
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
    }
