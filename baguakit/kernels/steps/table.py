"""The addresses of the tensors of a step: tables on the device, made once and kept while the addresses hold.

A *record* of a tensor holds addresses, its length, the position of its first value among all, and how many of its
tiles are whole and can be moved 16 bytes at a time. A *tile* is (record, number of the tile in it) in one word. So a
program reads two lines of memory before it moves its values, whatever the number of tensors.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...arguments import every, several
from ..operators import uploaded

FIELDS = ("p", "g", "u", "v", "master", "length", "start", "whole")
NUMBERS = 16  # words on the device for the numbers of a step
TILE = 1024  # values; with four warps and the four streams of Adam, a thread has eight 16-byte loads in flight
KEPT = 64  # tables of a cache
SUM_TILE = 16384  # values of a tile where only a sum is found

Kind = tuple[torch.dtype, torch.dtype, bool]
Integers = np.ndarray[Any, np.dtype[np.int64]]

_serial, _nbytes = count(), attrgetter("nbytes")


class Fixed:
    """Tensors that stay where they are: their addresses are read once, and not at every step.

    The tensors may be written to, but not be given other memory (`.data =`, `set_`, `resize_`), which would go unseen.
    Parameters and what an optimizer remembers of them are such; gradients are if they are views of one bucket and are
    zeroed in place.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        listed = several("tensors", tensors, "a list of tensors", ordered=True)
        self.tensors: tuple[Tensor, ...] = tuple(every("tensors", listed, Tensor, "a tensor"))
        # Views share the version of what they are views of.
        bases = (x if x._base is None else x._base for x in self.tensors)
        self.versions: tuple[Tensor, ...] = tuple({id(x): x for x in bases}.values())

    @cached_property
    def serial(self) -> int:
        """A number of its own, drawn when it is first asked for: torch.compile cannot draw one, and needs none."""
        return next(_serial)

    def __len__(self) -> int:
        return len(self.tensors)

    def __repr__(self) -> str:
        return f"Fixed({len(self.tensors)} tensors)"


Role = Sequence[Any] | Fixed


def listed(role: Role) -> Sequence[Tensor]:
    return role.tensors if isinstance(role, Fixed) else role


def written(role: Role) -> None:
    """Let autograd, and whoever watches versions, see that the tensors of a role have been written to."""
    seen = role.versions if isinstance(role, Fixed) else role
    torch.autograd.graph.increment_version([x for x in seen if x is not None])


def key_of(name: str, role: Role) -> object:
    """Return a key that changes when the tensors of a role lie elsewhere; of p and g, also when they have other sizes.

    What an optimizer remembers is as long as p: sizes of p and g tell of it, too.
    """
    if isinstance(role, Fixed):
        return name, role.serial
    present = [x for x in role if x is not None] if name == "master" else role
    where = tuple(map(Tensor.data_ptr, present))
    if name == "master":
        return name, tuple(i for i, x in enumerate(role) if x is None), where
    return name, where, role[0].dtype, tuple(map(_nbytes, role)) if name in "pg" else None


@dataclass(frozen=True, eq=False)
class Table:
    """Tensors of one kind: the dtypes of weights and gradients, and whether there are masters."""

    kind: Kind
    tiles: Tensor  # (tiles,) int64: record << 32 | number of the tile
    records: Tensor  # (tensors, FIELDS) int64
    tile: int


@dataclass(frozen=True, eq=False)
class StepTables:
    """The tables of all kinds.

    Attributes:
        numbers: room on the device for the numbers of a step.
        partials: room for what each program finds, where they find a sum (fp64).
    """

    by_kind: tuple[Table, ...]
    numbers: Tensor
    partials: Tensor


class TableCache:
    """The latest tables, by key. A CUDA graph keeps those that it was captured with, since it reads them."""

    def __init__(self) -> None:
        self.latest: OrderedDict[object, StepTables] = OrderedDict()
        self.captured: dict[object, StepTables] = {}

    def find(self, key: object, device: torch.device) -> StepTables | None:
        tables = self.captured.get(key) or self.latest.get(key)
        capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if tables is None and capturing:
            raise RuntimeError(
                "the first step over tensors writes a table, which a CUDA graph cannot capture; take one step over the "
                "same tensors before the capture"
            )
        if tables is not None and capturing:
            self.captured[key] = tables
        elif key in self.latest:
            self.latest.move_to_end(key)
        return tables

    def keep(self, key: object, tables: StepTables) -> StepTables:
        self.latest[key] = tables
        if len(self.latest) > KEPT:
            self.latest.popitem(last=False)
        return tables


def tables_of(kinds: Sequence[Kind], columns: dict[str, Sequence[Tensor | None]], tile: int = TILE) -> StepTables:
    """Return the tables of tensors, in columns named as in FIELDS; p or, without weights, g has their lengths."""
    lead = [x for x in columns.get("p") or columns["g"] if x is not None]
    lengths = np.array([x.numel() for x in lead], np.int64)
    records = np.zeros((len(lead), len(FIELDS)), np.int64)
    for name, tensors in columns.items():
        records[:, FIELDS.index(name)] = [0 if x is None else x.data_ptr() for x in tensors]
    aligned = (records % 16 == 0).all(1)
    records[:, FIELDS.index("length")] = lengths
    records[:, FIELDS.index("start")] = np.cumsum(lengths) - lengths
    records[:, FIELDS.index("whole")] = np.where(aligned, lengths // tile, 0)
    device = lead[0].device
    tables = []
    for kind in dict.fromkeys(kinds):
        at = np.array([i for i, other in enumerate(kinds) if other == kind])
        tiles, rows = (uploaded(torch.from_numpy(x), device) for x in (_tiles(lengths[at], tile), records[at]))
        tables.append(Table(kind, tiles, rows, tile))
    numbers = torch.zeros(NUMBERS, dtype=torch.float32, device=device)
    partials = 0 if "p" in columns else sum(len(table.tiles) for table in tables)
    return StepTables(tuple(tables), numbers, torch.zeros(partials, dtype=torch.float64, device=device))


def _tiles(lengths: Integers, tile: int) -> Integers:
    counts = -(-lengths // tile)
    record = np.repeat(np.arange(len(lengths)), counts)
    number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    tiles: Integers = record << 32 | number
    return tiles
