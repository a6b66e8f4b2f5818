"""The subcommand `doctor`: print what will run on this machine, what will not, and commands that fix the rest."""

import argparse
import os
import platform
import shutil
import socket
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch
import torch.distributed as dist
from torch.torch_version import TorchVersion

from .. import compiling
from ..comm import Comm
from ..kernels import cpu
from ..primitives import mean_
from ..ranks import Ranks
from .screen import Table, say

LOOPBACKS = {"lo", "lo0"}
COMPILERS = {"linux": "sudo apt install gcc", "darwin": "xcode-select --install"}  # what installs one, by system
LIMIT = 120.0  # seconds in which two ranks must have averaged a tensor
DESCRIPTION = """\
Tell what of baguakit will run on this machine, what will not, and the pip or
apt command that mends it. It looks at Python, torch, NumPy, Triton, GPUs, NCCL,
the C compiler and network interfaces, compiles all kernels for the CPU, and
lets two processes average a tensor over loopback. The exit status is 1 if the
core cannot work.
"""


# Kinds of findings. GOOD: all is well. NOTE: good to know. LACKS: a part will not run. BROKEN: the core cannot work.
GOOD, NOTE, LACKS, BROKEN = "ok", "note", "missing", "broken"


@dataclass(frozen=True)
class Finding:
    what: str  # at most 13 characters
    kind: str
    found: str  # in words
    mend: str = ""  # the command or step that fixes it
    loses: str = ""  # what will not run because of it, as a sentence without a full stop


