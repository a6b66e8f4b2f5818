"""Versions of named tensors: one program publishes them, and others follow.

A *packet* leads from a version to a later one: a line of JSON with names, dtypes and shapes, and what `changes` packs
of each 8 MiB of each tensor; each with its digest, so that it is sent and checked while the next is packed. Version −1
has zeros in every tensor: changes from it are a whole copy. Changes fit only versions of the same random `run`.
"""

import json
import uuid
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..arguments import describe, instance, integer, package, real, tensor, truth
from ..comm import Comm
from ..tensors import check_apart, first_names, plain
from .folders import Folder
from .groups import Group
from .packing import DIGEST, Parts, add_, changes, longer, opened, read, sealed, shorter
from .streams import Pieces, Take, bytes_in, framed, next_body

Tensors = nn.Module | Mapping[str, Tensor]
Change = tuple[Tensor, int, Parts]  # a part of a tensor, from which version it is changed, and what was packed of it
NOTHING = -1  # the version before the first
RANGE = 1 << 23  # bytes of a tensor that are packed at once
FORMAT = 3  # of packets


class Publisher:
    """Publishes versions of a model's weights, or of named tensors.

    Args:
        tensors: a module, whose parameters and persistent buffers are published (tied ones once), or tensors by name.
            They may be views, such as the slice of a matrix that one subscriber holds. A copy of each is kept.
        to: a folder that subscribers read: on a shared disk, or copied on, oldest files first. Or a `Comm`, whose rank
            0 publishes to all others.
        keep: the bytes of changes that are kept, as a share of all values. In a folder, a whole copy is written when
            there are more, and files older than the whole copy before it are removed.
        zstd: the level, 1 to 22, at which zstd compresses what is sent; 0 for none. It needs the zstandard package.

    A publisher on a folder with versions goes on after the newest, with a whole copy.
    """

    def __init__(self, tensors: Tensors, to: str | Path | Comm, keep: float = 1.0, zstd: int = 0) -> None:
        self.tensors, self.run, self.zstd = tensors, uuid.uuid4().hex[:12], integer("zstd", zstd, 0, 22)
        if zstd:
            package("zstandard", "zstd=")
        self.place = place_of("to", to, real("keep", keep, 0) * sum(x.nbytes for x in named(tensors, True).values()))
        self.version: int = self.place.begin()
        self._kinds: Any = None  # of the tensors of the version before, of which `copies` are

    def publish(self) -> int:
        """Publish the values of now as the next version; return its number: 0, 1, 2 … With a `Comm`, collective."""
        tensors = named(self.tensors, True)
        kinds = [(name, x.shape, x.dtype, x.device) for name, x in tensors.items()]
        start = self.version if kinds == self._kinds else NOTHING
        if start == NOTHING:
            self.copies = {n: torch.zeros(x.shape, dtype=x.dtype, device=x.device) for n, x in tensors.items()}
        self._kinds = None  # after an error, the next version is a whole copy
        self.version += 1
        packet, whole = self._packed(start, tensors, self.copies), partial(self._packed, NOTHING, self.copies, {})
        self.place.add(packet, self.run, self.version, start == NOTHING, whole)
        self._kinds = kinds
        return self.version

    def _packed(self, start: int, tensors: Mapping[str, Tensor], copies: Mapping[str, Tensor]) -> Pieces:
        """Yield the packet from the copies, or from nothing, to the tensors, and copy these."""
        told = {"format": FORMAT, "zstd": self.zstd, "run": self.run, "from": start, "to": self.version}
        told["tensors"] = [[name, *facts(x)] for name, x in tensors.items()]
        yield from framed(sealed(bytes_in(json.dumps(told).encode().ljust(16))))
        for name, x in tensors.items():
            new = ranges(x)
            for part in map(changes, new, ranges(copies[name]) if copies else map(torch.zeros_like, new)):
                yield from framed(shorter(part, self.zstd) if self.zstd else part)

    def regroup(self, comm: Comm) -> None:
        """Go on in another group, after ranks were lost or have joined."""
        self.place.move(comm)


