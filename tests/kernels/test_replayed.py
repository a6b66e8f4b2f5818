"""Compiled kernels of other compilers, machines and sanitizers give the very bytes of this machine's kernels.

One run of the byte tests records every call of a compiled function: see replay.py. Each variant repeats all of them.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from baguakit.kernels import cpu

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # the first one waits for the byte tests of all families
HERE = Path(__file__).parent
TESTS = ("blockwise", "changes", "float8", "minmax_uint8", "mixing", "rotation", "sign", "steps*", "topk", "uint4")
X86, ARM = ("-march=native",), ("-static",)
# By name: compilers, of which the first that is there is taken; flags; what runs the program; threads, 0 as recorded.
VARIANTS = {
    "sanitizers": (("gcc",), (*X86, "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"), (), 3),
    "races": (("gcc",), (*X86, "-g", "-fsanitize=thread"), (), 3),
    "unwritten memory": (("clang", "clang-14"), (*X86, "-g", "-fsanitize=memory", "-fno-sanitize-recover=all"), (), 3),
    "clang": (("clang", "clang-14"), X86, (), 0),
    "AVX2": (("gcc",), ("-march=x86-64-v3",), (), 0),
    "SSE2": (("gcc",), ("-march=x86-64",), (), 0),
    "clang, SSE2": (("clang", "clang-14"), ("-march=x86-64",), (), 0),
    "aarch64": (("aarch64-linux-gnu-gcc",), ARM, ("qemu-aarch64",), 0),
}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc")
    folder = tmp_path_factory.mktemp("recorded")
    tests = [str(path) for name in TESTS for path in sorted(HERE.glob(f"test_{name}.py"))]
    environment = {**os.environ, "RECORDED": str(folder), "PYTHONPATH": str(HERE), "CUDA_VISIBLE_DEVICES": ""}
    options = ["-q", "-x", "--tb=short", "--show-capture=no", "-p", "replay", "-p", "no:xdist", "-m", ""]
    command = [sys.executable, "-m", "pytest", *options, *tests]
    run = subprocess.run(command, env=environment, cwd=HERE.parents[1], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-4000:]
    yield folder
    shutil.rmtree(folder)  # hundreds of megabytes


def program(recorded, tmp_path, family, compiler, flags) -> Path:
    """Return the program that repeats the calls of a family, compiled."""
    names = (recorded / f"{family}.names").read_text()
    plain = [flag for flag in cpu.FLAGS if flag not in ("-shared", "-fPIC")]
    sources = ["-I", cpu.COMMON.parent, cpu.SOURCES[family], HERE / "replay.c"]
    made = tmp_path / "replay"
    subprocess.run([compiler, *plain, *flags, f"-DNAMES(X)={names}", *sources, "-o", made, *cpu.LIBRARIES], check=True)
    return made


@pytest.mark.parametrize("family", cpu.SOURCES)
def test_every_function_was_called(recorded, tmp_path, family):
    subprocess.run(["gcc", "-c", "-I", cpu.COMMON.parent, cpu.SOURCES[family], "-o", tmp_path / "family.o"], check=True)
    symbols = subprocess.check_output(["nm", "-g", "--defined-only", tmp_path / "family.o"], text=True)
    functions = {line.split()[-1] for line in symbols.splitlines()} - {"exact"}  # which cpu.py calls itself
    assert functions == set(re.findall(r"X\((\w+)\)", (recorded / f"{family}.names").read_text()))


@pytest.mark.parametrize("family", cpu.SOURCES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_it_gives_the_recorded_bytes(recorded, tmp_path, family, variant):
    compilers, flags, run, threads = VARIANTS[variant]
    compiler = next(filter(None, map(shutil.which, compilers)), None)
    if compiler is None or not all(map(shutil.which, run)):
        pytest.skip(f"needs {' and '.join([compilers[0], *run])}")
    command = [compiler, *flags, "-x", "c", "-", "-o", tmp_path / "empty"]
    probe = subprocess.run(command, input="int main(void) { return 0; }", capture_output=True, text=True)
    if probe.returncode:
        pytest.skip(f"{compiler} {' '.join(flags)}: {probe.stderr[:300]}")
    made = program(recorded, tmp_path, family, compiler, flags)
    command = [*run, made, recorded / f"{family}.calls", str(threads)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-4000:]
    assert int(result.stdout.split()[0]) > 0


def test_a_byte_that_differs_is_found(recorded, tmp_path):
    made, calls = program(recorded, tmp_path, "mixing", "gcc", ()), tmp_path / "calls"
    data = bytearray((recorded / "mixing.calls").read_bytes())
    data[-1] ^= 0xFF
    calls.write_bytes(data)
    result = subprocess.run([made, calls, "0"], capture_output=True, text=True)
    assert result.returncode == 1 and re.search(r"byte \d+ of region \d+ differs", result.stderr)