def fill(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.formatter_class = DESCRIPTION, argparse.RawDescriptionHelpFormatter
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print every finding; return 1 if the core cannot work, else 0."""
    found, table = [], Table({"what": "<13", "": "<7", "found, and what to do": "<56"})
    for finding in (each for check in CHECKS for each in check()):
        found.append(finding)
        table.row(finding.what, finding.kind, finding.found)
        if finding.mend:
            table.row("", "", finding.mend)
    broken = any(each.kind is BROKEN for each in found)
    say("\nThe core cannot work." if broken else "\nTraining on CPUs will run.")
    for finding in found:
        if finding.loses:
            say(f"{finding.loses}.")
    return int(broken)


def versions() -> Iterator[Finding]:
    """Yield findings on Python, the system, torch, NumPy, and Triton, which only GPUs need."""
    yield Finding("Python", GOOD, f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    if sys.platform != "linux":
        loses = "GPUs, Triton kernels, the NCCL plugin and `demo --rate` need Linux"
        yield Finding("system", LACKS, f"{platform.system()} is not Linux", loses=loses)
    build = f", built for CUDA {torch.version.cuda}" if torch.version.cuda else ", built for CPUs"
    for what, least, kind in (("torch", "2.11", BROKEN), ("NumPy", "1.23", BROKEN), ("Triton", "3.6", LACKS)):
        try:
            found = metadata.version(what.lower())
        except metadata.PackageNotFoundError:  # Triton: this command imports the others
            loses = "GPU kernels need Triton; on CPUs their PyTorch definitions do the work"
            kind = LACKS if torch.cuda.is_available() else NOTE
            yield Finding(what, kind, "not installed", "pip install 'triton>=3.6,<3.10'", loses)
        else:
            if TorchVersion(found) < f"{least}.dev0":
                yield Finding(what, kind, f"{found} is older than {least}", f"pip install --upgrade {what.lower()}")
            else:
                yield Finding(what, GOOD, found + build * (what == "torch"))


def gpus() -> Iterator[Finding]:
    """Yield findings on GPUs and NCCL."""
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            yield Finding(f"GPU {i}", GOOD, torch.cuda.get_device_name(i))
        if dist.is_nccl_available():
            found = ".".join(map(str, torch.cuda.nccl.version()))
            ran = "baguakit has run over NCCL with ranks that share a GPU, not with several GPUs"
            yield Finding("NCCL", NOTE, f"{found}; {ran}")
        else:
            lacks, mend = "this build of torch has none", "install a build of torch for CUDA on Linux"
            yield Finding("NCCL", LACKS, lacks, mend, "Several GPUs cannot train together without NCCL")
    elif shutil.which("nvidia-smi") is None:
        yield Finding("GPU", NOTE, "none found", loses="Training on GPUs will not run: there is none")
    else:
        lacks, mend = "is built for CPUs", "pip install --force-reinstall torch, from an index with CUDA builds"
        if cuda := torch.version.cuda:
            lacks = "finds no GPU"
            mend = f"update the driver to one for CUDA {cuda}; nvidia-smi tells which it supports"
        yield Finding("GPU", LACKS, f"nvidia-smi is there, but torch {lacks}", mend, "GPUs stay unused")


def compilers() -> Iterator[Finding]:
    """Yield findings on the C compiler and on the kernels for CPUs, which are all compiled ahead of their first use."""
    if (compiler := cpu.compiler()) is None:
        lacks = "no cc, gcc or clang; the kernels' definitions in PyTorch run instead"
        loses = "Kernels on CPUs will run, but many times slower, and `baguakit net build` will not run"
        yield Finding("C compiler", LACKS, lacks, COMPILERS.get(sys.platform, ""), loses)
        return
    yield Finding("C compiler", GOOD, compiler)
    with ThreadPoolExecutor() as pool:
        libraries = dict(zip(cpu.SOURCES, pool.map(cpu.functions, cpu.SOURCES), strict=True))
    missing = [family for family, library in libraries.items() if library is None]
    try:
        with compiling.private(folder := compiling.cache("cpu")):
            kept = f"kept in {folder}"
    except OSError:
        kept = "not kept: each process compiles them for itself"
    if missing:
        loses = "What these kernels do on CPUs will run, but many times slower"
        yield Finding("CPU kernels", LACKS, f"{', '.join(missing)} not compiled: see above", loses=loses)
    else:
        yield Finding("CPU kernels", GOOD, f"{len(libraries)} files compiled, {kept}")


def network() -> Iterator[Finding]:
    """Yield findings on the network interfaces, and on the address that gloo uses between machines.

    Gloo uses the address of the interface in GLOO_SOCKET_IFNAME; by default, the address that the host name stands for.
    """
    if sys.platform == "win32":
        yield Finding("interfaces", NOTE, "not looked at on Windows; gloo takes the address of the host's name")
        return
    names = [name for _, name in socket.if_nameindex()]
    others = [name for name in names if name not in LOOPBACKS and driver(name, "operstate") != "down"]
    if not LOOPBACKS.intersection(names):
        yield Finding("loopback", BROKEN, "there is no loopback interface", "sudo ip link set lo up")
    if not others:
        loses = "Training on several machines will not run: there is no network interface but loopback"
        yield Finding("interfaces", NOTE, "only loopback", loses=loses)
        return
    speeds = [(name, driver(name, "speed")) for name in others]  # -1 if it is unknown
    listed = ", ".join(f"{name} ({speed} Mb/s)" if speed.isdigit() else name for name, speed in speeds)
    yield Finding("interfaces", GOOD, listed)
    mend = f"export GLOO_SOCKET_IFNAME={others[0]}"
    if asked := os.environ.get("GLOO_SOCKET_IFNAME"):
        if wrong := set(asked.split(",")).difference(names):
            yield Finding("gloo", BROKEN, f"GLOO_SOCKET_IFNAME names {min(wrong)}, which is not there", mend)
        else:
            yield Finding("gloo", GOOD, f"takes {asked}, by GLOO_SOCKET_IFNAME")
        return
    host = socket.gethostname()
    try:
        address = socket.gethostbyname(host)
        found = f"takes {address}, the address of {host}"
    except OSError:
        address, found = "", f"the name of this host, {host}, has no address; gloo takes loopback"
    if address and not address.startswith("127."):
        yield Finding("gloo", GOOD, found)
    else:
        loses = "Several machines will not find each other over gloo until GLOO_SOCKET_IFNAME names an interface"
        yield Finding("gloo", NOTE, found + ": loopback only" * bool(address), mend, loses)


def driver(interface: str, what: str) -> str:
    """Return the property `what` of a network interface, such as "speed"; an empty string if it is not reported."""
    try:
        return Path(f"/sys/class/net/{interface}/{what}").read_text().strip()
    except OSError:
        return ""


def two_ranks() -> Iterator[Finding]:
    """Let two processes average a tensor over gloo; yield whether they could."""
    if not hasattr(os, "fork"):
        lacks = f"not tried: live ranks need os.fork, which {sys.platform} lacks; use torchrun"
        yield Finding("two ranks", NOTE, lacks)
        return
    try:
        with Ranks(2, timeout=LIMIT) as ranks:
            ranks.run(mean_of_ranks, limit=LIMIT)
    except (OSError, RuntimeError) as error:
        last = str(error).strip().splitlines()[-1]  # after a traceback, the error itself
        yield Finding("two ranks", BROKEN, f"cannot train together: {last}")
    else:
        yield Finding("two ranks", GOOD, "two processes averaged a tensor over gloo on loopback")


def mean_of_ranks() -> None:
    """Average the numbers 0 and 1 of two ranks; raise an error if the mean is wrong. Both ranks call it."""
    comm = Comm()
    mean = float(mean_(torch.tensor([float(comm.rank)]), comm))
    if mean != 0.5:
        raise RuntimeError(f"the mean of 0 and 1 over gloo was {mean}")


CHECKS = (versions, gpus, compilers, network, two_ranks)
