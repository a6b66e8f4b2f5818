"""The report of `scripts/gpu` that a user can attach to an issue: it names no path, user or host of the machine."""

import json
import re
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gpu_parts import PARTS, ROOT

SHOWN = 10  # failures of a part
KEYS = (
    ("gpu", "GPU"),
    ("driver", "driver"),
    ("cuda", "CUDA"),
    ("nccl", "NCCL"),
    ("torch", "torch"),
    ("triton", "triton"),
    ("python", "Python"),
    ("system", "system"),
    ("date", "date"),
    ("missing", "without"),
)
ADDRESS = re.compile(r"(?<![\w.])\d{1,3}(?:\.\d{1,3}){3}(?![\w.])")
PART = r"[^\s/:'\",()\[\]]+"
PACKAGES = re.compile(rf"(?<![\w./…-])(?:/{PART})+/site-packages/")
HOME = re.compile(rf"(?<![\w./…-])/(?:home|Users)/{PART}")
ABSOLUTE = re.compile(rf"(?<![\w./…-])(?:~|/{PART})(?:/{PART})*/({PART})")


def text(found: Mapping[str, Any], out: Path) -> str:
    """Return the report of results.json, with the comparison that lies in `out` if there is one."""
    machine, parts = found["machine"], found["parts"]
    lines = ["baguakit: report of scripts/gpu" + ", a dry run: its figures mean nothing" * bool(machine.get("dry")), ""]
    lines += [f"{label:<8} {said}" for key, label in KEYS if (said := listed(machine.get(key)))]
    lines += ["", "Parts"]
    for part in PARTS:
        lines += of_part(part.name, parts[part.name]) if part.name in parts else [f"  {part.name:<12}not run"]
    comparison = out / "comparison.md"
    if "rows" in (parts.get("comparison", {}).get("found") or {}) and comparison.exists():
        lines += ["", comparison.read_text().rstrip("\n")]
    return anonymous("\n".join(lines) + "\n")


def listed(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value or "")


def of_part(name: str, result: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for a part, its figures and what failed in it."""
    yield f"  {name:<12}{result['status']}, {result['seconds']:.1f} s"
    yield from (f"    | {line}" for line in result["said last"])
    found = result["found"] if isinstance(result["found"], dict) else {}
    for key, value in found.items():
        if (name == "comparison" and key != "not compared") or value in (None, "", [], {}):
            continue
        if key == "failed" and isinstance(value, dict):
            yield from (f"    failed: {test}: {first_line(why)}" for test, why in [*value.items()][:SHOWN])
            yield from [f"    and {len(value) - SHOWN} more failed"] if len(value) > SHOWN else []
        elif key == "cut off":
            yield from (f"    cut off: {test}" for test in value)
        elif key == "reasons":
            yield from (f"    skipped {count}: {why}" for why, count in value.items())
        elif isinstance(value, (str, int, float)):
            yield f"    {key}: {value:.4g}" if isinstance(value, float) else f"    {key}: {value}"
        elif key == "compiled":
            yield f"    {key}: {len(value)}"
        else:
            yield f"    {key}: {json.dumps(value)}"


def first_line(said: str) -> str:
    return said.splitlines()[0] if said else ""


def anonymous(said: str) -> str:
    """Return a text with relative paths in place of absolute ones, and without addresses and the name of this host."""
    said = PACKAGES.sub("site-packages/", said.replace(f"{ROOT}/", ""))
    said = ABSOLUTE.sub(r"…/\1", HOME.sub("~", said))
    host = socket.gethostname()
    for name in (host, host.split(".")[0]) if host.split(".")[0] not in ("", "localhost") else ():
        said = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", "HOST", said)
    return ADDRESS.sub("ADDRESS", said)
