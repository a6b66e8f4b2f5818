"""The memory of a node, which all its ranks can reach, for exchanges in one kernel.

The memory of a rank has two halves, and behind them the words of signals: see `kernels/exchange/tiles_gpu.py`. All
ranks make it together: in the first exchange on a device, where NCCL would connect, or in `Comm.own`; and again where
one needs more, which all ranks know. Where a rank cannot, all release what they have, a warning says which rank and
why, and NCCL sends instead.
"""

import contextlib
import mmap
import uuid
import warnings
import weakref
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from .blocks import Block, CannotReach, Facts, Steps, facts_of, on_devices, on_host, reaches_all, settle, together
from .sending import FLAT, INTRA, backend_of, can_pin, gather_objects

CTAS = 32  # of every exchange: as predicted, fewer fall behind NCCL; and backward has the rest of the processors
LEAST, MOST = 1 << 20, 1 << 27  # bytes of half a rank's memory; what needs more is left to NCCL


@dataclass(eq=False)
class Space:
    """The memory of all ranks, as kernels of this rank use it; most fields are those of `tiles_gpu.Memory`."""

    rank: int
    addresses: Tensor
    counters: Tensor
    control: Tensor
    half_bytes: int
    limit: int
    names: list[int]  # of the ranks, in the whole Comm
    release: Any = field(init=False)  # called once: by `NodeMemory`, or when nothing refers to this any more
    captured: bool = False  # a CUDA graph has these addresses
    _stream: Any = None  # that of the latest exchange

    def __post_init__(self) -> None:
        self._words = self.control.numpy()  # the host reads and writes them without a stream

    def released_by(self, device: torch.device, block: Block) -> "Space":
        held = (self.addresses, self.counters, self.control)
        self.release = weakref.finalize(self, let_go, device, block, held)
        self.release.atexit = False  # the end of the process gives back everything
        return self

    def check(self) -> None:
        """Raise a RuntimeError if an exchange has gone without the values of a rank."""
        if self._words.any():
            late = [name for name, word in zip(self.names, self._words[1:], strict=True) if word]
            if late and not self._words[0]:
                raise RuntimeError(
                    f"rank {late[0]} has not come to an exchange in one kernel within {self.limit / 1e9:g} s; "
                    "its values are NaN"
                )
            raise RuntimeError("this Comm was aborted or closed; it exchanges nothing in one kernel any more")

    def stop(self) -> None:
        """End the waits of kernels; their values become NaN."""
        self._words[0] = 1

    def follow(self, stream: Any, capturing: bool) -> None:
        """Let what `stream` gets next run after the latest exchange: two at once would use the same rows and words.

        A captured graph runs after all that came before its capture, and must not wait for anything outside.
        """
        if self._stream is not None and stream != self._stream:
            with torch.cuda.stream(self._stream):
                alike = torch.cuda.is_current_stream_capturing() == capturing
            if alike:
                stream.wait_stream(self._stream)
        self._stream, self.captured = stream, self.captured or capturing


