"""The machine that `scripts/gpu` finds before its parts run, and the summary of the parts afterwards."""

import ast
import datetime
import json
import platform
import subprocess
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
OPTIONAL = ("sklearn", "matplotlib", "tqdm")
SHOWN = 20  # lines of a kind in the table


def machine(dry: bool = False) -> dict[str, Any] | None:
    """Return what the machine is and which test files it cannot run.

    None, said why, if it has no GPU to run on; a `dry` run needs none.
    """
    missing = [name for name in ("torch", "triton", "pytest") if find_spec(name) is None]
    if missing:
        print(f"scripts/gpu needs {', '.join(missing)}, which {sys.executable} has not", file=sys.stderr)
        return None
    import torch
    import triton  # type: ignore[import-untyped, unused-ignore]

    if not torch.cuda.is_available() and not dry:
        print(f"scripts/gpu needs a GPU, and torch {torch.__version__} sees none", file=sys.stderr)
        return None
    missing = [name for name in OPTIONAL if find_spec(name) is None]
    tests = sorted(ROOT.glob("tests/**/test_*.py"))
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    found = {
        "dry": dry,
        "gpu": gpus or ["no GPU"],
        "driver": driver(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if gpus else None,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "date": datetime.date.today().isoformat(),
        "missing": missing,
        "skipped": {str(path.relative_to(ROOT)): need for path in tests if (need := needs(path, missing))},
    }
    print(title(found))
    for path, need in found["skipped"].items():
        print(f"left out: {path}, which needs {need}")
    return found


def driver() -> str | None:
    """Return the version of NVIDIA's driver."""
    try:
        asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return (
            subprocess.run(asked, capture_output=True, text=True, timeout=30, check=True).stdout.split("\n")[0].strip()
        )
    except (OSError, subprocess.SubprocessError):
        return None


def title(machine: Mapping[str, Any]) -> str:
    return f"{machine['gpu'][0]}, torch {machine['torch']}, triton {machine['triton']}, Python {machine['python']}"


def needs(path: Path, missing: Collection[str], seen: frozenset[Path] = frozenset()) -> str | None:
    """The missing module that a test file imports at its top, where it would end the file's collection.

    What it imports from bench counts, too.
    """
    for name in imported(path):
        if name.split(".")[0] in missing:
            return name.split(".")[0]
        place = ROOT.joinpath(*name.split("."))
        for file in (place.with_suffix(".py"), place / "__init__.py"):
            if name.startswith("bench.") and file not in seen and file.exists():
                seen |= {file}
                if (need := needs(file, missing, seen)) is not None:
                    return need
    return None


def imported(path: Path) -> Iterator[str]:
    """Yield the full names that a file imports at its top: modules, and what it takes from them."""
    package = path.relative_to(ROOT).parts[:-1] if path.is_relative_to(ROOT) else ()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*above, *([node.module] if node.module else [])])
            yield from (module, *(f"{module}.{alias.name}" for alias in node.names))


def read(facts: Path, tests: bool) -> Any:
    """Return what a part has left in its file: JSON; of a test run, counts. None if it left nothing."""
    if not facts.exists() or not (text := facts.read_text()).strip():
        return None
    return counts(json.loads(line) for line in text.splitlines() if line.endswith("}")) if tests else json.loads(text)


def counts(lines: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Count the tests of a record by how they ended; those that did not pass are named, those begun and cut off too."""
    last: dict[str, Mapping[str, Any]] = {}
    for line in lines:
        last[line["test"]] = line
    ends = [line["outcome"] for line in last.values()]
    return {
        "passed": ends.count("passed"),
        "skipped": ends.count("skipped"),
        "reasons": Counter(line["said"] for line in last.values() if line["outcome"] == "skipped"),
        "failed": {test: line["said"] for test, line in last.items() if line["outcome"] == "failed"},
        "cut off": [test for test, line in last.items() if line["outcome"] == "begun"],
    }


def table(machine: Mapping[str, Any], results: Mapping[str, Any], taken: Sequence[str]) -> None:
    """Print a line for each part taken, and what failed in it."""
    print("\n" + "-" * 100 + "\n" + title(machine))
    for name in taken:
        result = results[name]
        found = result["found"] if isinstance(result["found"], dict) else {}
        print(f"{name:<12}{result['status']:<16}{result['seconds']:>6.1f} s  {summary(found)}")
        details = [f"failed: {test}: {said}" for test, said in found.get("failed", {}).items()]
        details += [f"cut off: {test}" for test in found.get("cut off", [])]
        details += [] if found.get("passed") else [f"not run: {why}" for why in found.get("reasons", {})]
        for line in details[:SHOWN]:
            print(f"  {line}")
        if len(details) > SHOWN:
            print(f"  and {len(details) - SHOWN} more in results.json")


def summary(found: Mapping[str, Any]) -> str:
    """The plain values of what a part has found, in words."""
    plain = {key: value for key, value in found.items() if isinstance(value, (int, float, str, bool))}
    lengths = {key: len(value) for key, value in found.items() if isinstance(value, (list, dict)) and value}
    return ", ".join(f"{key} {show(value)}" for key, value in (plain | lengths).items())


def show(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
