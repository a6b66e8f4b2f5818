"""Let a CUDA build of torch be imported where CUDA's libraries are not, and save gigabytes.

    python scripts/without_cuda.py FOLDER

FOLDER has torch's libraries. Each library that they need and that is not there gets a substitute beside them. Its
functions return an error, as they do on a machine without a GPU, so that torch counts none and works on the CPU. It
needs the C compiler and binutils, as compiling kernels does.
"""

import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

# Loaded only when a driver is there, and linked to the driver itself.
DRIVER = ("libcaffe2_nvrtc.so",)
CUDA = re.compile(r"lib(cu|nccl|nvshmem|nvrtc|nvToolsExt|nvJitLink)")
FUNCTION = re.compile(r"(cu|nccl|nvshmem|nvrtc|nvtx|__cuda|__nv)\w+$")
ERROR = 100  # cudaErrorNoDevice; that of the other libraries is any but 0


def main(folder: Path) -> int:
    libraries = [path for path in sorted(folder.glob("*.so")) if path.name not in DRIVER]
    wanted = needed(libraries)
    with tempfile.TemporaryDirectory() as room:
        for name, versions in wanted.items():
            build(Path(room), folder / name, versions)
    print(f"{len(wanted)} libraries of CUDA have substitutes in {folder.name}: {', '.join(wanted) or 'none is needed'}")
    return 0


def needed(libraries: Iterable[Path]) -> dict[str, dict[str, set[str]]]:
    """Return the functions wanted of each missing library, by the version of their names; "" stands for none."""
    files: set[str] = set()
    homes: dict[str, str] = {}  # version: library
    named: dict[str, set[str]] = defaultdict(set)  # version: functions
    for path in libraries:
        files |= set(re.findall(r"\(NEEDED\).*\[(.+)\]", output("readelf", "--dynamic", path)))
        home = ""
        for file, version in re.findall(r"File: (\S+)|Name: (\S+)", output("readelf", "--version-info", path)):
            home = file or home
            homes.setdefault(version, home)
        for name in re.findall(r" U (\S+)", output("nm", "--dynamic", path)):
            function, _, version = name.partition("@")
            if version or FUNCTION.match(function):
                named[version].add(function)
    present = {path.name for path in libraries}
    missing = sorted(name for name in files - present if CUDA.match(name))
    # A function without a version can be found in any library, so every substitute has it.
    return {
        name: {"": named[""]} | {version: named[version] for version, home in homes.items() if version and home == name}
        for name in missing
    }


def build(room: Path, library: Path, versions: Mapping[str, Iterable[str]]) -> None:
    """Compile a substitute."""
    functions = {name for names in versions.values() for name in names}
    said = {name for name in functions if re.search("String|ErrorName", name)}
    lines = [f"long {name}(void) {{ return {ERROR}; }}" for name in sorted(functions - said)]
    lines += [f'const char *{name}(void) {{ return "there is no CUDA"; }}' for name in sorted(said)]
    (room / "code.c").write_text("\n".join(lines) + "\n")
    nodes = [
        f"{version} {{ {' '.join(f'{name};' for name in sorted(names))} }};" for version, names in versions.items()
    ]
    (room / "versions").write_text("\n".join(node for node in nodes if not node.startswith(" ")) + "\n")
    script = [f"-Wl,--version-script={room / 'versions'}"] if any(versions) else []
    flags = ["-shared", "-fPIC", "-w", f"-Wl,-soname={library.name}", *script]
    subprocess.run(["cc", *flags, "-o", library, room / "code.c"], check=True)


def output(*words: str | Path) -> str:
    return subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True).stdout


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
