"""Time of a piece of work, and the share that it reaches of the speed of a copy timed in the same run."""

import datetime
import platform
import shutil
import statistics
import subprocess
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

from baguakit.kernels import operators

from .speed import reading

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"

Work = Callable[[], object]


def seconds(work: Work, repeats: int = 15, shortest: float = 0.0) -> float:
    """The median time of one call: by CUDA events on a GPU, by the clock elsewhere.

    What takes less than `shortest` seconds is called several times in a row for each reading, up to a thousand.
    """
    once = reading(work, DEVICE)  # not counted: it may compile
    calls = min(1000, max(1, int(shortest / max(min(once, reading(work, DEVICE)), 1e-7))))
    return statistics.median(reading(work, DEVICE, calls) for _ in range(repeats))


def clock_of(work: Work, taken: float) -> int | None:
    """Return the megahertz of a GPU's multiprocessors while it works, or None where nothing says them.

    Args:
        taken: seconds of one call, which is repeated for half a second meanwhile.
    """
    if not GPU or shutil.which("nvidia-smi") is None:
        return None
    for _ in range(min(1000, int(0.5 / taken) + 1)):
        work()
    device = f"--id=GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
    asked = ["nvidia-smi", "--query-gpu=clocks.sm", "--format=csv,noheader,nounits", device]
    said = subprocess.run(asked, capture_output=True, text=True).stdout.strip()
    torch.cuda.synchronize()
    return int(said) if said.isdigit() else None


def as_defined(work: Work) -> Work:
    """Return a function that does the work by the definitions, on any device."""

    def defined() -> None:
        with mock.patch.object(
            operators, "MODULES", {name: (each[0],) * 3 for name, each in operators.MODULES.items()}
        ):
            work()

    return defined


def copy_of(values: int) -> Work:
    """A copy of so many fp32 values: 8 bytes each, read and written."""
    source = torch.randn(values, device=DEVICE)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def measure(benchmark: Any, work: Work, values: int, count: int, repeats: int = 15) -> None:
    """Time `work` on so many fp32 values, which must move `count` bytes, against a copy timed before and after it."""
    copy, shortest = copy_of(values), 1e-3 if GPU else 0.0  # else a reading would count the launch, too
    before = seconds(copy, shortest=shortest)
    taken = seconds(work, repeats, shortest)
    copied = (before + seconds(copy, shortest=shortest)) / 2
    benchmark.pedantic(work, rounds=3, iterations=1, warmup_rounds=0)
    benchmark.extra_info |= {
        "device": device_name(),
        "values": values,
        "bytes": count,
        "milliseconds": round(taken * 1e3, 3),
        "gb_per_s": round(count / taken / 1e9, 2),
        "copy_gb_per_s": round(8 * values / copied / 1e9, 2),
        "share_of_copy_in_bytes": round(count / taken / (8 * values / copied), 3),
        "share_of_copy_in_values": round(copied / taken, 3),
        "beside": f"{count / taken / (8 * values / copied):.2f} of the bytes a second of a copy",
    }
    info = benchmark.extra_info
    print(
        f"\n{benchmark.name}: {info['milliseconds']} ms, {info['gb_per_s']} GB/s; copy {copied * 1e3:.3f} ms; share "
        f"{info['share_of_copy_in_bytes']:.2f} in bytes, {info['share_of_copy_in_values']:.2f} in values"
    )


def device_name() -> str:
    if GPU:
        return torch.cuda.get_device_name()
    threads = torch.get_num_threads()
    return f"CPU, {'one thread' if threads == 1 else f'{threads} threads'}"


def machine() -> dict[str, Any]:
    """Return the hardware and versions that a figure was measured with."""
    try:
        import triton

        triton_version = triton.__version__
    except ImportError:
        triton_version = None
    return {
        "device": device_name(),
        "processor": _processor(),
        "torch": torch.__version__,
        "triton": triton_version,
        "cuda": torch.version.cuda if GPU else None,
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
