"""Global and shared memory: PTX ISA, sections 5.1 "State Spaces" and 6.4.1 "Addresses as Operands".

Both have `load` and `store`, which move `count` neighbouring elements of `size` bytes for each lane, and check first
that every address is a multiple of all that is moved and lies in memory that the kernel was given. A load may be of
addresses that lie far apart: memory is one array of NumPy from the lowest byte that is known to the highest, and only
what the check has passed is ever touched.

A kernel knows a tensor that is its argument by an address of the executor's own, 2⁴⁰ bytes from that of any other. So
what is computed from the address of one never reaches another, nor the rest of a storage of which it is a view. An
address that a kernel loads from a table is that of the tensor itself.
"""

import ctypes
import gc
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .faults import MemoryFault
from .numbers.types import UNSIGNED

POISON = 0xA5  # of every byte of registers and shared memory that nothing was written to
ALIGNMENT = 16
ARGUMENTS, GAP = 1 << 56, 1 << 40  # where arguments begin to a kernel, and how far from one another: nothing lies there
PAGE = 4096  # within it an address tells the same of lines and sectors wherever the page lies


@dataclass(frozen=True)
class Region:
    """Bytes from `begin` up to `end`, and what they are to the user.

    Attributes:
        at: the address by which a kernel knows the first of them; None if that is `begin`.
    """

    begin: int
    end: int
    name: str
    at: int | None = None

    @property
    def start(self):
        return self.begin if self.at is None else self.at

    @property
    def stop(self):
        return self.start + self.end - self.begin


