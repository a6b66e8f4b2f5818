"""Versions of named tensors: one program publishes them, and others follow.

A *packet* leads from a version to a later one: a line of JSON with names, dtypes and shapes, and for each tensor what
`changes` packs; each with its digest. Version −1 has zeros in every tensor, so the changes from it are a whole copy. A
subscriber changes nothing until all packets that lead to the newest version are there, and right. Each publisher has a
random `run`: to the version 7 of another publisher its changes from 7 do not fit.
"""

import contextlib
import json
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..arguments import describe, instance, real, truth
from ..comm import Comm
from .folders import Folder
from .groups import Group
from .packing import DIGEST, Parts, add_, changes, opened, read, sealed

Tensors = nn.Module | Mapping[str, Tensor]
NOTHING = -1  # the version before the first


class Publisher:
    """Publishes versions of a model's weights, or of named tensors.

    Args:
        tensors: a module, whose parameters and persistent buffers are published, or tensors by name. They may be views,
            such as the slice of a matrix that one subscriber holds. A copy of each is kept.
        to: a folder that subscribers read: on a shared disk, or copied on, oldest files first. Or a `Comm`, whose rank
            0 publishes to all others.
        keep: the bytes of changes that are kept, as a share of all values. In a folder, a whole copy is written when
            there are more, and files older than the whole copy before it are removed.

    A publisher on a folder with versions goes on after the newest, with a whole copy.
    """

    def __init__(self, tensors: Tensors, to: str | Path | Comm, keep: float = 1.0) -> None:
        self.tensors = named(tensors)
        most = real("keep", keep, 0) * sum(x.nbytes for x in self.tensors.values())
        self.run = uuid.uuid4().hex[:12]
        self.place = place_of("to", to, most)
        self.version: int = self.place.begin()
        self.copies: dict[str, Tensor] = {}  # of the version before

    def publish(self) -> int:
        """Publish the values of now as the next version; return its number: 0, 1, 2 … With a `Comm`, collective."""
        start, copies = (self.version, self.copies) if self.copies else (NOTHING, empty_like(self.tensors))
        self.copies = {}  # after an error, the next version is a whole copy
        packet = packed(self.tensors, copies, self.run, start, self.version + 1)
        self.version += 1

        def whole() -> Tensor:  # the packet that leads from nothing to this version
            return packed(copies, empty_like(copies), self.run, NOTHING, self.version)

        self.place.add(packet, self.run, self.version, start == NOTHING, whole)
        self.copies = copies
        return self.version

    def regroup(self, comm: Comm) -> None:
        """Go on in another group, after ranks were lost or have joined."""
        self.place = self.place.moved(comm)


class Subscriber:
    """Follows the versions of a publisher: its tensors equal a published version, bit for bit.

    Args:
        tensors: as for `Publisher`: of the names, shapes and dtypes that are published, with any strides and devices.
        source: the folder, or the `Comm`, of which this is any rank but 0.
        some: follow only some of the published tensors.
    """

    def __init__(self, tensors: Tensors, source: str | Path | Comm, some: bool = False) -> None:
        self.tensors, self.some = named(tensors), truth("some", some)
        self.place = place_of("source", source, 0.0)
        self.version, self.run = NOTHING, ""  # the run of the publisher whose version this is
        self._written: list[int] | None = None  # how often torch has counted writes to the tensors

    def update(self) -> int:
        """Bring the tensors to the newest version; return its number, −1 if there is none. With a `Comm`, collective.

        Raises:
            FileNotFoundError: the folder has a newer version, and not all files that lead there.
            ValueError: a packet is damaged, or has other names, shapes or dtypes; the tensors are as they were.
            RuntimeError: a tensor was changed here since the last update.
        """
        came = [contents(packet, where) for where, packet in self.place.packets_after(self.version, self.run)]
        if self._written is not None and self._written != self._writes():
            raise RuntimeError("a tensor was changed here since the last update; give Subscriber tensors of its own")
        run, version, steps = self.run, self.version, []
        for packet in came:
            if packet.start == NOTHING or packet.version > version:
                if packet.start != NOTHING and (packet.run, packet.start) != (run, version):
                    raise ValueError(f"changes from version {packet.start} came; the tensors have version {version}")
                steps.append((packet.start, self._checked(packet)))
                run, version = packet.run, packet.version
        for start, parts in steps:
            for name, x in self.tensors.items():
                if start == NOTHING:
                    x.detach().copy_(add_(zeros_like(x), parts[name]))
                else:
                    add_(x.detach(), parts[name])
        self.run, self.version, self._written = run, version, self._writes()
        return version

    def regroup(self, comm: Comm) -> None:
        """Go on in another group, after ranks were lost or have joined."""
        self.place = self.place.moved(comm)

    def _writes(self) -> list[int]:
        return [0 if x.is_inference() else x._version for x in self.tensors.values()]

    def _checked(self, packet: "Packet") -> dict[str, Parts]:
        """Return what is packed of each tensor here; raise a ValueError unless it fits and is undamaged."""
        there = packet.facts
        if missing := [name for name in self.tensors if name not in there]:
            raise ValueError(f"{missing[0]!r} is not published; published are {', '.join(map(repr, there))[:300]}")
        if not self.some and (more := [name for name in there if name not in self.tensors]):
            raise ValueError(f"{more[0]!r} is published and not followed here; pass some=True to follow only some")
        for name, x in self.tensors.items():
            if facts(x) != there[name]:
                raise ValueError(f"{name!r} is {describe(x)}; published is {there[name][0]} {tuple(there[name][1])}")
        with naming(packet.where):
            return {name: read(packet.parts[name].to(x.device), x) for name, x in self.tensors.items()}