class NodeMemory:
    """The memory of the ranks of `group`, which are on one node, by device. `part` and `rank` are of the whole Comm."""

    def __init__(self, group: Any, part: str, rank: int) -> None:
        self.group, self.part, self.rank = group, part, rank
        self.spaces: dict[torch.device, Space] = {}
        self._most: dict[torch.device, int] = {}  # bytes of a half, where a rank could not make more
        self._agreed: dict[torch.device, int] = {}  # bytes of a half for exchanges whose rows differ by rank
        self._captured: list[Space] = []  # those that have become too small, and that graphs may use

    @cached_property
    def for_neighbors(self) -> "NodeMemory":
        """Other memory of the group: in exchanges between neighbours, a rank waits for these only."""
        return NodeMemory(self.group, self.part, self.rank)

    def memory(self, x: Tensor, needed: int, differs: bool = False) -> Space | None:
        """Return memory with halves of `needed` bytes for the exchange of `x` that is launched next; None: use NCCL.

        Collective. If larger memory must be made, the host waits for the device. With `differs`, `needed` is that of
        this rank: the memory has room for twice what any rank needs in the first such exchange.

        Raises:
            RuntimeError: larger memory is needed, and a CUDA graph is captured; or a rank did not come to an exchange.
        """
        if not x.is_cuda:
            return None
        with torch.cuda.device(x.device):
            if differs and x.device not in self._agreed:
                self._agreed[x.device] = min(MOST, 2 * max(gather_objects(needed, self.group, False)))
            needed = self._agreed[x.device] if differs else needed
            if needed > self._most.get(x.device, MOST):
                return None
            capturing, space = torch.cuda.is_current_stream_capturing(), self.spaces.get(x.device)
            if space is not None:
                space.check()
            if space is None or needed > space.half_bytes:
                if capturing:
                    raise RuntimeError(
                        f"an exchange of {x.numel():,} values in one kernel needs memory that cannot be made while a "
                        "CUDA graph is captured; run it once before"
                    )
                space = self.grow(x.device, needed)
            if space is not None:
                space.follow(torch.cuda.current_stream(x.device), capturing)
            return space

    def grow(self, device: torch.device, needed: int) -> Space | None:
        """Make memory with halves of `needed` bytes or more, and return it; None if a rank cannot. Collective."""
        settle(device)  # on all ranks, before any of them has the new memory: nobody uses the old one any more
        half, before = max(LEAST, 1 << (needed - 1).bit_length()), self.spaces.get(device)
        try:
            made: Space = together(self.group, self.rank, space_of_all(self.group, self.rank, device, half))
        except CannotReach as error:
            self._most[device] = 0 if before is None else before.half_bytes
            if self.group.rank() == 0:
                warnings.warn(f"kernels=True: {error}; NCCL sends instead", stacklevel=2)
            return None
        self.spaces[device] = made
        if before is not None and before.captured:
            self._captured.append(before)
        elif before is not None:
            before.release()
        return made

    def another(self, group: Any, device: torch.device) -> "NodeMemory":
        """Return other memory of the same ranks, with a group of their own. Collective."""
        new = NodeMemory(group, self.part, self.rank)
        if device.type == "cuda" and group.size() > 1:
            there = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
            with torch.cuda.device(there):
                new.grow(there, LEAST)
        return new

    def all(self) -> list[Space]:
        others = self.for_neighbors.all() if "for_neighbors" in vars(self) else ()
        return [*self.spaces.values(), *self._captured, *others]

    def check(self) -> None:
        """Raise a RuntimeError if an exchange has gone without the values of a rank."""
        for space in self.all():
            space.check()

    def stop(self) -> None:
        """End the waits of all kernels. Any thread may call this."""
        for space in self.all():
            space.stop()

    def close(self) -> None:
        """Release the memory once all kernels have ended."""
        self.stop()
        for space in self.all():
            space.release()


def node_of(comm: Any) -> NodeMemory:
    """Return the memory of this rank's node, made with the first exchange; raise a ValueError if that is impossible."""
    part, group = (FLAT, comm.group) if comm._parts is None else (INTRA, comm._parts[0])
    if torch.version.hip:
        raise ValueError("kernels=True runs on NVIDIA's GPUs only, so far, and this torch is for AMD's; leave it out")
    if (found := backend_of(group, "cuda")) != "nccl":
        raise ValueError(
            f"kernels=True averages on GPUs, and this group has {found} for CUDA tensors, not NCCL; "
            "use init_process_group('nccl'), or leave it out"
        )
    return NodeMemory(group, part, comm.rank)


def space_of_all(group: Any, rank: int, device: torch.device, half: int) -> Steps:
    """Make a Space with halves of `half` bytes on all ranks."""
    name, facts_here = f"baguakit/{uuid.uuid4().hex}", facts_of(rank, device)
    told: list[tuple[str, Facts]] = yield name, facts_here
    name, facts = told[0][0], [each for _, each in told]
    if facts_here.problem or facts_here.host != facts[0].host:
        raise CannotReach(facts_here.problem or f"runs on another host than rank {facts[0].rank}")
    alike: list[bool] = yield reaches_all(device, facts)
    ranks = len(facts)
    nbytes = -(-(2 * half + 8 * ranks * CTAS) // mmap.PAGESIZE) * mmap.PAGESIZE
    steps = on_devices(group, name, device, nbytes) if all(alike) else on_host(group.rank(), ranks, name, nbytes)
    block: Block = yield from steps
    try:
        control = torch.zeros(1 + ranks, dtype=torch.int32, device="cpu", pin_memory=can_pin(device.type))
        counters = torch.zeros(CTAS, dtype=torch.int32, device=device)
        addresses = torch.tensor(block.addresses, dtype=torch.int64, device=device)
        settle(device)  # other streams will use them
        limit = round(1e9 * group._get_backend(device).options._timeout.total_seconds())
        names = [each.rank for each in facts]
        return Space(group.rank(), addresses, counters, control, half, limit, names).released_by(device, block)
    except BaseException:
        block.release()
        raise


def let_go(device: torch.device, block: Block, used: Any) -> None:
    """Release memory when the device has ended all kernels that may use it, or what is `used` with it."""
    with contextlib.suppress(RuntimeError):  # of a device that has failed, which the next call raises elsewhere
        settle(device)
        block.release()
