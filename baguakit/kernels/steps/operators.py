"""Steps and norms, dispatched by device: kernels with cached tables, or the definition where there are none.

A table on the device holds the addresses of tensors, and is reused until an address changes. A *record* of a parameter
has the addresses of its tensors, its length, the position of its first value among all values, and the number of its
full tiles that a GPU can move 16 bytes at a time. A *tile* is one word with the index of a record, and the number of
the tile in this parameter. So a program reads two lines of memory before the values, for any number of tensors.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...tensors import uploaded
from ..operators import home_of
from . import definition
from .definition import Columns, Conditions, Update

FIELDS = ("p", "g", "u", "v", "master", "length", "start", "whole")
TILE = 1024  # values; with four warps and the four streams of Adam, a thread has eight 16-byte loads in flight
KEPT = 64  # tables of a cache
SUM_TILE = 16384  # values of a tile where only a sum is found


def key_of(column: Sequence[Any]) -> object:
    """Return a key that changes with the addresses of a column, and with every fact that `optim/steps.py` checks."""
    held = [x for x in column if x is not None]
    odd = tuple([(i, x.shape, x.stride()) for i, x in enumerate(held) if not x.is_contiguous()])
    facts = tuple([x.dtype for x in held]), tuple(map(Tensor.numel, held)), odd
    return tuple([x is None for x in column]), tuple(map(Tensor.data_ptr, held)), facts


@dataclass(frozen=True, eq=False)
class StepTables:
    """The tables of a step by kind (dtype of weights, dtype of gradients, whether there are masters), and buffers.

    A table is two int64 tensors: tiles (tiles,), each record << 32 | number of the tile, and records (tensors, FIELDS).
    """

    by_kind: dict[tuple[torch.dtype, torch.dtype, bool], list[Tensor]]
    numbers: Tensor  # of a step
    partials: Tensor  # what each program finds, where they find a sum (fp64)


class TableCache:
    """The tables used last, by key. Tables in a captured CUDA graph are never dropped, because the graph reads them."""

    def __init__(self) -> None:
        self.tables: dict[object, StepTables] = {}
        self.captured: set[object] = set()

    def find(self, key: object, device: torch.device, make: Callable[[], StepTables]) -> StepTables:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            if key not in self.tables:
                raise RuntimeError(
                    "the first step over tensors writes a table, which a CUDA graph cannot capture; take one step over "
                    "the same tensors before the capture"
                )
            self.captured.add(key)
        self.tables[key] = found = self.tables.pop(key, None) or make()  # it is the last to be forgotten
        if len(self.tables) - len(self.captured) > KEPT:
            del self.tables[next(each for each in self.tables if each not in self.captured)]
        return found


def tables_of(columns: Columns) -> StepTables:
    """Return the tables of a step; or the tables of a norm, if there is only the column g."""
    lead, tile = (columns["p"], TILE) if "p" in columns else (columns["g"], SUM_TILE)
    masters = columns.get("master") or [None] * len(lead)
    kinds = [(p.dtype, g.dtype, m is not None) for p, g, m in zip(lead, columns["g"], masters, strict=True)]
    lengths = np.array([x.numel() for x in lead], np.int64)
    records = np.zeros((len(lead), len(FIELDS)), np.int64)
    for name, tensors in columns.items():
        records[:, FIELDS.index(name)] = [_address(x) for x in tensors]
    aligned = (records % 16 == 0).all(1)
    records[:, FIELDS.index("length")] = lengths
    records[:, FIELDS.index("start")] = np.cumsum(lengths) - lengths
    records[:, FIELDS.index("whole")] = np.where(aligned, lengths // tile, 0)
    device = lead[0].device
    by_kind = {}
    for kind in dict.fromkeys(kinds):
        at = np.array([i for i, other in enumerate(kinds) if other == kind])
        parts = _tiles(lengths[at], tile), records[at]
        by_kind[kind] = [uploaded(torch.from_numpy(part), device) for part in parts]
    numbers = torch.zeros(16, dtype=torch.float32, device=device)
    partials = 0 if "p" in columns else sum(len(tiles) for tiles, _ in by_kind.values())
    return StepTables(by_kind, numbers, torch.zeros(partials, dtype=torch.float64, device=device))


def _address(x: Tensor | None) -> int:
    address = 0 if x is None else x.data_ptr()
    if x is not None and not address and x.numel():
        raise TypeError(f"a {type(x).__name__} has no memory of its own, which a step could use")
    return address


def _tiles(lengths: NDArray[np.int64], tile: int) -> NDArray[np.int64]:
    counts = -(-lengths // tile)
    number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    tiles: NDArray[np.int64] = np.repeat(np.arange(len(lengths)), counts) << 32 | number
    return tiles


TABLES = TableCache()


def step_(
    update: Update, columns: Columns, conditions: Conditions, block: int | None, check: Callable[[], Columns]
) -> None:
    """Step the tensors of the columns. `block` is the block length of packed gradients, else None.

    `check` raises unless the columns fit each other, and returns them. Kernels call it only for new tensors.
    """
    home, options = home_of(columns["p"][0], "steps"), (block, conditions.key is not None)
    home.step_(update, check() if home is definition else tables_for(columns, options, check), conditions, block)
    written = (x for name in ("p", "master") for x in columns.get(name, ()) if x is not None)
    torch.autograd.graph.increment_version([*written])


def tables_for(columns: Columns, options: object, check: Callable[[], Columns]) -> StepTables:
    """Return the tables of tensors, from the cache if their addresses and `options` are known, else after `check`."""
    first = next(iter(columns.values()))[0]
    try:
        key = (options, *((name, key_of(column)) for name, column in columns.items()))
    except RuntimeError:  # a tensor without an address, such as a sparse one
        check()
        raise
    return TABLES.find(key, first.device, lambda: tables_of(check()))


def gradient_norm_(
    norm: Tensor, grads: Sequence[Tensor], found_inf: Tensor | None, check: Callable[[], Sequence[Tensor]]
) -> None:
    """Write the norm of all gradients to `norm`. Set `found_inf`, if given, to 1 if it is not finite, else to 0."""
    home = home_of(norm, "steps")
    tables = None if home is definition else tables_for({"g": grads}, "norm", lambda: {"g": check()})
    home.gradient_norm_(norm, check() if tables is None else tables, found_inf)
