"""Calls of compiled kernels, recorded in files, which a program of another compiler or machine repeats.

As a plugin of pytest (`-p replay`) it records the calls that tests make, in the folder RECORDED: for each family a file
of calls, with their arguments and all memory that these lead to, before and after. `replay.c` repeats them with only
the C file of the family, and compares what they write with what was recorded, which the tests compare with the
definitions. Memory is that of tensors whose `data_ptr` was asked for: they are kept alive, unless they are large.
"""

import ctypes
import hashlib
import os
import struct
from bisect import bisect_right, insort
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from baguakit.kernels import cpu

INTEGERS, ALIGNED = 24, 64  # as in replay.c
DTYPES = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3, torch.float64: 4}  # all else is bytes: 0
LARGE = 1 << 18  # bytes: calls with larger tensors are not recorded
ADDRESSES = range(1 << 40, 1 << 47)  # of tensors; tables hold other integers, too

address_of, plain_call = torch.Tensor.data_ptr, cpu.call
tensors: dict[int, tuple[torch.Tensor, int]] = {}  # by address: a tensor and the bytes from its first to its last value
starts: list[int] = []  # of `tensors`, sorted
names: dict[str, set[str]] = {}  # of the functions that were called, by family
seen: set[bytes] = set()


class Large(Exception):
    """A call works on a large tensor."""


def pytest_configure() -> None:
    torch.Tensor.data_ptr = data_ptr  # type: ignore[method-assign]
    cpu.call = call


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out slow tests, except those of C files: most of them interpret GPU kernels."""
    items[:] = [each for each in items if "slow" not in each.keywords or each.name.startswith("test_c_")]


def pytest_unconfigure() -> None:
    for family, called in names.items():
        entries = "".join(f"X({name})" for name in sorted(called))
        Path(os.environ["RECORDED"], f"{family}.names").write_text(entries)


def data_ptr(x: torch.Tensor) -> int:
    at = address_of(x)
    if not at or type(x) not in (torch.Tensor, torch.nn.Parameter):
        return at
    size = x.element_size() * (1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True)))
    size = size if x.numel() else 0
    if at not in tensors:
        insort(starts, at)
    before, bytes_before = tensors.get(at, (None, 0))
    alike = before is not None and before.untyped_storage()._cdata == x.untyped_storage()._cdata
    if not alike or bytes_before < size:
        tensors[at] = (x.detach() if size <= LARGE else x.new_empty(0), size)
    return at


def call(family: str, name: str, *arguments: Any) -> None:
    """Record a call, unless it equals an earlier one, or takes large tensors."""
    try:
        made = Call(name, arguments)
        before = made.memory()
    except Large:
        return plain_call(family, name, *arguments)
    plain_call(family, name, *arguments)
    digest = hashlib.sha256(b"".join([made.head(), *before])).digest()
    if digest not in seen:
        seen.add(digest)
        names.setdefault(family, set()).add(name)
        with open(Path(os.environ["RECORDED"], f"{family}.calls"), "ab") as file:
            file.writelines(made.parts(before))
    return None


class Call:
    """The arguments of a call and the memory they lead to, in regions that do not overlap."""

    def __init__(self, name: str, arguments: Sequence[Any]) -> None:
        self.name = name
        self.integers = list(map(cpu._word, arguments))
        found = [x for x in arguments if isinstance(x, ctypes.Structure | ctypes.Array)]
        self.objects = {ctypes.addressof(x): ctypes.sizeof(x) for x in found}  # bytes by address
        self.links: list[tuple[int, int, int]] = []  # start of a region or -1, the place in it, the address there
        self.regions: dict[int, tuple[int, int]] = {}  # (end, dtype) by start
        todo = [(-1, i, each) for i, each in enumerate(self.integers) if each in ADDRESSES]
        while todo:
            link = todo.pop()
            start, end, dtype, table = self.find(link[2])
            if start == end == 0:
                assert link[0] >= 0, f"argument {link[1]} of {name} leads to memory of which data_ptr was not asked"
                continue
            self.links.append(link)
            if start not in self.regions:
                self.regions[start] = end, dtype
                words = memory(start, end)[: (end - start) // 8 * 8] if table else b""
                found = enumerate(struct.unpack(f"{len(words) // 8}q", words))
                todo += [(start, 8 * i, word) for i, word in found if word in ADDRESSES]
        self.join()

    def find(self, at: int) -> tuple[int, int, int, bool]:
        """Return the region that an address is in: start, end, dtype, whether it may hold addresses; or zeros."""
        for start, size in self.objects.items():
            if start <= at < start + size:
                return start, start + size, 0, True
        for start in reversed(starts[: bisect_right(starts, at)]):
            x, size = tensors[start]
            if at < start + max(size, 1):
                if size > LARGE:
                    raise Large
                return start, start + size, DTYPES.get(x.dtype, 0), x.dtype == torch.int64
        return 0, 0, 0, False

    def join(self) -> None:
        """Make one region of those that overlap."""
        joined = dict[int, tuple[int, int]]()
        moved = {-1: (-1, 0)}  # where each region is now
        for start, (end, dtype) in sorted(self.regions.items()):
            last = next(reversed(joined), None)
            if last is not None and start < joined[last][0]:
                joined[last] = max(end, joined[last][0]), dtype if dtype == joined[last][1] else 0
            else:
                last, joined[start] = start, (end, dtype)
            moved[start] = last, start - last
        self.links = [(moved[region][0], at + moved[region][1], address) for region, at, address in self.links]
        self.regions = joined

    def memory(self) -> list[bytes]:
        return [memory(start, end) for start, (end, _) in self.regions.items()]

    def head(self) -> bytes:
        """Return a `Call` of replay.c, with zeros where addresses are."""
        linked = {at for region, at, _ in self.links if region < 0}
        integers = [0 if i in linked else value for i, value in enumerate(self.integers)]
        threads = len(integers) - 1
        integers += [0] * (INTEGERS - len(integers))
        counts = len(self.regions), len(self.links), threads, 0
        return struct.pack(f"<32s4i{INTEGERS}q", self.name.encode(), *counts, *integers)

    def parts(self, before: Sequence[bytes]) -> Iterator[bytes]:
        """Yield what the file holds of this call, which has returned."""
        yield self.head()
        order = {-1: -1} | {start: i for i, start in enumerate(self.regions)}
        for region, at, address in self.links:
            target = max(start for start in self.regions if start <= address)
            yield struct.pack("<2i2q", order[region], order[target], at, address - target)
        for (start, (end, dtype)), first in zip(self.regions.items(), before, strict=True):
            yield struct.pack("<q2i", end - start, dtype, start % ALIGNED) + first + memory(start, end)


def memory(start: int, end: int) -> bytes:
    return ctypes.string_at(start, end - start)
