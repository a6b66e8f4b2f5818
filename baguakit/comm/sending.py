"""Calls and checks of messages, counts of bytes and formats, and the flags that are sent with a flight.

Gloo sends CPU tensors. If a group does not send tensors of a device by NCCL, they are *staged*: copied to the host (to
pinned memory, if it can be pinned for the device), sent by gloo, and copied from the host of the receiver to its
device. The thread that sends waits for the copy to the host; a copy to a device with streams is only enqueued.

Where baguakit has no kernels for a device, a flight copies its whole tensor to the host first, computes on the CPU, and
copies the result back. Then states are on the CPU, too.
"""

import json
import pickle
from collections.abc import Callable
from functools import cache, wraps
from typing import Any, NamedTuple, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ..arguments import describe, instance, integer, message, tensor
from ..kernels.operators import has_kernels
from ..lanes.base import finish, streams_of
from ..tensors import bytes_of, check_apart, plain

F = TypeVar("F", bound=Callable[..., Any])
Own = TypeVar("Own", bound="Inner")
CPU = torch.device("cpu")
TAGS = 1 << 31
LENGTHS = 0x1E3779B1  # odd and large: messages of different lengths have tags that are far apart
FLAT, INTER, INTRA = "flat", "inter", "intra"
PLACES = {INTRA: ", within nodes", INTER: ", between nodes"}
LONGEST = 1 << 16  # bytes that flags may add to an all-gather; with more, a separate all-reduce adds fewer
Sent = dict[str, float]
"""The bytes that were sent, by part of the network."""

# torch 2.13 renamed these functions, and warns for the old names; older versions have only the old names.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_staged: WeakKeyDictionary[Any, dict[str, bool]] = WeakKeyDictionary()  # by group, for each kind of device
_mirrors = WeakIdKeyDictionary()  # by tensor, the CPU tensor that stands for it
_warm: WeakKeyDictionary[Any, set[torch.device]] = WeakKeyDictionary()  # by group, the devices whose tensors it sent

