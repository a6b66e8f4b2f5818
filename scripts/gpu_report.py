"""What `scripts/gpu` says before and after: the machine, what is skipped, and the table.

python scripts/gpu_report.py before OUTDIR
python scripts/gpu_report.py after OUTDIR STATUS_OF_TESTS STATUS_OF_BENCHMARKS STATUS_OF_ROOFLINE
"""

import ast
import json
import platform
import sys
from importlib.util import find_spec
from pathlib import Path
from xml.etree import ElementTree

OPTIONAL = ("hypothesis", "sklearn", "matplotlib", "tqdm")
STATUS = {0: "all ran", 1: "some failed", 2: "interrupted", 4: "usage error", 5: "nothing to run"}


def before(out: Path) -> int:
    """Say what the machine is and which test files it cannot run; 1 if it has no GPU to run on."""
    missing = [name for name in ("torch", "triton", "pytest") if find_spec(name) is None]
    if missing:
        print(f"scripts/gpu needs {', '.join(missing)}, which {sys.executable} has not", file=sys.stderr)
        return 1
    import torch
    import triton

    if not torch.cuda.is_available():
        print(f"scripts/gpu needs a GPU, and torch {torch.__version__} sees none", file=sys.stderr)
        return 1
    missing = [name for name in OPTIONAL if find_spec(name) is None]
    skipped = {str(path): need for path in sorted(Path("tests").rglob("test_*.py")) if (need := needs(path, missing))}
    (out / "skipped.txt").write_text("".join(f"{path}\n" for path in skipped))
    machine = {
        "gpu": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "missing": missing,
        "skipped": skipped,
    }
    (out / "machine.json").write_text(json.dumps(machine, indent=2))
    print(f"{machine['gpu'][0]}, torch {torch.__version__}, triton {triton.__version__}, Python {machine['python']}")
    for path, need in skipped.items():
        print(f"skipped: {path}, which needs {need}")
    return 0


def needs(path: Path, missing: list[str]) -> str | None:
    """The missing module that a test file imports at its top, where it would end the file's collection."""
    for node in ast.parse(path.read_text()).body:
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        for name in names:
            if name.split(".")[0] in missing:
                return name.split(".")[0]
    return None


def after(out: Path, tests: int, benchmarks: int, roofline: int) -> int:
    """Write the summary and print the table; 0 if the tests passed, and the benchmarks and the roofline ran."""
    machine = json.loads((out / "machine.json").read_text())
    summary = {"status": status(tests), **read_tests(out / "tests.xml")}
    (out / "tests.json").write_text(json.dumps(summary, indent=2))
    rows = read_benchmarks(out / "benchmarks.json")

    print("\n" + "-" * 100)
    print(f"{machine['gpu'][0]} · torch {machine['torch']} · triton {machine['triton']} · Python {machine['python']}")
    print(
        f"tests: {summary['status']}; {summary['passed']} passed, {len(summary['failed'])} failed, "
        f"{summary['skipped']} skipped, {len(machine['skipped'])} files left out, {summary['seconds']:.0f} s"
    )
    for name in summary["failed"][:20]:
        print(f"  failed: {name}")
    print(f"benchmarks: {status(benchmarks)}; {len(rows)} timed")
    for name, seconds, info in rows:
        print(f"  {name:<60} {seconds * 1e3:>10.4f} ms  {info}")
    print(f"roofline: {status(roofline)}; share of a copy's bytes a second at the largest size, and a small call")
    for name, share, values, latency in read_roofline(out / "roofline-gpu.json"):
        print(f"  {name:<60} {share:>6.2f} at {values:>11,} values  {latency * 1e6:>8.1f} µs")
    return 0 if tests == 0 and benchmarks in (0, 5) and roofline == 0 else 1


def status(code: int) -> str:
    return "out of time" if code in (124, 137) else STATUS.get(code, f"ended with {code}")


def read_tests(path: Path) -> dict:
    """Counts from pytest's junit file; zeros if it was killed before it could write one."""
    summary = {"passed": 0, "failed": [], "skipped": 0, "seconds": 0.0}
    if not path.exists():
        return summary
    tree = ElementTree.parse(path)
    summary["seconds"] = sum(float(suite.get("time", 0)) for suite in tree.iter("testsuite"))
    for case in tree.iter("testcase"):
        outcomes = {child.tag for child in case}
        if outcomes & {"failure", "error"}:
            summary["failed"].append(f"{case.get('classname')}::{case.get('name')}")
        elif "skipped" in outcomes:
            summary["skipped"] += 1
        else:
            summary["passed"] += 1
    return summary


def read_benchmarks(path: Path) -> list[tuple[str, float, str]]:
    """Name, median seconds, and what the benchmark itself has to say."""
    if not path.exists() or not path.read_text().strip():
        return []
    rows = []
    for row in json.loads(path.read_text())["benchmarks"]:
        info = " ".join(f"{key}={show(value)}" for key, value in row["extra_info"].items())
        rows.append((row["name"], row["stats"]["median"], info))
    return rows


def read_roofline(path: Path) -> list[tuple[str, float, int, float]]:
    """Of each operation its name, share of the roof at the largest size, that size, and seconds at the smallest."""
    if not path.exists():
        return []
    by_name: dict[str, list[dict]] = {}
    for row in json.loads(path.read_text())["rows"]:
        by_name.setdefault(f"{row['family']}: {row['name']}", []).append(row)
    return [(name, rows[-1]["share"], rows[-1]["values"], rows[0]["seconds"]) for name, rows in by_name.items()]


def show(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    moment, folder, *codes = sys.argv[1:]
    out = Path(folder)
    sys.exit(before(out) if moment == "before" else after(out, *map(int, codes)))
