"""Run a few lines of PTX on several ranks, each with symmetric data and signals."""

import torch

from ptx.driver import Prepared
from ptx.machine import Program
from ptx.memory import region_of
from ptx.ranks.orders import Order
from ptx.ranks.places import Places
from ptx.ranks.running import Running
from ptx.tests.corners.harness import MODULE

REGISTERS = (
    ".reg .b32 %a, %b, %c, %d, %e, %t, %g; .reg .b64 %x, %y, %z, %w; .reg .pred %p, %q;\n"
    "mov.u32 %t, %tid.x;\nmov.u32 %g, %ctaid.x;"
)
WAIT = "{label}: ld.acquire.sys.global.b32 %a, [%x{at}];\nsetp.ne.u32 %p, %a, {value};\n@%p bra {label};\n"
SIGNAL = "mov.u32 %b, {value};\nst.release.sys.global.b32 [%y{at}], %b;\n"


class Memory:
    """Of each rank 512 bytes of data and 64 of signals, both symmetric, and 512 bytes of its own."""

    def __init__(self, ranks):
        self.data, self.own = ([torch.zeros(128, dtype=torch.int32) for _ in range(ranks)] for _ in range(2))
        self.pad = [torch.zeros(16, dtype=torch.int32) for _ in range(ranks)]

    def start(self, rank, peer):
        """%x and %y are the signals of the rank and of its peer, %z and %w the data of the rank and of its peer."""
        memory = zip("xyzw", (self.pad[rank], self.pad[peer], self.data[rank], self.data[peer]), strict=True)
        return "".join(f"mov.u64 %{name}, {tensor.data_ptr()};\n" for name, tensor in memory)


def wait(value, at=0, label="WAIT"):
    """Wait for a signal of the rank."""
    return WAIT.format(label=label, at=f"+{4 * at}", value=value)


def signal(value, at=0):
    """Write a signal of the peer."""
    return SIGNAL.format(at=f"+{4 * at}", value=value)


def run(*bodies, order=None, threads=32, programs=1, memory=None, resident=None, watchers=(), known=False, found=None):
    """Run for each rank its lines, or a list of them, one launch after another. Return the memory and what ran.

    With `known`, each kernel knows the addresses of all ranks' own memory.
    """
    ranks = len(bodies)
    memory, places = memory or Memory(ranks), Places()
    regions = places.declare({"data": memory.data}, ranks, False) + places.declare({"pad": memory.pad}, ranks, True)
    streams = []
    for rank, lines in enumerate(bodies):
        start = memory.start(rank, (rank + 1) % ranks)
        texts = [
            MODULE.format(threads=threads, registers=REGISTERS, body=start + each)
            for each in ([lines] if isinstance(lines, str) else lines)
        ]
        own, others = [region_of(memory.own[rank], "own")], [region_of(each, "own") for each in memory.own]
        others = (lambda regions=others: regions) if known else None
        streams.append([Prepared(Program(text), (programs, 1, 1), (), own, others, 256) for text in texts])
    return memory, Running(streams, places, regions, order or Order(), resident, watchers, found).run()