class Subscriber:
    """Follows the versions of a publisher: its tensors equal a published version, bit for bit.

    Args:
        tensors: as for `Publisher`: of the names, shapes and dtypes that are published, with any strides and devices.
            If a tensor has several names (tied weights), one of these must be published, and all that are must agree.
        source: the folder, or the `Comm`, of which this is any rank but 0.
        some: follow only some of the published tensors.
        early: apply changes as they come, and take them back if one that comes later is damaged or missing. Otherwise
            nothing is applied before everything is there. It is sooner, but tensors are between two versions as long
            as `update` runs: in both cases no other thread or process may read them meanwhile.
    """

    def __init__(self, tensors: Tensors, source: str | Path | Comm, some: bool = False, early: bool = False) -> None:
        self.given, self.some, self.early = tensors, truth("some", some), truth("early", early)
        check_apart(named(tensors))
        self.place = place_of("source", source, 0.0)
        self.version, self.run = NOTHING, ""  # the run of the publisher whose version this is
        self._written: Any = None  # where the tensors are, and how often torch has counted writes to them

    def update(self) -> int:
        """Bring the tensors to the newest version; return its number, −1 if there is none. With a `Comm`, collective.

        Raises:
            FileNotFoundError: the folder has a newer version, and not all files that lead there.
            ValueError: a packet is damaged, or has other names, shapes or dtypes; the tensors are as they were.
            RuntimeError: a tensor was changed here since the last update, or a rank was lost.
        """
        self.tensors, wholes = named(self.given), dict[str, Tensor]()
        applied, later = list[Change](), list[Change]()
        try:
            run, version = self._receive(wholes, applied, later)
            self._check_writes(applied)
        except BaseException:
            for values, _, part in reversed(applied):
                add_(values, part, -1)
            self._written = self._writes() if applied else self._written
            raise
        for values, start, part in later:
            add_(values.zero_() if start == NOTHING else values, part)
        for name, x in wholes.items():
            if x is not self.tensors[name]:
                self.tensors[name].detach().copy_(x)
        self.run, self.version, self._written = run, version, self._writes()
        return version

    def _receive(self, wholes: dict[str, Tensor], applied: list[Change], later: list[Change]) -> tuple[str, int]:
        """Take all packets, and apply those that may be early; return the run and version that they lead to."""
        at = self.run, self.version
        with self.place.packets_after(self.version, self.run) as packets:
            for where, take in packets:
                try:
                    while (packet := next_packet(take)) is not None:
                        at = self._take(packet, take, at, wholes, applied, later)
                except ValueError as error:
                    raise ValueError(f"{where}: {error}") from None
        return at

    def _take(
        self, packet: "Packet", take: Take, at: tuple[str, int],
        wholes: dict[str, Tensor], applied: list[Change], later: list[Change],
    ) -> tuple[str, int]:  # fmt: skip
        if packet.start != NOTHING and packet.version <= at[1]:
            deque(parts_of(packet, take, ()), 0)
            return at
        if packet.start != NOTHING and (packet.run, packet.start) != at:
            raise ValueError(f"changes came from version {packet.start}; the tensors have {at[1]}")
        ties = first_names(self.tensors)
        self._check(packet, ties)
        wholes.update({} if wholes else {one: plain(self.tensors[one]) for one in ties.values()})
        here, digests = {name: ranges(wholes[one]) for name, one in ties.items()}, dict[Any, tuple[str, bytes]]()
        early = self.early and packet.start != NOTHING and not later
        self._check_writes(applied)
        for name, i, packed in parts_of(packet, take, ties):
            values, digest = here[name][i], bytes(packed[:DIGEST].tolist())
            first, same = digests.setdefault((ties[name], i), (name, digest))
            if same != digest:
                raise ValueError(f"{first!r} and {name!r} are one tensor here, and differ where they are published")
            if first != name:
                continue
            part = read(packed.to(values.device), values)
            (applied if early else later).append((values, packet.start, part))
            if early:
                add_(values, part)
        return packet.run, packet.version

    def regroup(self, comm: Comm) -> None:
        """Go on in another group, after ranks were lost or have joined."""
        self.place.move(comm)

    def _writes(self) -> list[Any]:
        return [(name, x.data_ptr(), x.is_inference() or x._version) for name, x in self.tensors.items()]

    def _check_writes(self, applied: list[Change]) -> None:
        """Raise unless nobody has changed the tensors before the first change is applied."""
        if not applied and self._written is not None and self._written != self._writes():
            raise RuntimeError("a tensor was changed or moved since the last update; give Subscriber its own tensors")

    def _check(self, packet: "Packet", ties: Mapping[str, str]) -> None:
        """Raise a ValueError unless the tensors here are published."""
        there, published = packet.facts, {ties.get(name) for name in packet.facts}
        if missing := [name for name, one in ties.items() if one not in published]:
            raise ValueError(f"{missing[0]!r} is not published; published are {', '.join(map(repr, there))[:300]}")
        if not self.some and (more := [name for name in there if name not in self.tensors]):
            raise ValueError(f"{more[0]!r} is published and not followed here; pass some=True to follow only some")
        for name, x in self.tensors.items():
            if facts(x) != there.get(name, facts(x)):
                raise ValueError(f"{name!r} is {describe(x)}; published is {there[name][0]} {tuple(there[name][1])}")


