"""Run the parts of `scripts/gpu`, none longer than it may take and all together no longer than asked.

OUTDIR/log.txt holds all that parts print. OUTDIR/results.json and OUTDIR/report.txt are written anew after each part,
so that a call that is cut off leaves what it has; a later call adds to them. Ends with 1 if a part failed, and with 2
on wrong usage.
"""

import argparse
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import gpu_issue
import gpu_report
from gpu_parts import PARTS, ROOT, SECONDS, Part

GRACE = 10.0  # seconds from the interrupt of a part to its end
PATIENCE = 20  # times as long as on a GPU may a part of a dry run take


def main(words: Sequence[str] | None = None) -> int:
    names = [part.name for part in PARTS]
    parser = argparse.ArgumentParser(prog="scripts/gpu", description="All that needs a GPU, in parts.")
    parser.add_argument("out", nargs="?", type=Path, metavar="OUTDIR", help="where results go")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(names)}; without any, all in order")
    parser.add_argument(
        "--seconds", type=float, help=f"that the call may take; {SECONDS}, or any with --dry or --report"
    )
    parser.add_argument("--dry", action="store_true", help="run each part small and without a GPU")
    parser.add_argument(
        "--report", nargs="?", type=Path, const=Path(), metavar="FILE", help="copy OUTDIR/report.txt to FILE"
    )
    parser.add_argument("--list", action="store_true", help="list the parts and the seconds that each may take")
    asked = parser.parse_intermixed_args(words)
    if asked.list:
        print("\n".join(f"{part.name:<12}{part.seconds:>4} s  {part.about}" for part in PARTS))
        return 0
    if asked.out is None and asked.report is not None:
        asked.out = ROOT / "build" / "gpu"
    if asked.out is None:
        parser.error("name a folder for the results")
    seconds = asked.seconds or (SECONDS if asked.report is None and not asked.dry else math.inf)
    unknown = [name for name in asked.parts if name not in names]
    if unknown:
        parser.error(f"there is no part {unknown[0]!r}; there are {', '.join(names)}")
    parts = [part for part in PARTS if part.name in asked.parts or not asked.parts]
    late = [part for part in parts if part.seconds + GRACE > seconds]
    if late:
        parser.error(f"{late[0].name} may take {late[0].seconds} s and {GRACE:g} to end; give it --seconds")
    began = time.monotonic()
    if (machine := gpu_report.machine(asked.dry)) is None:
        return 1
    asked.out.mkdir(parents=True, exist_ok=True)
    status = Run(asked.out.resolve(), machine, began + seconds).take(
        [small(part) for part in parts] if asked.dry else parts
    )
    if asked.report is not None:
        written = asked.out / "report.txt"
        if asked.report != Path():
            written = Path(shutil.copy(written, asked.report))
        print(f"attach {written} to an issue; it names no path, user or host of this machine")
    return status


def small(part: Part) -> Part:
    """Return a part as a dry run takes it."""
    return replace(part, command=(*part.command, *part.dry), seconds=part.seconds * PATIENCE)


class Run:
    """One call: parts taken in turn until a moment of `time.monotonic()`."""

    def __init__(self, out: Path, machine: Mapping[str, Any], until: float) -> None:
        self.out, self.machine, self.until = out, machine, until
        self.results: dict[str, Any] = {}
        self.last: deque[str] = deque(maxlen=5)  # lines that the part under way has printed
        if (path := out / "results.json").exists():
            kept = json.loads(path.read_text())
            self.results = kept["parts"] if kept["machine"].get("dry") == machine.get("dry") else {}

    def take(self, parts: Sequence[Part]) -> int:
        """Take what fits, say what is left; 1 if a part failed."""
        taken, left = [], []
        for place, part in enumerate(parts):
            if part.seconds + GRACE > self.until - time.monotonic():
                left.append(part.name)
                continue
            taken.append(part.name)
            self.results[part.name] = self.run(part)
            self.write()
            if part.needed and self.results[part.name]["status"] != "passed":
                self.say(f"{part.name} failed: nothing else is begun")
                left += [each.name for each in parts[place + 1 :]]
                break
        gpu_report.table(self.machine, self.results, taken)
        if left:
            print(f"not begun: {', '.join(left)}; call scripts/gpu OUTDIR {' '.join(left)}")
        return int(any(self.results[name]["status"] != "passed" for name in taken))

    def run(self, part: Part) -> dict[str, Any]:
        """Run a part, and return its status, its seconds, and what it found."""
        self.say(f"{part.name}: {part.about} (at most {part.seconds} s)")
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as room:
            facts = Path(room) / "facts"
            command = [word.replace("{out}", str(self.out)).replace("{facts}", str(facts)) for word in part.command]
            if part.tests:
                command += [f"--ignore={path}" for path in self.machine["skipped"]]
            self.last.clear()
            code, late = self.program(command, part)
            found = gpu_report.read(facts, part.tests)
        status = "out of time" if late else "passed" if code == 0 else f"failed with {code}"
        said = [] if status == "passed" else [*self.last]
        return {"status": status, "seconds": round(time.monotonic() - began, 1), "found": found, "said last": said}

    def program(self, command: Sequence[str], part: Part) -> tuple[int, bool]:
        """Run a program, its output to the log and to ours; return how it ended, and whether it was out of time."""
        with subprocess.Popen(
            [sys.executable, *command],
            cwd=ROOT,
            env=os.environ | part.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        ) as process:
            reader = threading.Thread(target=self.copy, args=(process.stdout,), daemon=True)
            reader.start()
            try:
                late = not ended(process, part.seconds)
            finally:
                # Interrupted, and not killed, so that it still writes what it has; killed if it does not listen.
                for kind in (signal.SIGINT, signal.SIGKILL):
                    if process.poll() is None:
                        os.killpg(process.pid, kind)
                        ended(process, GRACE)
            reader.join(1)  # a process that it left behind may hold the other end
            return process.returncode, late

    def copy(self, lines: Any) -> None:
        for line in lines:
            self.last.append(line.rstrip("\n"))
            self.say(self.last[-1])

    def say(self, line: str) -> None:
        print(line, flush=True)
        with open(self.out / "log.txt", "a") as log:
            print(line, file=log)

    def write(self) -> None:
        """Replace results.json and report.txt whole."""
        found = {"kind": "gpu", "machine": self.machine, "parts": self.results}
        texts = {"results.json": json.dumps(found, indent=1) + "\n", "report.txt": gpu_issue.text(found, self.out)}
        for name, text in texts.items():
            half = self.out / f"{name}.half"
            half.write_text(text)
            half.replace(self.out / name)


def ended(process: subprocess.Popen[str], seconds: float) -> bool:
    """Return whether a process ends within so many seconds."""
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


def stop(*_: Any) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, stop)  # so that the part under way is ended, too
    sys.exit(main())