class Packet(NamedTuple):
    where: str  # it came from
    run: str
    start: int
    version: int
    facts: dict[str, list[Any]]  # [dtype, shape] by name
    parts: dict[str, Tensor]


def named(tensors: Tensors) -> dict[str, Tensor]:
    """Return tensors by name; of a module its state, in which tensors with several names appear once."""
    found = tensors.state_dict(keep_vars=True) if isinstance(tensors, nn.Module) else tensors
    kept: dict[str, Tensor] = {}
    for name, x in instance("tensors", found, Mapping, "a module, or tensors by name").items():
        if isinstance(tensors, nn.Module) and (not isinstance(x, Tensor) or any(x is each for each in kept.values())):
            continue
        kept[name] = instance(f"tensors[{name!r}]", x, Tensor, "a tensor")
        if is_traceable_wrapper_subclass(x):
            raise TypeError(f"tensors[{name!r}] is a {type(x).__name__}, whose parts have no place here; pass those")
    return kept


def place_of(name: str, place: Any, most: float) -> Folder | Group:
    if isinstance(place, Comm):
        return Group(place, most, publishes=name == "to")
    instance(name, place, (str, Path), "a folder or a Comm")
    return Folder(Path(place), most)


def facts(x: Tensor) -> list[Any]:
    return [str(x.dtype).removeprefix("torch."), list(x.shape)]


def empty_like(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return contiguous zeros: version −1 of these tensors."""
    return {name: zeros_like(x) for name, x in tensors.items()}


def zeros_like(x: Tensor) -> Tensor:
    return torch.zeros_like(x, memory_format=torch.contiguous_format, requires_grad=False)


def packed(tensors: Mapping[str, Tensor], copies: Mapping[str, Tensor], run: str, start: int, version: int) -> Tensor:
    """Return the packet from the copies to the tensors, and copy them."""
    parts = [changes(x.detach(), copies[name]).cpu() for name, x in tensors.items()]
    listed = [[name, *facts(x), len(part)] for (name, x), part in zip(tensors.items(), parts, strict=True)]
    line = json.dumps({"run": run, "from": start, "to": version, "tensors": listed}).encode()
    head = sealed(torch.frombuffer(bytearray(line + b" " * (-len(line) % 16)), dtype=torch.uint8))
    length = torch.frombuffer(bytearray(len(head).to_bytes(16, "little")), dtype=torch.uint8)
    return torch.cat([length, head, *parts])


@contextlib.contextmanager
def naming(where: str) -> Iterator[None]:
    """In a `with` block, let a ValueError say where the packet came from."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def contents(packet: Tensor, where: str) -> Packet:
    """Return what a packet has; what is packed of tensors is not checked yet."""
    at = DIGEST + int.from_bytes(bytes(packet[:16].tolist()), "little")
    with naming(where):
        told = json.loads(bytes(opened(packet[16:at]).tolist()))
        sizes = [each[3] for each in told["tensors"]]
        if sum(sizes) != len(packet) - at:
            raise ValueError(f"a packet of {len(packet)} bytes is cut off; {at + sum(sizes)} are right")
    names, parts = [each[0] for each in told["tensors"]], packet[at:].split(sizes)
    listed = {each[0]: each[1:3] for each in told["tensors"]}
    return Packet(where, told["run"], told["from"], told["to"], listed, dict(zip(names, parts, strict=True)))
