"""Faults planted in our kernels fail the tests that execute their PTX; some of them no interpreted test can see."""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("triton")
ROOT = Path(__file__).parents[2]
VARIANTS = "test_executed_variants.py"


@dataclass(frozen=True)
class Fault:
    """A fault in a file of baguakit/kernels.

    Attributes:
        old, new: what is there, and what is put there.
        tests: a file of tests, and which of them (`-k`) must fail when PTX is executed.
        said: how they fail.
        interpreted: tests, likewise, that pass where kernels are interpreted.
    """

    file: str
    old: str
    new: str
    tests: tuple[str, str]
    said: str
    interpreted: tuple[str, str] | None = None


STEP = ("test_steps_kernels.py", "test_whatever_the_dtypes and float32")
DIFFERS = r"result \d+: \S+ in place of \S+, value"
FAULTS = {
    "a mask is dropped": Fault(
        "mixing_gpu.py", "inside = at < n if MASKED else None\n    x,", "inside = None\n    x,",
        (VARIANTS, "land_kernel and fp64 and masked and True"), "MemoryFault: land_kernel, .* outside every",
    ),
    "halves are cut off": Fault(
        "gpu.py", "return x.to(dtype)",
        "return (x.to(tl.uint32, bitcast=True) >> 16).to(tl.uint16).to(dtype, bitcast=True)"
        " if dtype == tl.bfloat16 and x.dtype == tl.float32 else x.to(dtype)",
        (VARIANTS, "land_kernel and bf16"), DIFFERS,
        ("test_mixing.py", "test_land_kernel_equals_the_definition and dtype1"),
    ),
    "the threshold is one off": Fault(
        "topk_gpu.py", "kept = (size > threshold) |", "kept = (size >= threshold) |",
        (VARIANTS, "select_kernel and bf16"), f"RaceFault: select_kernel|MemoryFault: select_kernel|{DIFFERS}",
    ),
    "NaN is no value": Fault(
        "blockwise/uniform_gpu.py", "propagate_nan=tl.PropagateNan.ALL", "propagate_nan=tl.PropagateNan.NONE",
        (VARIANTS, "compress_kernel and minmax and bf16"), DIFFERS,
        ("test_blockwise.py", "test_kernels_pass_broken_blocks_on and minmax_uint8"),
    ),
    "headers begin one further on": Fault(
        "blockwise/gpu.py", "row_ptr + header_at + block *", "row_ptr + header_at + (block + 1) *",
        (VARIANTS, "compress_kernel and e4m3 and fp32"), "MemoryFault: decompress_kernel, .* outside every tensor",
    ),
    "a decay is left out without a momentum": Fault(
        "steps/gpu.py", "if DECAY == COUPLED:\n        g = g + p * decay\n    if STATES > 0:",
        "if DECAY == COUPLED and STATES > 0:\n        g = g + p * decay\n    if STATES > 0:",
        (VARIANTS, "step_kernel and SGD and not momentum"), DIFFERS,
    ),
    "tensors are promised to lie at multiples of sixteen": Fault(
        "steps/operators.py", "np.where(aligned, lengths // tile, 0)", "lengths // tile",
        STEP,
        r"MemoryFault: step_kernel, line .* no multiple of the \d+ bytes",
        STEP,
    ),
    "products are fused with sums": Fault(
        "steps/gpu.py", "num_warps=WARPS, enable_fp_fusion=False", "num_warps=WARPS, enable_fp_fusion=True",
        STEP, "where False = equal_after_a_step",
        STEP,
    ),
    "the count of steps is stored before all have read it": Fault(
        "steps/gpu.py", "        tl.debug_barrier()", "        pass",
        (VARIANTS, "numbers_kernel and Adam"), "RaceFault: numbers_kernel, line .* nothing orders them",
        ("test_steps_kernels.py", "test_the_kernel_equals_the_definition and Lion"),
    ),
}  # fmt: skip


def run(home, chosen, *options):
    file, which = chosen
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST_", "TRITON_"))}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", "--tb=short"]
    done = subprocess.run(
        [*command, "--show-capture=no", *options, f"tests/kernels/{file}", "-k", which],
        cwd=home, env=environment | {"PYTHONPATH": str(home)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow  # compiles a kernel for each
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_a_kernel_fails_where_it_is_executed(name, tmp_path):
    fault = FAULTS[name]
    for each in ("baguakit", "ptx", "tests"):
        shutil.copytree(ROOT / each, tmp_path / each, ignore=shutil.ignore_patterns("__pycache__", "results"))
    for each in ("conftest.py", "pyproject.toml"):
        shutil.copy(ROOT / each, tmp_path)
    if (ROOT / ".ptx_cache").exists():
        (tmp_path / ".ptx_cache").symlink_to(ROOT / ".ptx_cache")
    path = tmp_path / "baguakit" / "kernels" / fault.file
    text = path.read_text()
    assert text.count(fault.old) == 1, f"{fault.file} has changed: {fault.old}"
    path.write_text(text.replace(fault.old, fault.new))
    if fault.interpreted:
        status, said = run(tmp_path, fault.interpreted)
        assert status == pytest.ExitCode.OK, said
    status, said = run(tmp_path, fault.tests, "--ptx", "90")
    assert status == pytest.ExitCode.TESTS_FAILED and re.search(fault.said, said), said
