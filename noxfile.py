"""Tests with other versions of Python, torch, triton and numpy, in environments that nox makes in build/versions.

    nox --list
    nox                                      gpu, oldest and newest: needs Python 3.10, 3.12 and 3.13
    nox -s newest -- tests/test_comm.py      one file in one of them: what follows `--` goes to pytest
    nox -s newest --reuse-venv=no            in a new environment, which may have newer versions

With pyenv, PYENV_VERSION names the Pythons to look among, such as 3.11.7:3.10.13:3.12.1:3.13.0. Where pip finds no CPU
build of torch, it takes the CUDA build without CUDA's libraries, which are gigabytes.
"""

import os
import re
import shutil
import sys
from glob import glob
from pathlib import Path

import nox
from packaging.requirements import Requirement

nox.options.envdir = "build/versions"
nox.options.sessions = ["gpu", "oldest", "newest"]
nox.options.reuse_venv = "yes"
nox.options.error_on_missing_interpreters = True

ROOT = Path(__file__).parent
# The tests that versions decide, with the reason. The others test code of this package by calls that these make, too.
TESTS = {
    "tests/kernels": "Triton's language, compiler and interpreter, and NumPy beneath the interpreter",
    "tests/test_compressors.py": "the same, dtypes and devices of torch, and torch.compile of the definitions",
    "tests/primitives": "flights over torch.distributed",
    "tests/attach": "hooks of autograd and of optimizers, and states that torch saves",
    "tests/test_comm.py": "groups of torch.distributed",
    "tests/test_lanes.py": "streams, threads and works of torch.distributed",
    "tests/optim/test_fused_equals_unfused.py": "steps of torch.optim",
    "tests/backend": "methods of process groups, and what DDP, FSDP2 and DTensor call",
    "tests/interop/test_ddp_hook.py": "hooks of DDP",
    "tests/interop/test_fsdp_hooks.py": "hooks of FSDP2",
    "tests/data/test_sample_codec.py": "formats of NumPy",
    "tests/test_expressions.py": "dataclasses and signatures of Python",
    "tests/test_ranks.py": "processes and pickles of Python",
    "tests/test_gpu_script.py": "the programs for a GPU",
}
COMPILED = ("tests/kernels/test_ahead_of_time*.py", "tests/kernels/test_launches.py")
TOOLS = ("cloudpickle", "hypothesis", "pytest", "pytest-timeout")
REQUIRED = {
    each.name: each
    for each in map(Requirement, nox.project.load_toml(ROOT / "pyproject.toml")["project"]["dependencies"])
}
# What is compiled for the CPU takes seconds, and longer beside other work; the time of a test is limited.
COMPILE = """
import torch, baguakit
baguakit.compressors.MinMaxUInt8().compress(torch.zeros(1, 1 << 20))
"""
VERSIONS = """
import platform
from importlib.metadata import version
print("Python", platform.python_version(), *(f"{name} {version(name)}" for name in ("torch", "triton", "numpy")))
"""


def oldest_of(package: str) -> str:
    """Return the requirement of the oldest version of a package that pyproject.toml allows."""
    [lowest] = [each.version for each in REQUIRED[package].specifier if each.operator == ">="]
    return f"{package}=={lowest}"


def newest_of(package: str) -> str:
    """Return the requirement of any version of a package that pyproject.toml allows; pip takes the newest."""
    return f"{package}{REQUIRED[package].specifier}"


@nox.session(python="3.12")
def gpu(session: nox.Session) -> None:
    """Test as on a machine with a GPU, which has no tool but pytest; with the dry run of scripts/gpu."""
    # Triton 3.6's interpreter, of which only tests without a GPU make use, does not work with NumPy 2.4.
    fill(session, "torch==2.11.0", "triton==3.6.0", "numpy<2.4", "pytest")
    beside = Path(session.virtualenv.location, "beside")
    session.install("--quiet", "--target", beside, "--upgrade", "cloudpickle", "hypothesis")
    run_tests(session, paths=[beside])
    if not session.posargs:
        shutil.rmtree(folder := ROOT / "build" / "versions" / "dry", ignore_errors=True)
        python = Path(session.virtualenv.bin, "python")
        session.run("scripts/gpu", folder, "--dry", external=True, env=variables(session) | {"PYTHON": str(python)})


