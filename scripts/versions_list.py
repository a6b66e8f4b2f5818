"""The environments of `scripts/versions`, and the tests that run in each of them."""

import re
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
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


def oldest(package: str) -> str:
    """Return the requirement of the oldest version of a package that pyproject.toml allows."""
    [version] = re.findall(rf'^ *"{package}>=([\d.]+)', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    return f"{package}=={version}"


@dataclass(frozen=True)
class Environment:
    """A Python and packages.

    Attributes:
        name: by which it is called for.
        about: what it is like.
        python: its version; "" is the Python of .venv, with its packages where `packages` are not newer or older.
        packages: requirements, as pip reads them.
        tests: paths, or patterns of them, that pytest is given.
        beside: packages that the tests find, and the dry run does not.
        without: patterns of files in them that it is not given.
        dry: the dry run of `scripts/gpu` follows.
    """

    name: str
    about: str
    python: str
    packages: tuple[str, ...]
    tests: tuple[str, ...] = field(default=tuple(TESTS), repr=False)
    beside: tuple[str, ...] = ()
    without: tuple[str, ...] = field(default=(), repr=False)
    dry: bool = field(default=False, repr=False)


ENVIRONMENTS = (
    Environment(
        "gpu",
        "what a machine with a GPU has: no tool but pytest",
        "3.12",
        # Triton 3.6's interpreter, of which only tests without a GPU make use, does not work with NumPy 2.4.
        ("torch==2.11.0", "triton==3.6.0", "numpy<2.4", "pytest"),
        beside=("cloudpickle", "hypothesis"),
        dry=True,
    ),
    Environment(
        "oldest",
        "the oldest versions that are supported",
        "3.10",
        (oldest("torch"), oldest("triton"), oldest("numpy"), *TOOLS),
        without=COMPILED,  # this Triton compiles them in the environment before
    ),
    Environment("newest", "the newest versions that there are", "3.13", ("torch", "triton", "numpy", *TOOLS)),
    Environment("triton", "the oldest Triton beside all else of .venv", "", (oldest("triton"),), COMPILED),
)
