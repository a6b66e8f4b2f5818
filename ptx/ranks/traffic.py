"""Bytes that go from one rank's memory to another's kernels, and back."""

from collections import Counter

import numpy as np

from ..watching.counters import KINDS, SECTOR


class Traffic:
    """Accesses to the memory of other ranks.

    Attributes:
        bytes: by (rank, home, "read" or "write"), those that warps of the rank move from or to the memory of `home`;
            a byte counts once for each instruction of a warp.
        sectors: likewise, the sectors of 32 bytes that they touch.
    """

    def __init__(self) -> None:
        self.bytes: Counter[tuple[int, int, str]] = Counter()
        self.sectors: Counter[tuple[int, int, str]] = Counter()

    def add(self, access, addresses: np.ndarray, homes: np.ndarray) -> None:
        rank, warps = access.frame.launch.rank, access.frame.warp[access.frame.lanes(access.on)]
        for home in np.unique(homes[homes != rank]).tolist():
            there = homes == home
            bytes_ = (addresses[there, None] + np.arange(access.width)).ravel()
            moved = np.unique(np.stack([np.repeat(warps[there], access.width), bytes_]), axis=1)
            sectors = np.unique(np.stack([moved[0], moved[1] // SECTOR]), axis=1)
            for kind in KINDS[access.kind]:
                self.bytes[rank, home, kind] += moved.shape[1]
                self.sectors[rank, home, kind] += sectors.shape[1]
