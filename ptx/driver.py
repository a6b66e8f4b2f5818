"""Triton's driver of a GPU that is executed: our launchers run unchanged, with tensors on the CPU.

Triton compiles a kernel for the GPU's architecture as far as PTX. The text stands where the assembler's binary would,
so Triton keeps it in its own cache, by the hash of the kernel and of Triton, and hands it to `load_binary`.
"""

import contextlib
import math
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from .faults import Unknown
from .machine import Launch, Program
from .memory import Global, Region, in_tables, regions_of

SHARED = {80: 166912, 90: 232448, 100: 232448}  # bytes of shared memory that a program can have, by architecture
FLOATS = {"fp16": "<e", "fp32": "<f", "f32": "<f", "fp64": "<d"}
SCRATCH = 2  # parameters behind the kernel's own, for memory that Triton's runtime would provide: unused


@dataclass(frozen=True)
class Launched:
    """A launch: of which kernel, on which grid, what was executed, and Triton's own description of the kernel."""

    name: str
    grid: tuple[int, int, int]
    program: Program
    source: Any
    metadata: Any


@dataclass(frozen=True)
class Prepared:
    """A launch that can run: `others` yields memory that the kernel knows from tables alone."""

    program: Program
    grid: tuple[int, int, int]
    arguments: tuple[int, ...]
    regions: list[Region]
    others: Callable[[], Iterable[Region]] | None = None
    shared: int = 0
    tensors: tuple = ()  # which live as long

    @property
    def programs(self) -> int:
        return math.prod(self.grid)


@dataclass
class Executed:
    """A GPU of an architecture, 80, 90 or 100, as Triton's driver sees it.

    Attributes:
        launches: each as it was `Launched`.
        watchers: makes what watches a launch's accesses to memory, for each anew.
        queue: where launches are kept that are not to run yet; see `queued`.
    """

    arch: int
    launches: list[Launched] = field(default_factory=list)
    watchers: tuple = ()
    queue: list[Prepared] | None = None

    @contextlib.contextmanager
    def queued(self) -> Iterator[list[Prepared]]:
        """Within it, launches do not run: they are appended to a list."""
        self.queue, before = [], self.queue
        try:
            yield self.queue
        finally:
            self.queue = before

    def __post_init__(self):
        self.utils = self

    # What Triton asks of a driver.

    def get_current_target(self):
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self):
        return self.arch  # Triton keeps what it has compiled by device

    def set_current_device(self, device):
        pass

    def get_current_stream(self, device=None):
        return 0

    def get_active_torch_device(self):
        return torch.device("cpu")

    # What Triton asks of its utilities.

    def get_device_properties(self, device):
        return {"max_shared_mem": SHARED[self.arch], "multiprocessor_count": 132, "warpSize": 32}

    def load_binary(self, name, kernel, shared, device):
        return name, Program(kernel.decode()), 0, 0, 1024  # a module, a function, registers, spills, threads

    def launcher_cls(self, source, metadata):
        def launch(x, y, z, stream, function, packed, launch_metadata, enter, leave, *arguments):
            # Triton may have compiled the kernel while another driver was active.
            driver.active.launch(function, source, metadata, (x, y, z), arguments)

        return launch

    def launch(self, program, source, metadata, grid, arguments):
        kinds = [source.signature[name] for name in source.fn.arg_names]
        given = [
            (name, kind, value)
            for name, kind, value in zip(source.fn.arg_names, kinds, arguments, strict=True)
            if kind != "constexpr"
        ]
        raw = [raw_argument(*each) for each in given]
        regions = regions_of((name, x) for name, kind, x in given if kind[0] == "*")
        addresses = {each.name: each.start for each in regions}
        raw = [addresses.get(name, bits) for (name, _, _), bits in zip(given, raw, strict=True)]
        if len(program.kernel.parameters) not in (len(raw), len(raw) + SCRATCH):
            raise Unknown(f"{program.kernel.name} has other parameters than Triton says")
        raw += [0] * (len(program.kernel.parameters) - len(raw))
        self.launches.append(Launched(metadata.name, grid, program, source, metadata))
        tables, tensors = ([x for _, kind, x in given if kind[: len(star)] == star] for star in ("*i64", "*"))
        made = Prepared(program, grid, tuple(raw), regions, lambda: in_tables(tables), metadata.shared, tuple(tensors))
        if self.queue is not None:
            self.queue.append(made)
        elif made.programs:
            memory, observers = Global(regions, made.others), tuple(make() for make in self.watchers)
            program.run(Launch(grid, made.arguments, memory, made.shared, observers))


def raw_argument(name, kind, value):
    """Return the bits of an argument of a kernel; `kind` is Triton's word for its type."""
    if kind[0] == "*":
        if not isinstance(value, torch.Tensor) or value.device.type != "cpu":
            raise TypeError(f"{name}: the executor takes tensors on the CPU, not {value!r}")
        return value.data_ptr()
    if kind == "bf16":
        return struct.unpack("<I", struct.pack("<f", value))[0] >> 16
    if kind in FLOATS:
        return int.from_bytes(struct.pack(FLOATS[kind], value), "little")
    if kind[0] not in "iu" or not kind[1:].isdigit():
        raise TypeError(f"{name}: the executor knows no argument of type {kind}")
    bits, least = int(kind[1:]), 0 if kind[0] == "u" else -(1 << (int(kind[1:]) - 1))
    if not least <= int(value) < least + (1 << bits) and bits > 1:
        raise TypeError(f"{name}: {value} does not fit in {kind}")
    return int(value)


def text_for_binary(*stages):
    """Triton's hook: the last stage leaves the text of PTX as it is. Without arguments, what to add to cache keys."""
    if not stages:
        return "executed", "executed"
    stages[1]["cubin"] = lambda ptx, metadata: ptx.encode()
    return None


@contextlib.contextmanager
def executed(arch: int, **options) -> Iterator[Executed]:
    """Within it, kernels that are launched are compiled for an architecture and executed."""
    gpu, before = Executed(arch, **options), knobs.runtime.add_stages_inspection_hook
    knobs.runtime.add_stages_inspection_hook = text_for_binary
    driver.set_active(gpu)
    try:
        yield gpu
    finally:
        driver.set_active(None)  # the next to ask gets the default, if there is one
        knobs.runtime.add_stages_inspection_hook = before
