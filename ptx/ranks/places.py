"""Whose memory it is: each byte that kernels of several ranks access is part of one tensor, of one rank or of all."""

from bisect import bisect_right, insort
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..faults import MemoryFault, OwnerFault
from ..memory import Region, region_of


@dataclass(frozen=True, order=True)
class Part:
    """Bytes from `begin` up to `end`.

    Attributes:
        name: for messages: "inbox of rank 1".
        home: the rank in whose memory it is.
        shared: kernels of all ranks may access it.
        signals: its words order accesses.
        first: the number of its first byte among those of all parts.
        whole: where the tensor begins of which it is a part.
    """

    begin: int
    end: int
    name: str
    home: int
    shared: bool
    signals: bool
    first: int
    whole: int


class Places:
    """Parts of memory, none of which overlap."""

    def __init__(self):
        self.parts: list[Part] = []
        self.count = 0
        self._index()

    def declare(self, tensors: dict[str, list[Any]], ranks: int, signals: bool) -> list[Region]:
        """Add symmetric memory: for each name a tensor of each rank. Return its regions."""
        regions = []
        for name, each in tensors.items():
            if len(each) != ranks:
                raise ValueError(f"{name} has {len(each)} tensors, and there are {ranks} ranks: give one of each rank")
            for rank, tensor in enumerate(each):
                regions.append(region_of(tensor, f"{name} of rank {rank}"))
                self.add(regions[-1], rank, True, signals)
        return regions

    def add(self, region: Region, home: int, shared: bool = False, signals: bool = False) -> None:
        """Add what is not yet known of a region; raise OwnerFault if another has a part of it."""
        at = region.begin
        while at < region.end:
            place = bisect_right(self.parts, at, key=lambda part: part.begin) - 1
            here = self.parts[place] if place >= 0 and at < self.parts[place].end else None
            if here is None:
                following = self.parts[place + 1].begin if place + 1 < len(self.parts) else region.end
                end = min(region.end, following)
                insort(self.parts, Part(at, end, region.name, home, shared, signals, self.count, region.begin))
                self.count += end - at
                at = end
                continue
            if here.home != home and not here.shared:
                raise OwnerFault(f"{region.name} and {here.name} are the same memory, which is not declared symmetric")
            if shared and (here.signals, here.home) != (signals, home):
                raise OwnerFault(f"{region.name} and {here.name} are the same memory, declared twice")
            at = here.end
        self._index()

    def _index(self):
        self.begins = np.array([part.begin for part in self.parts], np.int64)
        self.ends = np.array([part.end for part in self.parts], np.int64)
        self.firsts = np.array([part.first for part in self.parts], np.int64)
        self.homes = np.array([part.home for part in self.parts], np.int64)
        self.shared = np.array([part.shared for part in self.parts], bool)
        self.signals = np.array([part.signals for part in self.parts], bool)

    def find(self, access, addresses: np.ndarray, rank: int) -> np.ndarray:
        """Return the part in which each address of an access lies; raise a Fault where a rank has no access."""
        part = np.searchsorted(self.begins, addresses, side="right") - 1
        unknown = (part < 0) | (addresses >= self.ends[part]) if self.parts else np.ones(len(addresses), bool)
        if unknown.any():  # the kernel has its address from a table
            address = int(addresses[np.argmax(unknown)])
            [region] = [each for each in access.frame.memory.regions if each.begin <= address < each.end]
            self.add(Region(region.begin, region.end, f"{region.name} of rank {rank}"), rank)
            return self.find(access, addresses, rank)
        wrong = (self.homes[part] != rank) & ~self.shared[part]
        if wrong.any():
            self._refuse(access, addresses, part, wrong)
        beyond = (addresses + access.width > self.ends[part]) & self.shared[part]
        if beyond.any():
            place = int(np.argmax(beyond))
            raise MemoryFault(
                f"{access.instruction.place}: {access.frame.thread(access.on, beyond)} accesses {access.width} bytes "
                f"at {self.name(int(addresses[place]))}, which goes on behind its end"
            )
        return part

    def _refuse(self, access, addresses, part, wrong):
        place = int(np.argmax(wrong))
        raise OwnerFault(
            f"{access.instruction.place}: {access.frame.thread(access.on, wrong)} accesses "
            f"{self.name(int(addresses[place]))}, which is not symmetric"
        )

    def name(self, address: int) -> str:
        """Name a byte: "byte 4 of inbox of rank 1"."""
        place = bisect_right(self.parts, address, key=lambda part: part.begin) - 1
        if place < 0 or address >= self.parts[place].end:
            return f"byte {address:#x}"
        return f"byte {address - self.parts[place].whole} of {self.parts[place].name}"