class Space:
    """Global or shared memory: elements by their index in `self.bytes`."""

    bytes: np.ndarray

    def elements(self, size):
        return self.bytes[: self.bytes.size // size * size].view(UNSIGNED[8 * size])

    def load(self, frame, on, addresses, size, count, instruction):
        """Return `count` arrays of raw elements, one for each lane."""
        first = self.places(frame, on, addresses, size, count, instruction)
        elements = self.elements(size)
        return [elements[first + k] for k in range(count)]

    def store(self, frame, on, addresses, size, values, instruction):
        """Store arrays of raw elements; of lanes with one address, the last remains."""
        first = self.places(frame, on, addresses, size, len(values), instruction, values)
        elements = self.elements(size)
        for k, value in enumerate(values):
            elements[first + k] = value

    def aligned(self, frame, on, addresses, width, instruction):
        wrong = addresses % width != 0
        if wrong.any():
            where = frame.thread(on, wrong)
            raise MemoryFault(
                f"{instruction}: {where} accesses address {int(_first(addresses, wrong)):#x}, "
                f"which is no multiple of the {width} bytes accessed"
            )


class Global(Space):
    """The memory of tensors.

    Args:
        regions: those that a launch was given.
        others: yields further ones; called once, when an address lies in none.
    """

    def __init__(self, regions: Iterable[Region], others: Callable[[], Iterable[Region]] | None = None):
        self.others = others
        self._lay(regions)

    def _lay(self, regions):
        regions = sorted((each for each in regions if each.end > each.begin), key=lambda each: (each.start, -each.end))
        merged = []
        for each in regions:
            if merged and each.start <= merged[-1].stop:
                last = merged.pop()
                name = last.name if last.end >= each.end else f"{last.name}, {each.name}"
                each = Region(last.begin, max(last.end, each.end), name, last.at)
            merged.append(each)
        self.regions = merged
        self.starts, self.stops, self.moved = (
            np.array([fact(each) for each in merged], np.int64)
            for fact in (lambda each: each.start, lambda each: each.stop, lambda each: each.begin - each.start)
        )
        if merged:
            self.origin = min(each.begin for each in merged) // ALIGNMENT * ALIGNMENT
            length = -(-max(each.end for each in merged) // ALIGNMENT) * ALIGNMENT - self.origin
            self.bytes = np.ctypeslib.as_array((ctypes.c_uint8 * length).from_address(self.origin))
        else:
            self.origin, self.bytes = 0, np.zeros(0, np.uint8)

    def places(self, frame, on, addresses, size, count, instruction, values=()):
        width = size * count
        self.aligned(frame, on, addresses, width, instruction)
        place, outside = self._outside(addresses, width)
        if outside.any() and self.others:
            regions, self.others = [*self.regions, *self.others()], None
            self._lay(regions)
            place, outside = self._outside(addresses, width)
        if outside.any():
            self._refuse(frame, on, addresses, outside, width, instruction)
        addresses = addresses + self.moved[place]
        frame.seen("global", on, addresses, width, instruction, values)
        return (addresses - self.origin) // size

    def _outside(self, addresses, width):
        """Return the region in which each address lies, and which accesses do not lie in it."""
        if len(self.regions) == 0:
            return np.zeros(addresses.shape, int), np.ones(addresses.shape, bool)
        place = np.searchsorted(self.starts, addresses, side="right") - 1
        return place, (place < 0) | (addresses + width > self.stops[place])

    def name_at(self, address):
        """Name the tensor of which a byte is part, by its address in memory."""
        return ", ".join(each.name for each in self.regions if each.begin <= address < each.end)

    def _refuse(self, frame, on, addresses, outside, width, instruction):
        address = int(_first(addresses, outside))
        near = min(self.regions, key=lambda each: max(each.start - address, address + width - each.stop), default=None)
        hint = f"the nearest memory is {near.name}" if near else "it was given none"
        if near and address < near.start:
            hint += f", {near.start - address} bytes further on"
        elif near:
            hint += f", which ends {address + width - near.stop} bytes before the end of the access"
        raise MemoryFault(
            f"{instruction}: {frame.thread(on, outside)} accesses {width} bytes at {address:#x}, "
            f"outside every tensor that the kernel can know: {hint}"
        )


def region_of(tensor, name) -> Region:
    """Return the bytes from a tensor's first value to its last; none of a tensor whose storage has been freed."""
    storage = tensor.untyped_storage()
    if tensor.numel() == 0 or storage.nbytes() == 0:
        return Region(0, 0, name)
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    begin = tensor.data_ptr()
    return Region(begin, min(begin + reach * tensor.itemsize, storage.data_ptr() + storage.nbytes()), name)


def regions_of(tensors: Iterable[tuple[str, Any]]) -> list[Region]:
    """Return the regions of a kernel's arguments, given by name, at addresses of their own."""
    found = [region_of(tensor, name) for name, tensor in tensors]
    return [replace(each, at=ARGUMENTS + place * GAP + each.begin % PAGE) for place, each in enumerate(found, start=1)]


def in_tables(tables) -> Iterator[Region]:
    """Yield the regions of living tensors whose addresses stand in tables: tensors of int64.

    They are those that begin at an address; where none begins, those of which it is a part.
    """
    addresses = {int(each) for table in tables for each in table.reshape(-1).tolist()}
    living = [*living_tensors()]
    addresses_within = sorted(addresses - {each.begin for each in living})
    for each in living:
        place = bisect_left(addresses_within, each.begin)
        if each.begin in addresses or (place < len(addresses_within) and addresses_within[place] < each.end):
            yield each


def living_tensors() -> Iterator[Region]:
    """Yield the regions of all tensors on the CPU that Python knows."""
    import torch

    for each in gc.get_objects():
        ordinary = type(each) in (torch.Tensor, torch.nn.Parameter)  # no fakes, which have no memory
        if ordinary and each.device.type == "cpu" and each.layout == torch.strided:
            yield region_of(each, f"a tensor of shape {tuple(each.shape)}")


class Shared(Space):
    """Shared memory: a row of bytes for each program. Addresses count from its beginning."""

    def __init__(self, programs, size):
        self.size, self.row = size, -(-max(size, 1) // ALIGNMENT) * ALIGNMENT
        self.bytes = np.full(programs * self.row, POISON, np.uint8)

    def places(self, frame, on, addresses, size, count, instruction, values=()):
        width = size * count
        self.aligned(frame, on, addresses, width, instruction)
        outside = (addresses < 0) | (addresses + width > self.size)
        if outside.any():
            address = int(_first(addresses, outside))
            raise MemoryFault(
                f"{instruction}: {frame.thread(on, outside)} accesses {width} bytes at {address} of shared memory, "
                f"of which a program has {self.size}"
            )
        frame.seen("shared", on, addresses, width, instruction, values)
        program = frame.program if on is None else frame.program[on]
        return (program * self.row + addresses) // size


def _first(values, where):
    return np.broadcast_to(values, where.shape)[np.argmax(where)]