SENT = {
    *(torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
}


def as_sent(x: Tensor) -> Tensor:
    """Return the contiguous `x`, or its bytes if gloo or NCCL does not send its dtype, such as int16 or complex64."""
    return x if x.dtype in SENT else bytes_of(x)


def check_added(x: Tensor, op: Any = dist.ReduceOp.SUM) -> None:
    """Raise a TypeError unless gloo and NCCL add values of the dtype of `x`, by a reduction of torch."""
    instance("op", op, (dist.ReduceOp, dist.ReduceOp.RedOpType), "a reduction such as torch.distributed.ReduceOp.SUM")
    if x.dtype not in SENT and not x.is_complex():
        raise TypeError(message("x", "of a dtype that gloo and NCCL add, such as float32 or int32", x))


def warm(group: Any, device: torch.device) -> None:
    """Send a first byte, if this group has never sent tensors of `device`. Collective.

    NCCL makes its communicator in the first call, which waits for all ranks, even for ranks that send no message. Over
    gloo, each rank sends the byte to the next rank. So an interface that cannot reach the other hosts is noticed early.
    """
    device = CPU if is_staged(group, device) else device
    if group.size() == 1 or device in _warm.setdefault(group, set()):
        return
    byte = torch.zeros(1, dtype=torch.uint8, device=device)
    if device.type == "cuda":
        dist.all_reduce(byte, group=group)
    else:
        works = [group.recv([byte], (group.rank() - 1) % group.size(), 0)]
        works.append(group.send([torch.zeros_like(byte)], (group.rank() + 1) % group.size(), 0))
        for work in works:
            work.wait()
    _warm[group].add(device)


def check_peer(peer: int, group: Any) -> None:
    if integer("peer", peer, 0, group.size() - 1) == group.rank():
        raise ValueError(f"peer is another rank of the group, 0 to {group.size() - 1}, not {peer}, which is this one")


def check_gathered(out: Tensor, x: Tensor, size: int, name: str = "x") -> None:
    """Raise a ValueError unless `out` has the dtype of `x` and `size` times its values. In the error, `x` is `name`."""
    if out.numel() != size * x.numel() or out.dtype != x.dtype:
        raise ValueError(f"out holds {size} tensors like {name}; out is {describe(out)}, and {name} is {describe(x)}")


# `dist.all_gather_object` and `dist.broadcast_object_list` are not used, because with TORCH_DISTRIBUTED_DEBUG=DETAIL
# they accept only groups that torch made.


def gather_objects(value: Any, group: Any, plain: bool) -> list[Any]:
    """Return each rank's `value`, by rank; sent as JSON if `plain`, else as a pickle. Collective."""
    mine, fault = _packed(value, plain)
    there = device_of(group)
    sizes = torch.empty(group.size(), dtype=torch.int64, device=there)
    all_gather_single(sizes, torch.tensor([-1 if fault else len(mine)], device=there), group=group)
    _raise_alike(fault, counts := sizes.tolist())
    padded = torch.zeros(max(counts), dtype=torch.uint8)
    padded[: len(mine)] = mine
    landed = torch.empty(len(counts) * len(padded), dtype=torch.uint8, device=there)
    all_gather_single(landed, padded.to(there), group=group)
    rows = landed.cpu().view(len(counts), -1)
    return [_unpacked(rows[rank, :count], rank, plain) for rank, count in enumerate(counts)]


def broadcast_object(value: Any, source: int, group: Any) -> Any:
    """Return the picklable `value` of rank `source`. Collective."""
    mine, fault = _packed(value if group.rank() == source else None, False)
    there = device_of(group)
    size = torch.tensor([-1 if fault else len(mine)], device=there)
    dist.broadcast(size, group=group, group_src=source)
    _raise_alike(fault, [0] * source + size.tolist())
    landed = mine.to(there) if group.rank() == source else torch.empty(int(size), dtype=torch.uint8, device=there)
    dist.broadcast(landed, group=group, group_src=source)
    return _unpacked(landed.cpu(), source, False)


def _packed(value: Any, plain: bool) -> tuple[Tensor, TypeError | None]:
    """Return a value as bytes (uint8), and the error that its rank raises if it has no bytes."""
    try:
        content = json.dumps(value).encode() if plain else pickle.dumps(value)
    except Exception as error:
        form, why = "written as JSON, with plain=True" if plain else "pickled", f"{type(error).__name__}: {error}"
        return torch.empty(0, dtype=torch.uint8), TypeError(f"value cannot be {form} ({why}): {describe(value)}")
    return torch.frombuffer(bytearray(content), dtype=torch.uint8), None


def _unpacked(content: Tensor, rank: int, plain: bool) -> Any:
    try:
        return (json.loads if plain else pickle.loads)(content.numpy().tobytes())
    except Exception as error:  # such as that of torch for a pickled float8 tensor
        raise ValueError(f"the value of rank {rank} cannot be read ({type(error).__name__}: {error})") from error


def _raise_alike(fault: TypeError | None, lengths: list[int]) -> None:
    """Raise the error of this rank, or name a rank that has one: its length is −1."""
    if min(lengths) < 0:
        raise fault or TypeError(f"the value of rank {lengths.index(-1)} cannot be sent; that rank says why")


def device_of(group: Any) -> torch.device:
    kinds = {each.type for each in group._device_types}
    return torch.device("cpu") if "cpu" in kinds else torch.device("cuda", torch.cuda.current_device())


class SentFormat(NamedTuple):
    """The format that was requested for a flight, and the format in which the flight sent values.

    In a flight the fields are objects; in a report they are text, which `in_words` makes only for reports.

    Attributes:
        asked: the requested format; in a report an expression.
        flew: the format that was sent; in a report an expression, a dtype such as "float32", or "nothing".
        reason: why `flew` is not `asked`, that `asked` saves no bytes, or "in one kernel"; "" if neither.
        part: the part of the network: "flat", "intra" or "inter".
    """

    asked: Any
    flew: Any
    reason: Any
    part: str

    def in_words(self) -> "SentFormat":
        return SentFormat(_named(self.asked), _named(self.flew), str(self.reason), self.part)

    def line(self, flights: int, of: int) -> str:
        """Return the text that a report prints after a bucket's name; `flights` of `of` flights used this format."""
        times = f" in {flights:,} of {of:,} flights" if flights < of else ""
        instead = f", not {self.asked}" if self.reason and self.asked != self.flew else ""
        return f"{PLACES.get(self.part, '')}: {self.flew}{times}{instead}" + f": {self.reason}" * bool(self.reason)


def _named(format: Any) -> str:
    if format is None:
        return "nothing"
    return str(format).removeprefix("torch.") if isinstance(format, torch.dtype) else repr(format)


class Rider:
    """Flags of a flight: a row of bytes on each rank. The maximum of the rows of all ranks is needed.

    On a GPU a separate collective would add latency. So the first all-gather of the flight also sends the flags; with a
    mesh, the first between nodes and the first within nodes do. If a rank is not reached, `arrive` all-reduces them.
    """

    def __init__(self, mine: Tensor, size: int) -> None:
        self.rows = mine.view(1, -1)  # (k, bytes), of the ranks that are reached so far
        self._size, self._parts = size, set[str]()

    def aboard(self, comm: Any) -> Any:
        """Return a copy of `comm` whose all-gathers also send these flags."""
        return comm._with(_rider=self)

    def boards(self, part: str, size: int) -> tuple[Tensor, Tensor] | None:
        """Return (out, input) to all-gather flags in `part`; None if they have been gathered there, or are too long."""
        rows = size * len(self.rows)
        if part in self._parts or rows > self._size or rows * self.rows.shape[1] > LONGEST:
            return None
        self._parts.add(part)
        out, mine = self.rows.new_empty(rows, self.rows.shape[1]), self.rows
        self.rows = out
        return out, mine

    def arrive(self, comm: Any) -> None:
        """All-reduce the flags, unless all-gathers have sent them to all ranks. Collective."""
        if len(self.rows) < self._size:
            comm.all_reduce(self.rows, dist.ReduceOp.MAX)


def backend_of(group: Any, kind: str) -> str:
    """Return the backend that a group uses for tensors on this kind of device, such as "gloo"; "nothing" if none."""
    try:
        return str(group._get_backend(torch.device(kind)).name()).lower()
    except RuntimeError:
        return "nothing"


def is_staged(group: Any, device: torch.device) -> bool:
    if device.type == "cpu":
        return False
    known = _staged.setdefault(group, {})
    if device.type not in known:
        known[device.type] = device.type != "cuda" or backend_of(group, "cuda") != "nccl"
    return known[device.type]


@cache
def can_pin(kind: str) -> bool:
    """Return whether memory of the host can be pinned for this kind of device, the accelerator of this process."""
    found = torch.accelerator.current_accelerator()
    if found is None or found.type != kind:
        return False
    try:
        return torch.empty(1, dtype=torch.uint8, pin_memory=True).is_pinned()
    except (RuntimeError, NotImplementedError):
        return False


def host_like(x: Tensor) -> Tensor:
    """Return an uninitialised CPU tensor like `x`, pinned if possible."""
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=can_pin(x.device.type))


