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

INTEGERS, NUMBERS, ALIGNED = 16, 8, 64  # as in replay.c
DTYPES = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3, torch.float64: 4}  # all else is bytes: 0
LARGE = 1 << 18  # bytes: calls with larger tensors are not recorded
ADDRESSES = range(1 << 40, 1 << 47)  # of tensors; tables hold other integers, too

address_of = torch.Tensor.data_ptr
tensors: dict[int, tuple[torch.Tensor, int]] = {}  # by address: a tensor and the bytes from its first to its last value
starts: list[int] = []  # of `tensors`, sorted
names: dict[str, set[str]] = {}  # of the functions that were called, by family
seen: set[bytes] = set()


class Large(Exception):
    """A call works on a large tensor."""


def pytest_configure() -> None:
    torch.Tensor.data_ptr = data_ptr  # type: ignore[method-assign]
    found = cpu._library
    cpu._library = lambda family: Library(family, found(family))  # type: ignore[assignment]


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


class Library:
    """The functions of a library, which record their calls."""

    def __init__(self, family: str, library: ctypes.CDLL) -> None:
        self._family, self._library = family, library

    def __getattr__(self, name: str) -> Any:
        function = Function(self._family, name, getattr(self._library, name))
        setattr(self, name, function)
        return function


class Function:
    """A function that records its calls; those that equal an earlier one, or take large tensors, are left out."""

    def __init__(self, family: str, name: str, function: Any) -> None:
        self.__dict__.update(family=family, name=name, function=function)

    def __setattr__(self, name: str, value: Any) -> None:  # argtypes and restype
        setattr(self.function, name, value)

    def __call__(self, *arguments: Any) -> Any:
        try:
            call = Call(self.name, arguments, self.function.argtypes)
            before = call.memory()
        except Large:
            return self.function(*arguments)
        result = self.function(*arguments)
        digest = hashlib.sha256(b"".join([call.head(), *before])).digest()
        if digest not in seen:
            seen.add(digest)
            names.setdefault(self.family, set()).add(self.name)
            with open(Path(os.environ["RECORDED"], f"{self.family}.calls"), "ab") as file:
                file.writelines(call.parts(before))
        return result


class Call:
    """The arguments of a call and the memory they lead to, in regions that do not overlap."""

    def __init__(self, name: str, arguments: Sequence[Any], types: Sequence[Any] | None) -> None:
        self.name, self.integers, self.numbers = name, list[int](), list[int]()
        self.objects: dict[int, int] = {}  # of ctypes: bytes by address
        for i, argument in enumerate(arguments):
            self.take(argument, types[i] if types else None)
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

    def take(self, argument: Any, kind: Any) -> None:
        """Add an argument to the integers or to the numbers."""
        given = getattr(argument, "_obj", argument)  # of byref
        if isinstance(given, (ctypes.Structure, ctypes.Array)):
            self.objects[ctypes.addressof(given)] = ctypes.sizeof(given)
            self.integers.append(ctypes.addressof(given))
        elif isinstance(given, (float, ctypes.c_float, ctypes.c_double)):
            wide = ctypes.c_double in (kind, type(given))
            value = struct.pack("<d" if wide else "<f4x", getattr(given, "value", given))
            self.numbers += struct.unpack("<Q", value)
        else:
            self.integers.append(getattr(given, "value", given) or 0)

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
        numbers = self.numbers + [0] * (NUMBERS - len(self.numbers))
        counts = len(self.regions), len(self.links), threads, 0
        return struct.pack(f"<32s4i{INTEGERS}q{NUMBERS}Q", self.name.encode(), *counts, *integers, *numbers)

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
