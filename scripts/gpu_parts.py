"""The parts of `scripts/gpu`, in the order in which they tell most: what fails early makes the later ones idle."""

import os
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTEST = (
    "-m",
    "pytest",
    "-v",
    "-p",
    "no:cacheprovider",
    "--tb=short",
    "--record={facts}",
    "--continue-on-collection-errors",
)
# Where pytest-xdist is, tests of kernels run side by side, for most of their time Triton compiles on the processor; but
# pytest-benchmark, where it is, would warn of that.
PARALLEL = ("-n", str(min(8, (os.cpu_count() or 1) // 2)), "-p", "no:benchmark") if find_spec("xdist") else ()
NCCL = "tests/test_cuda.py"
# These compile C for the processor, and launch nothing.
FOR_CPUS = "c_equals_the_definition or without_a_compiler or of_many_processes or sends_a_quarter"
# Of the tests of kernels, those that a GPU decides, steps and formats before all others.
FIRST = ("test_steps", "test_blockwise.py", "test_minmax", "test_uint4", "test_float8", "test_sign", "test_topk")


def kernel_tests() -> tuple[str, ...]:
    """Their files, in the order in which they tell most."""
    paths = sorted(ROOT.glob("tests/kernels/test_*.py"))
    paths.sort(key=lambda path: [path.name.startswith(name) for name in FIRST], reverse=True)
    return tuple(str(path.relative_to(ROOT)) for path in paths)


@dataclass(frozen=True)
class Part:
    """A program of this Python.

    Attributes:
        name: by which it is called for.
        about: what it finds out.
        seconds: that it may take; it is interrupted then, and killed if it does not listen.
        command: the arguments of Python. {out} is the folder of results, {facts} a file for what it finds: JSON, or
            lines of it. A test run leaves out the files that need missing modules.
        environment: what it adds to the environment.
        needed: nothing else is begun if it fails.
        dry: arguments that make it small and let it run without a GPU. Tests that need one are skipped and say so.
    """

    name: str
    about: str
    seconds: int
    command: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)
    needed: bool = False
    dry: tuple[str, ...] = ("--first",)

    @property
    def tests(self) -> bool:
        return self.command[: len(PYTEST)] == PYTEST


PARTS = (
    Part(
        "compile",
        "every kernel compiles with this Triton; registers and occupancy of each",
        60,
        ("scripts/gpu_kernels.py", "{facts}"),
        needed=True,
        dry=("cuda:90", "steps"),
    ),
    Part(
        "kernels",
        "steps, formats, mixing and top-k equal their definitions",
        140,
        (*PYTEST, *PARALLEL, "-k", f"not ({FOR_CPUS})", *kernel_tests()),
    ),
    Part(
        "pair",
        "two ranks over NCCL share a GPU: forks, duplicates, transport, warnings",
        40,
        ("scripts/gpu_pair.py", "{facts}"),
        dry=("--cpu",),
    ),
    Part("waits", "no step waits for the device", 60, (*PYTEST, NCCL, "-k", "never_synchronises")),
    Part(
        "streams",
        "streams, free running and overflow mean what they mean on CPUs",
        90,
        (*PYTEST, NCCL, "tests/test_lanes.py", "-k", "not never_synchronises"),
    ),
    Part(
        "uncached",
        "the same where freed memory is handed out at once",
        80,
        (*PYTEST, NCCL, "-k", "not never_synchronises"),
        {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
    ),
    Part(
        "groups",
        "groups of NCCL are made and aborted, ranks come and go, collectives and moments are those of the GPU",
        180,
        (
            *PYTEST,
            "-m",
            "gpu",
            "tests/elastic/test_nccl.py",
            "tests/primitives/test_collectives_cuda.py",
            "tests/attach/test_timeline.py",
            "tests/test_cuda_groups.py",
        ),
    ),
    Part(
        "means",
        "exchanges in one kernel of two ranks that share a GPU are those over NCCL, on streams and in graphs",
        120,
        (*PYTEST, "-m", "gpu", "tests/test_cuda_one_kernel.py"),
    ),
    Part(
        "backend",
        "the backend's methods over NCCL, DDP and FSDP2 over it, and a rank that is killed",
        220,
        (*PYTEST, "-m", "gpu", "tests/backend"),
    ),
    Part(
        "peer",
        "one of two ranks is killed: what the other says, and when",
        150,
        ("scripts/gpu_peer.py", "{facts}"),
        dry=("--cpu", "--after", "0"),
    ),
    Part(
        "silent",
        "one of three ranks is killed, and NCCL's report does not reach the others: when each names it",
        70,
        ("scripts/gpu_peer.py", "{facts}", "--ranks", "3", "--silent", "--after", "15"),
        dry=("--cpu", "--after", "0"),
    ),
    Part(
        "mesh",
        "8 ranks as 2 nodes of 4: every algorithm and way to attach, beside the same over gloo",
        200,
        ("scripts/gpu_mesh.py", "{facts}"),
        dry=("--cpu", "--ranks", "4", "--only", "during_backward(Hierarchical", "no_sync", "resume", "unequal"),
    ),
    Part(
        "real",
        "steps of a GPT of 124 million values at the rates of slow networks, DDP and its hooks beside ours",
        300,
        ("scripts/gpu_real.py", "{facts}"),
        dry=("--cpu", "--values", "small", "--rates", "100mbit"),
    ),
    Part(
        "staged",
        "the same by gloo, through the memory of the host: DDP beside ours, and NCCL within nodes of two ranks",
        240,
        ("scripts/gpu_real.py", "{facts}", "--staged", "--seconds", "220"),
        dry=("--cpu", "--values", "small", "--rates", "100mbit"),
    ),
    Part(
        "roofline",
        "every kernel against the speed of a copy",
        140,
        ("-m", "bench.roofline", "--out", "{out}", "--seconds", "110"),
        dry=("--largest", "10", "--seconds", "600"),
    ),
    Part(
        "comparison",
        "each kernel's share of a copy's speed beside the predicted one",
        110,
        ("scripts/gpu_compare.py", "{out}", "--facts", "{facts}"),
        dry=("--cpu",),
    ),
    Part(
        "profile",
        "where a step of bytegrad with 350 MB of gradients spends its time",
        60,
        ("-m", "bench.step_profile", "--out", "{out}", "--facts", "{facts}"),
        dry=("--cpu", "--megabytes", "1"),
    ),
    Part(
        "overlap",
        "steps and flights of buckets with lanes of priority 0 and -1, beside DDP, and of nodes with one lane and two",
        200,
        ("scripts/gpu_overlap.py", "{facts}"),
        dry=("--cpu", "--megabytes", "1"),
    ),
    Part(
        "exchange",
        "means in one kernel: virtual ranks, processes, beside a backward, and without one of the ranks",
        180,
        ("scripts/gpu_exchange.py", "{facts}"),
        dry=("--cpu",),
    ),
    Part(
        "plugin",
        "NCCL loads our network plugin: its name, messages, groups, a kill, a second life, and rates under a cap",
        200,
        ("scripts/gpu_plugin.py", "{facts}"),
        dry=("--cpu", "--megabytes", "2"),
    ),
    Part(
        "users",
        "compressors, primitives and optimizer steps on the GPU",
        100,
        (*PYTEST, *PARALLEL, "-k", f"not ({FOR_CPUS})", "tests/test_compressors.py", "tests/primitives", "tests/optim"),
    ),
    Part(
        "benchmarks",
        "bench/, each checked before it is timed",
        170,
        ("-m", "pytest", "--benchmark", "-q", "-p", "no:cacheprovider", "--table={facts}"),
    ),
    Part(
        "rest",
        "all other tests, the slow ones too",
        460,
        (*PYTEST, "-m", "", f"--ignore={NCCL}", "tests"),
        dry=("--collect-only", "-qqq"),
    ),
)
SECONDS = 480  # that a call may take
