"""The optional packages of baguakit, as its installed metadata names them."""

import re
from collections.abc import Iterator
from importlib import metadata

from .finding import Finding, Kind

DEVELOPERS = {"bench", "docs", "release", "test"}  # extras for those who work on baguakit itself
USES = {
    "command": "rich tables and progress bars in this command",
    "data": "stores of cached datasets in LMDB and Redis",
    "examples": "pictures, and the programs in examples/",
    "lightning": "the strategy for Lightning",
    "logging": "logs for TensorBoard",
    "notebooks": "running the notebooks",
}


def packages() -> Iterator[Finding]:
    """Look at the packages of each extra."""
    try:
        wanted = by_extra(metadata.requires("baguakit") or [])
    except metadata.PackageNotFoundError:
        yield Finding("extras", Kind.NOTE, "baguakit is not installed but imported from a folder: pip install it")
        return
    for extra, names in sorted(wanted.items()):
        if extra not in DEVELOPERS:
            yield of_extra(extra, names)


def by_extra(requirements: list[str]) -> dict[str, list[str]]:
    """Return {extra: requirements} of lines such as "lightning>=2.5; extra == 'lightning'"."""
    found: dict[str, list[str]] = {}
    for line in requirements:
        requirement, _, marker = line.partition(";")
        if extra := re.search(r"extra\s*==\s*[\"']([\w.-]+)[\"']", marker):
            found.setdefault(extra[1], []).append(requirement.strip())
    return found


def of_extra(extra: str, requirements: list[str]) -> Finding:
    """Return the finding on an extra: the versions that are installed, or the command that installs the rest."""
    versions, missing = [], []
    for requirement in requirements:
        name = re.split(r"[^\w.-]", requirement)[0]
        try:
            versions.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            missing.append(f"'{requirement}'" if requirement != name else name)
    if not missing:
        return Finding(extra, Kind.GOOD, ", ".join(versions))
    use = USES.get(extra, f"the extra {extra!r}")
    lacks = f"{', '.join(missing)} not installed; for {use}"
    return Finding(extra, Kind.NOTE, lacks, f"pip install {' '.join(missing)}")