def to_host(x: Tensor, host: Tensor | None = None) -> Tensor:
    """Copy `x` to `host`, by default a new CPU tensor, wait until the values are there, and return it."""
    if host is None:
        host = host_like(x)
    else:
        finish(x.device)  # an earlier copy from `host` may not have been made yet
    host.copy_(tensor("x", x).detach(), non_blocking=streams_of(x.device) is not None)
    finish(x.device)
    return host


def to_device(x: Tensor, host: Tensor) -> Tensor:
    """Copy `host` to `x`, and return `x`. The host does not wait, if the device has streams."""
    return x.copy_(host.view(x.shape), non_blocking=streams_of(x.device) is not None)


def from_host(collective: F) -> F:
    """Let a collective of a `Comm` take a dense tensor on any device, with any strides; return its result there."""

    @wraps(collective)
    def staged(self: Any, x: Tensor, *arguments: Any, **named: Any) -> Any:
        tensor("x", x)
        if self.size == 1 or (ready := self._ready(x)) is x:
            return collective(self, x, *arguments, **named)
        result = collective(self, ready, *arguments, **named)
        if result is not ready:
            return result if result.device == x.device else to_device(torch.empty_like(result, device=x.device), result)
        check_apart({"x": x})
        return to_device(x, result)

    return cast(F, staged)


