"""Make the environments of `scripts/versions`, and run tests in them.

They lie in build/versions and are used again until their description changes; `--anew` makes them again, which for the
newest versions may mean others. Where pip finds no CPU build of torch it takes the CUDA build without CUDA's libraries,
which are gigabytes. Ends with 1 if a test fails or an environment cannot be made.
"""

import argparse
import glob
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import gpu_report
from versions_list import ENVIRONMENTS, ROOT, TESTS, Environment

FOLDER = ROOT / "build" / "versions"
ABOUT = """
import json, platform
from importlib.metadata import version
packages = {name: version(name) for name in ("torch", "triton", "numpy")}
print(json.dumps({"python": platform.python_version()} | packages))
"""


# What is compiled for the CPU takes a minute, and longer beside other work; the time of a test is limited.
COMPILE = """
import torch, baguakit
baguakit.compressors.MinMaxUInt8().compress(torch.zeros(1, 1 << 20))
"""


class Missing(Exception):
    """An environment cannot be made here, for the reason that the message tells."""


def main(words: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if words is None else words
    mine, more = (words[: words.index("--")], words[words.index("--") + 1 :]) if "--" in words else (words, [])
    names = [each.name for each in ENVIRONMENTS]
    parser = argparse.ArgumentParser(
        prog="scripts/versions", description="Tests with other versions of Python and torch."
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"of {', '.join(names)}; without any, those of a Python"
    )
    parser.add_argument("--list", action="store_true", help="list the environments and the tests, and run nothing")
    parser.add_argument("--anew", action="store_true", help="make the environments again")
    parser.add_argument("--make", action="store_true", help="make the environments, and run nothing")
    asked = parser.parse_args(mine)
    if asked.list:
        print(listed())
        return 0
    unknown = [name for name in asked.names if name not in names]
    if unknown:
        parser.error(f"there is no environment {unknown[0]!r}; there are {', '.join(names)}")
    chosen = [each for each in ENVIRONMENTS if each.name in asked.names or (each.python and not asked.names)]
    rows = [row(each, asked.anew, None if asked.make else more) for each in chosen]
    print("\n" + table(rows))
    return int(any(not each["good"] for each in rows))


def listed() -> str:
    """Return the environments and the tests, a line for each."""
    lines = [f"{each.name:<8} {each.about}: {contents(each)}" for each in ENVIRONMENTS]
    return "\n".join([*lines, "", *(f"{path:<42} {reason}" for path, reason in TESTS.items())])


def contents(environment: Environment) -> str:
    return ", ".join([f"Python {environment.python or 'of .venv'}", *environment.packages])


def row(environment: Environment, anew: bool, more: Sequence[str] | None) -> dict[str, Any]:
    """Make an environment, run its tests unless `more` is None, and return its line of the table."""
    began = time.monotonic()
    found: dict[str, Any] = {"name": environment.name}
    try:
        python = made(environment, anew)
        found |= versions(environment, python)
        print(f"{environment.name}: {said(found)}", flush=True)
        found |= {"good": True} if more is None else tested(environment, python, more)
    except Missing as error:
        print(f"{environment.name}: {error}", file=sys.stderr)
        found |= {"good": False, "error": str(error)}
    except subprocess.CalledProcessError as error:
        command = " ".join(map(str, error.cmd))
        found |= {"good": False, "error": f"`{command}` ended with {error.returncode}"}
    return found | {"minutes": (time.monotonic() - began) / 60}


def made(environment: Environment, anew: bool) -> Path:
    """Return the Python of an environment, which is made if it is not there."""
    folder, stamp = FOLDER / environment.name, FOLDER / environment.name / "made-from"
    python = folder / "bin" / "python" if environment.python else Path(sys.executable)
    if not anew and stamp.exists() and stamp.read_text() == repr(environment):
        return python
    shutil.rmtree(folder, ignore_errors=True)
    if environment.python:
        print(f"{environment.name}: making build/versions/{environment.name}: {contents(environment)}", flush=True)
        subprocess.run([found(environment.python), "-m", "venv", folder], check=True)
        fill(python, environment.packages)
        if environment.beside:
            pip(python, "--target", folder / "beside", *environment.beside)
    else:
        pip(python, "--no-deps", "--only-binary", ":all:", "--target", folder, *environment.packages)
    stamp.write_text(repr(environment))
    return python


def found(version: str) -> str:
    """Return a Python of a version: of the PATH, of pyenv or of uv.

    Raises:
        Missing: there is none.
    """
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    paths = [path for path in (shutil.which(f"python{version}"),) if path]
    paths += sorted(glob.glob(f"{pyenv}/versions/{version}.*/bin/python{version}"), reverse=True)
    if uv := shutil.which("uv"):
        asked = subprocess.run(
            [uv, "python", "find", version], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        paths += asked.stdout.split("\n")[:1]
    for path in filter(None, paths):
        # A program of that name may be one of pyenv's, which ends with an error unless the version is chosen.
        if subprocess.run([path, "-c", "import ensurepip, venv"], stderr=subprocess.DEVNULL).returncode == 0:
            return path
    raise Missing(f"needs Python {version} with venv, and finds none on the PATH, in pyenv or in uv")


def fill(python: Path, packages: Sequence[str]) -> None:
    """Install packages, but for CUDA's libraries, in whose place come substitutes if torch needs them."""
    heavy = [name for name in packages if re.match(r"(torch|triton)\b", name)]
    pip(python, "--no-deps", "--only-binary", ":all:", *heavy)
    asked = "from importlib.metadata import requires; print('\\n'.join(requires('torch')))"
    light = [
        line.split(";")[0].strip()
        for line in output(python, "-c", asked).splitlines()
        if "extra ==" not in line and not re.match("nvidia|cuda|triton", line)
    ]
    pip(python, "--no-warn-conflicts", *light, *(name for name in packages if name not in heavy))
    [libraries] = python.parents[1].glob("lib/python*/site-packages/torch/lib")
    if (libraries / "libtorch_cuda.so").exists():
        subprocess.run([sys.executable, ROOT / "scripts" / "without_cuda.py", libraries], check=True)


def pip(python: Path, *words: str | Path) -> None:
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *words], check=True)