@nox.session(python="3.10")
def oldest(session: nox.Session) -> None:
    """Test with the oldest versions that are supported."""
    fill(session, *map(oldest_of, ("torch", "triton", "numpy")), *TOOLS)
    run_tests(session, without=COMPILED)  # this Triton compiles them in `gpu`


@nox.session(python="3.13")
def newest(session: nox.Session) -> None:
    """Test with the newest versions that are supported."""
    fill(session, *map(newest_of, ("torch", "triton", "numpy")), *TOOLS)
    run_tests(session)


@nox.session(venv_backend="none")
def triton(session: nox.Session) -> None:
    """Test kernels compiled by the oldest Triton, beside all else of .venv."""
    wanted = oldest_of("triton")
    folder = ROOT / "build" / "versions" / wanted
    if not folder.exists():
        pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--only-binary", ":all:")
        session.run(*pip, "--target", folder, wanted)
    run_tests(session, tests=COMPILED, paths=[folder])


def fill(session: nox.Session, *packages: str) -> None:
    """Install packages, but for CUDA's libraries, in whose place come substitutes if torch needs them."""
    heavy = [name for name in packages if re.match(r"(torch|triton)\b", name)]
    session.install("--quiet", "--no-deps", "--only-binary", ":all:", *heavy)
    asked = "from importlib.metadata import requires; print('\\n'.join(requires('torch')))"
    light = [
        line.split(";")[0].strip()
        for line in session.run("python", "-c", asked, silent=True).splitlines()
        if "extra ==" not in line and not re.match("nvidia|cuda|triton", line)
    ]
    session.install("--quiet", *light, *(name for name in packages if name not in heavy))
    [libraries] = Path(session.virtualenv.location).glob("lib/python*/site-packages/torch/lib")
    if (libraries / "libtorch_cuda.so").exists():
        session.run("python", "scripts/without_cuda.py", libraries)


def variables(session: nox.Session, *paths: Path) -> dict[str, str | None]:
    """Return the variables of an environment's processes; None unsets one."""
    unset: dict[str, str | None] = {name: None for name in os.environ if name.startswith(("PYTEST_", "TRITON_"))}
    found = unset | {"PYTHONPATH": os.pathsep.join(map(str, [*paths, ROOT])), "OMP_NUM_THREADS": "1"}
    if session.python:  # programs that compile the codec wait for one another if they keep it in one place
        found["XDG_CACHE_HOME"] = str(Path(session.virtualenv.location, "cache"))
    return found | {"PYTHONUNBUFFERED": "1"}


def run_tests(
    session: nox.Session,
    tests: tuple[str, ...] = tuple(TESTS),
    paths: list[Path] | None = None,
    without: tuple[str, ...] = (),
) -> None:
    """Run the tests of an environment, or those that the arguments of the session name.

    Args:
        session: the session.
        tests: paths, or patterns of them, that pytest is given.
        paths: folders of packages beside those of the environment.
        without: patterns of files in them that it is not given.
    """
    python, env = (
        "python" if session.python else sys.executable,
        variables(session, *(paths or [])),
    )
    session.run(python, "-c", VERSIONS, env=env)
    session.run(python, "-c", COMPILE, env=env)
    named = any((ROOT / word.split("::")[0]).exists() for word in session.posargs)
    given = [] if named else [path for pattern in tests for path in sorted(glob(pattern, root_dir=ROOT))]
    given += [f"--ignore={path}" for pattern in without for path in sorted(glob(pattern, root_dir=ROOT))]
    options = ["-q", "--tb=short", "-p", "no:cacheprovider", "-m", "not slow or compiled"]
    options += ["-o", "timeout=600"]  # other programs may take the cores
    session.run(python, "-m", "pytest", *options, *given, *session.posargs, env=env)