class Packet(NamedTuple):
    run: str
    start: int
    version: int
    facts: dict[str, list[Any]]  # by name
    zstd: int


def named(tensors: Tensors, once: bool = False) -> dict[str, Tensor]:
    """Return tensors by name; of a module those of its state, if asked for only by the first of their names."""
    if isinstance(tensors, nn.Module):  # what its get_extra_state returns need not be a tensor
        tensors = {name: x for name, x in tensors.state_dict(keep_vars=True).items() if isinstance(x, Tensor)}
        tensors = {one: tensors[one] for one in first_names(tensors).values()} if once else tensors
    for name, x in instance("tensors", tensors, Mapping, "a module, or tensors by name").items():
        if is_traceable_wrapper_subclass(tensor(f"tensors[{name!r}]", x)):
            raise TypeError(f"tensors[{name!r}] is a {type(x).__name__}, whose parts have no place here; pass those")
    return dict(tensors)


def place_of(name: str, place: Any, most: float) -> Folder | Group:
    if isinstance(place, Comm):
        return Group(place, most, publishes=name == "to")
    instance(name, place, (str, Path), "a folder or a Comm")
    return Folder(Path(place), most)


def facts(x: Tensor) -> list[Any]:
    """Return the dtype, the shape, and in how many parts a tensor is packed."""
    return [str(x.dtype).removeprefix("torch."), list(x.shape), len(range(0, x.nbytes, RANGE)) or 1]


def ranges(x: Tensor) -> list[Tensor]:
    """Return the parts of a tensor; they are views if it is contiguous."""
    return list(plain(x.detach()).view(-1).split(RANGE // x.itemsize))


def next_packet(take: Take) -> Packet | None:
    """Return the next packet, whose parts are still to be taken; None at the end."""
    if (head := next_body(take)) is None:
        return None
    told = json.loads(bytes(opened(head).tolist()))
    if told.get("format") != FORMAT:
        raise ValueError("another version of baguakit has written this packet; publish a whole copy with this one")
    return Packet(told["run"], told["from"], told["to"], {n: each for n, *each in told["tensors"]}, told["zstd"])


def parts_of(packet: Packet, take: Take, names: Collection[str]) -> Iterator[tuple[str, int, Tensor]]:
    """Take all parts of a packet; yield name, number and bytes of those of the given tensors."""
    for name, (*_, count) in packet.facts.items():
        for i in range(count):
            if (part := next_body(take)) is None:
                raise ValueError("the packet is cut off")
            if name in names:
                yield name, i, longer(part) if packet.zstd else part