class Inner:
    """The methods of a `Comm` that, but for `hierarchical`, only this package calls."""

    group: Any
    rank: int
    size: int
    _parts: tuple[Any, Any] | None
    _part: str
    _sent: Sent | None
    _call: int

    @property
    def hierarchical(self) -> bool:
        """True if this `Comm` has a mesh, so that `intra` and `inter` can be used."""
        return self._parts is not None

    def _with(self: Own, **changes: Any) -> Own:
        """Return a copy with these private fields. `replace` is slower: it would check all fields again."""
        copy = object.__new__(type(self))
        vars(copy).update(vars(self), **changes)
        return copy

    def _stages(self, x: Tensor) -> bool:
        """Return whether `x` is sent from the memory of the host, and is not there."""
        return not x.is_cpu and is_staged(self.group, x.device)

    def _as_it_lies(self, x: Tensor) -> bool:
        """Return whether `x` can be sent as it lies in memory; of others gloo sends wrong values, without an error."""
        ordered = x.is_contiguous() and not x.is_conj() and not x.is_neg()
        return ordered and (x.is_cpu or not self._stages(x))

    def _ready(self, x: Tensor) -> Tensor:
        """Return `x`, or a copy that can be sent."""
        if self._as_it_lies(x):
            return x
        return to_host(x) if self._stages(x) else plain(x)

    def _landing(self, x: Tensor) -> Tensor:
        """Return `x`, or an uninitialised tensor like it in which messages can land."""
        if self._as_it_lies(x):
            return x
        return host_like(x) if self._stages(x) else torch.empty(x.shape, dtype=x.dtype, device=x.device)

    def _by_nccl(self, device: torch.device) -> bool:
        """Return whether tensors on `device` are sent by NCCL, in collectives of all ranks; otherwise by gloo."""
        return device.type == "cuda" and not is_staged(self.group, device)

    def _by_host(self, device: torch.device) -> bool:
        """Return whether tensors on `device` are sent from the memory of the host, in any group of this `Comm`."""
        return any(is_staged(group, device) for group in (self.group, *(self._parts or ())))

    def _home(self, device: torch.device) -> torch.device:
        """Return where flights of tensors on `device` compute: on the CPU, if there are no kernels for it."""
        return CPU if self._by_host(device) and not has_kernels(device) else device

    def _at_home(self, x: Tensor) -> Tensor:
        """Return `x` on the device where flights compute: `x` itself, or the CPU tensor that always stands for it."""
        if self._home(x.device) == x.device:
            return x
        if x not in _mirrors:
            _mirrors[x] = host_like(x)
        return to_host(x, _mirrors[x])

    def _nodes(self) -> tuple[Any, Any]:
        if self._parts is None:
            made = 'Comm(mesh="hosts"), or with a DeviceMesh of the dimensions ("inter", "intra")'
            raise ValueError(f"this Comm has no mesh; construct it with {made}; stages name both in `needs_groups`")
        return self._parts

    def _tag(self, x: Tensor, peer: int, tag: int) -> int:
        typed = isinstance(x, Tensor) and type(tag) is int and type(peer) is int
        if not typed or peer == self.rank or not 0 <= peer < self.size:
            x, tag = tensor("x", x), integer("tag", tag)
            check_peer(peer, self.group)
        return (tag + self._call + LENGTHS * x.nbytes) % TAGS

    def _count(self, nbytes: float) -> None:
        if self._sent is not None:
            self._sent[self._part] = self._sent.get(self._part, 0) + nbytes


class Staged:
    """Work that ends with a copy from `host` to `x`."""

    def __init__(self, work: Any, x: Tensor, host: Tensor) -> None:
        self._work, self._x, self._host = work, x, host

    def wait(self) -> None:
        if self._work is not None:
            self._work.wait()
        to_device(self._x, self._host)
