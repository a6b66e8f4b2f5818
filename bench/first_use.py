"""Seconds that the first use of kernels on CPUs takes: `python -m bench.first_use`

Every row is a new process, whose imports are not counted. With an empty cache it waits for the C compiler; the next
process finds the library. CPU seconds are those of the compiler, whatever else the machine does.
"""

import os
import subprocess
import sys
import tempfile

USES = {
    "one format": "compressors.MinMaxUInt8().compress(x)",
    "six formats": "[each().compress(x) for each in FORMATS]",
    "everything": "[operation.ready(1024, 'cpu')() for operation in listed]",
}
CODE = """
import resource, time, torch
from baguakit import compressors
from bench.speed import operations
from baguakit.compressors import Float8, MinMaxUInt8, Sign, UInt2, UInt4, Uniform
FORMATS, listed, x = (Float8, MinMaxUInt8, Sign, UInt2, UInt4, Uniform), [*operations()], torch.randn(1, 1024)
torch.randn(1) @ torch.randn(1)
began = time.perf_counter()
{use}
taken, spent = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
print(taken, spent.ru_utime + spent.ru_stime)
"""


def measured(use: str, cache: str) -> tuple[float, float]:
    """Return the seconds of a use in a new process, and the CPU seconds of the compiler."""
    run = subprocess.run(
        [sys.executable, "-c", CODE.format(use=use)],
        env={**os.environ, "XDG_CACHE_HOME": cache},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    taken, spent = map(float, run.stdout.split())
    return taken, spent


def main() -> None:
    print(f"{'':<14}{'first process':>24}{'second process':>18}")
    for name, use in USES.items():
        with tempfile.TemporaryDirectory() as cache:
            first, compiled = measured(use, cache)
            second, _ = min(measured(use, cache) for _ in range(3))
        print(f"{name:<14}{f'{first:.2f} s ({compiled:.2f} s CPU)':>24}{f'{second * 1e3:.1f} ms':>18}", flush=True)


if __name__ == "__main__":
    main()
