"""Packets as files of a folder, whose names have the version and the run of the publisher:

    000000012-1f0c5e2a77b9           the changes from version 11 to 12
    000000012-1f0c5e2a77b9-whole     all values of version 12

A file appears whole or not at all: it is written under another name, synced and renamed. Files are removed only if they
are older than the whole copy before the newest one, so that who reads a file has time to come to the next.
"""

import contextlib
import os
import re
import uuid
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .streams import Packets, Pieces, taker

WHOLE = "-whole"
NAME = re.compile(r"\d{9,}-[0-9a-f]{12}(-whole)?")


class Folder:
    """The versions in a folder; `most` is the number of bytes of changes after which a whole copy is written."""

    def __init__(self, path: Path, most: float) -> None:
        self.path, self.most, self.since = path, most, 0

    def begin(self) -> int:
        """Make the folder, remove what a killed publisher had begun; return the newest version, or −1."""
        self.path.mkdir(parents=True, exist_ok=True)
        lock = os.open(self.path / "publisher.lock", os.O_WRONLY | os.O_CREAT)
        weakref.finalize(self, os.close, lock)  # until then the lock is held
        with contextlib.suppress(ImportError):  # Windows has no such locks
            import fcntl

            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise RuntimeError(f"another publisher writes to {self.path}; give each its own folder") from None
        for left in self.path.glob("unfinished-*"):
            left.unlink(missing_ok=True)
        return max(self.files(), default=-1)

    def move(self, comm: Any) -> None:
        raise TypeError(f"the versions are in the folder {self.path}, which has no group")

    def files(self) -> dict[int, set[str]]:
        """Return the names of files by version, in order."""
        found: dict[int, set[str]] = {}
        for name in sorted(os.listdir(self.path)) if self.path.is_dir() else []:
            if NAME.fullmatch(name):
                found.setdefault(int(name.partition("-")[0]), set()).add(name)
        return found

    def add(self, packet: Pieces, run: str, version: int, whole: bool, copy: Callable[[], Pieces]) -> None:
        """Write a packet; after many, write a whole copy beside, and remove what is old."""
        length = self._write(packet, name_of(version, run, whole))
        self.since = 0 if whole else self.since + length
        if self.since > self.most:
            self._write(copy(), name_of(version, run, True))
            self.since = 0
        files = self.files()
        oldest = [-1, *whole_among(files)][-2:][0]
        for name in (name for each, names in files.items() if each < oldest for name in names):
            (self.path / name).unlink(missing_ok=True)

    def _write(self, packet: Pieces, name: str) -> int:
        unfinished = self.path / f"unfinished-{uuid.uuid4().hex}"
        with open(unfinished, "wb") as file:
            length = sum(file.write(piece.numpy().data) for piece in packet)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(self.path / name)
        return length

    def packets_after(self, version: int, run: str, trials: int = 3) -> Packets:
        """Give the packets, and their files, from a version to the newest, or from the newest whole copy on."""
        files = self.files()
        newest = max(files, default=-1)
        latest = min(files.get(newest, {"-"})).split("-")[1]  # the run of the newest version
        chain = [name_of(each, run, False) for each in range(version + 1, newest + 1)]
        if files and (run != latest or version > newest or not set().union(*files.values()).issuperset(chain)):
            start = max(whole_among(files), default=-1)
            chain = [name_of(each, latest, each == start) for each in range(max(start, 0), newest + 1)]
        try:
            read = [(str(path), np.fromfile(path, np.uint8)) for path in map(self.path.joinpath, chain)]
            return contextlib.nullcontext([(path, taker([torch.from_numpy(x)])) for path, x in read])
        except FileNotFoundError as error:
            if trials > 1:  # the publisher may have removed files
                return self.packets_after(version, run, trials - 1)
            raise FileNotFoundError(f"{self.path} has version {newest}, and no {error.filename}") from None


def name_of(version: int, run: str, whole: bool) -> str:
    return f"{version:09d}-{run}{WHOLE * whole}"


def whole_among(files: dict[int, set[str]]) -> list[int]:
    """Return the versions of which there is a whole copy."""
    return [version for version, names in files.items() if any(name.endswith(WHOLE) for name in names)]
