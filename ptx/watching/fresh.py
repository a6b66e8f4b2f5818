"""Global memory that is read before anything was written to it."""

import ctypes
import weakref
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch

from ..faults import UnwrittenFault

WORD = 8  # bytes; one that torch has written is no longer all poison
NANS = {torch.float64: 0x7FF8 << 48, torch.float32: 0x7FC00000, torch.bfloat16: 0x7FC0, torch.float16: 0x7E00}


@dataclass(frozen=True)
class Piece:
    """Memory that was made and not written. It is freed with its owner."""

    owner: weakref.ref
    begin: int
    bytes: np.ndarray
    before: np.ndarray  # the same bytes as a launch left them
    unwritten: np.ndarray

    @property
    def lives(self):
        owner = self.owner()
        storage = None if owner is None else owner.untyped_storage()
        return storage is not None and (storage.data_ptr(), storage.nbytes()) == (self.begin, len(self.bytes))

    def look(self):
        """Find what torch has written since, or NumPy: words in which a byte has changed."""
        same = np.ones(-(-len(self.bytes) // WORD) * WORD, bool)
        same[: len(self.bytes)] = self.bytes == self.before
        self.unwritten[:] &= np.repeat(same.reshape(-1, WORD).all(axis=1), WORD)[: len(self.bytes)]


class Fresh:
    """The memory that `torch.empty` and the like have made, and which of its bytes were written since.

    Stores of kernels are seen, each byte of them. Others' are not, so the memory is filled with poison: NaNs in tensors
    of floating dtypes, and everywhere a number that does not repeat itself, so that nobody writes it by chance.
    """

    def __init__(self):
        self.pieces = []

    def poison(self, tensor):
        """Take the memory of a tensor for unwritten."""
        storage = tensor.untyped_storage()
        begin, size = storage.data_ptr(), storage.nbytes()
        if size == 0:
            return
        memory = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(begin))
        memory[:] = noise(tensor.dtype, 1 << (size - 1).bit_length())[:size]
        unwritten = np.ones(size, bool)
        if 0 < size % WORD < WORD // 2:
            unwritten[-(size % WORD) :] = False  # too few to tell them from poison
        self.pieces.append(Piece(weakref.ref(tensor), begin, memory, memory.copy(), unwritten))

    def watcher(self):
        """Return what watches a launch that begins now."""
        self.pieces = [each for each in self.pieces if each.lives]
        for each in self.pieces:
            each.look()
        self.pieces = [each for each in self.pieces if each.unwritten.any()]
        return Reads(sorted(self.pieces, key=lambda each: each.begin))


@cache
def noise(dtype, size):
    """Return bytes that hold no pattern; NaNs of a floating dtype."""
    words = np.random.default_rng(size).integers(0, 1 << 63, -(-size // WORD), np.int64).view(np.uint64)
    bits = NANS.get(dtype, 0)
    for shift in range(0, 64, 8 * dtype.itemsize if bits else 64):
        words |= np.uint64(bits << shift)
    return words.view(np.uint8)[:size]


class Reads:
    """Raise an UnwrittenFault where a kernel reads a byte of some pieces that nothing has written.

    Attributes:
        of_all: launches of several ranks share it, since one reads what another has written.
    """

    of_all = True

    def __init__(self, pieces):
        self.pieces = pieces
        self.begins = np.array([each.begin for each in pieces], np.int64)
        sizes = np.array([len(each.bytes) for each in pieces], np.int64)
        self.ends, self.firsts = self.begins + sizes, np.cumsum(sizes) - sizes
        self.unwritten = np.concatenate([each.unwritten for each in pieces]) if pieces else None

    def seen(self, access):
        if access.space != "global" or self.unwritten is None:
            return
        addresses = np.broadcast_to(access.addresses, access.frame.lanes(access.on).shape)
        piece = np.searchsorted(self.begins, addresses, side="right") - 1
        ours = (piece >= 0) & (addresses < self.ends[piece])
        places = (addresses - self.begins[piece] + self.firsts[piece])[ours, None] + np.arange(access.width)
        if access.kind != "write":
            missing = ours.copy()
            missing[ours] = self.unwritten[places].any(axis=1)
            if missing.any():
                self._refuse(access, addresses, missing)
        if access.kind != "read":
            self.unwritten[places] = False

    def _refuse(self, access, addresses, missing):
        memory, address = access.frame.memory, int(addresses[np.argmax(missing)])
        raise UnwrittenFault(
            f"{access.instruction}: {access.frame.thread(access.on, missing)} reads {access.width} bytes at "
            f"{address:#x} in {memory.name_at(address)}, where nothing was written"
        )

    def ended(self):
        for each, first in zip(self.pieces, self.firsts, strict=True):
            each.unwritten[:] = self.unwritten[first : first + len(each.unwritten)]
            each.before[:] = each.bytes
