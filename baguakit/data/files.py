"""Atomic replacement of files, and a check of who may write to them."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterable
from pathlib import Path


def others_may_write(path: Path, names: Iterable[str]) -> str:
    """Return an error text if other users may write to the directory `path` or to these files in it, else "".

    The superuser may always, and is ignored, as are missing files.
    """
    if not hasattr(os, "geteuid"):
        return ""
    for place in (path, *(path / name for name in names)):
        try:
            found = place.stat()
        except FileNotFoundError:
            continue
        mine = found.st_uid == os.geteuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if not mine:
            who = f"it is user {found.st_uid}'s and its mode is {stat.S_IMODE(found.st_mode):04o}"
            return (
                f"{place} can be written by others ({who}), who could add data that this process would read or run;"
                f" pass a directory of your own, or empty {path}, chown it to user {os.geteuid()} and chmod it to 0700"
            )
    return ""


def replace_file(path: Path, content: bytes) -> None:
    """Replace the file at `path` atomically, by a synced temporary file; raise OSError if that fails."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