def output(*words: str | Path, **variables: str) -> str:
    return subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True, env=os.environ | variables).stdout


def variables(environment: Environment) -> dict[str, str]:
    """Return the variables of an environment's processes."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "TRITON_"))}
    beside = FOLDER / environment.name / ("beside" if environment.python else "")
    paths = [str(beside), str(ROOT)] if environment.beside or not environment.python else [str(ROOT)]
    if environment.python:  # programs that compile the codec wait for one another if they keep it in one place
        kept["XDG_CACHE_HOME"] = str(FOLDER / environment.name / "cache")
    return kept | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def versions(environment: Environment, python: Path) -> dict[str, str]:
    """Return the versions that an environment has."""
    return json.loads(output(python, "-c", ABOUT, **variables(environment)))


def said(found: Mapping[str, str]) -> str:
    return f"Python {found['python']}, " + ", ".join(f"{name} {found[name]}" for name in ("torch", "triton", "numpy"))


def tested(environment: Environment, python: Path, more: Sequence[str]) -> dict[str, Any]:
    """Run the tests of an environment, or those that `more` names, and count them."""
    named = any((ROOT / word.split("::")[0]).exists() for word in more)
    paths = (
        [] if named else [path for pattern in environment.tests for path in sorted(glob.glob(pattern, root_dir=ROOT))]
    )
    left_out = [path for pattern in environment.without for path in sorted(glob.glob(pattern, root_dir=ROOT))]
    paths += [f"--ignore={path}" for path in left_out]
    record = FOLDER / f"{environment.name}.jsonl"
    record.unlink(missing_ok=True)
    if environment.python:
        subprocess.run([python, "-c", COMPILE], cwd=ROOT, env=variables(environment), check=True)
    command = [python, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider", f"--record={record}"]
    command += ["-o", "timeout=600"]  # other programs may take the cores
    command += ["-m", "not slow or compiled"]
    ran = [subprocess.run([*command, *paths, *more], cwd=ROOT, env=variables(environment)).returncode]
    if environment.dry and not more:
        folder = FOLDER / f"{environment.name}-dry"
        shutil.rmtree(folder, ignore_errors=True)
        dry = [ROOT / "scripts" / "gpu", folder, "--dry"]
        bare = variables(replace(environment, beside=()))
        ran.append(subprocess.run(dry, cwd=ROOT, env=bare | {"PYTHON": str(python)}).returncode)
    counts = gpu_report.read(record, tests=True) or {}
    return {"good": not any(ran), "counts": counts} | ({"dry": ran[1] == 0} if len(ran) > 1 else {})


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a line for each environment, and one for each failure."""
    lines = []
    for each in rows:
        end = "good" if each["good"] else "failed"
        lines.append(f"{each['name']:<8}{end:<8}{each['minutes']:>5.1f} min  {said(each) if 'python' in each else ''}")
        if counts := each.get("counts"):
            numbers = {
                "passed": counts["passed"],
                "skipped": counts["skipped"],
                "failed": len(counts["failed"]),
                "cut off": len(counts["cut off"]),
            }
            told = ", ".join(f"{number} {kind}" for kind, number in numbers.items())
            dry = {True: "; dry run passed", False: "; dry run failed", None: ""}[each.get("dry")]
            lines.append(f"        {told}{dry}")
            lines += [f"        failed: {test}: {why.splitlines()[0]}" for test, why in counts["failed"].items()]
        if "error" in each:
            lines.append(f"        {each['error']}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
