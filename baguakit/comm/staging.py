"""Send tensors of any device from the memory of the host.

Gloo sends CPU tensors. If a group does not send tensors of a device by NCCL, they are *staged*: copied to the host (to
pinned memory, if it can be pinned for the device), sent by gloo, and copied from the host of the receiver to its
device. The thread that sends waits for the copy to the host; a copy to a device with streams is only enqueued.

Where baguakit has no kernels for a device, a flight copies its whole tensor to the host first, computes on the CPU, and
copies the result back. Then states are on the CPU, too.
"""

from collections.abc import Callable
from functools import cache, wraps
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ..kernels.operators import has_kernels
from ..lanes.base import finish, streams_of

F = TypeVar("F", bound=Callable[..., Any])
CPU = torch.device("cpu")
_staged: WeakKeyDictionary[Any, dict[str, bool]] = WeakKeyDictionary()  # by group, for each kind of device
_mirrors = WeakIdKeyDictionary()  # by tensor, the CPU tensor that stands for it


def backend_of(group: Any, kind: str) -> str:
    """Return the backend that a group uses for tensors on this kind of device, such as "gloo"; "nothing" if none."""
    try:
        return str(group._get_backend(torch.device(kind)).name()).lower()
    except RuntimeError:
        return "nothing"


def is_staged(group: Any, device: torch.device) -> bool:
    """Return whether a group sends tensors on `device` from the memory of the host."""
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
    host.copy_(x.detach(), non_blocking=streams_of(x.device) is not None)
    finish(x.device)
    return host


def to_device(x: Tensor, host: Tensor) -> Tensor:
    """Copy `host` to `x`, and return `x`. The host does not wait, if the device has streams."""
    return x.copy_(host.view(x.shape), non_blocking=streams_of(x.device) is not None)


def from_host(collective: F) -> F:
    """Let a collective of a `Comm` take a tensor that is staged, and return its result on the device."""

    @wraps(collective)
    def staged(self: Any, x: Tensor, *arguments: Any, **named: Any) -> Any:
        if not self._stages(x):
            return collective(self, x, *arguments, **named)
        host = to_host(x)
        result = collective(self, host, *arguments, **named)
        return to_device(x if result is host else torch.empty_like(result, device=x.device), result)

    return cast(F, staged)


class AnyDevice:
    """A `Comm`, as far as it knows devices."""

    group: Any
    _parts: tuple[Any, Any] | None

    def _stages(self, x: Tensor) -> bool:
        """Return whether `x` is sent from the memory of the host, and is not there."""
        return isinstance(x, Tensor) and not x.is_cpu and is_staged(self.group, x.device)

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


class Staged:
    """Work that ends with a copy from `host` to `x`."""

    def __init__(self, work: Any, x: Tensor, host: Tensor) -> None:
        self._work, self._x, self._host = work, x, host

    def wait(self) -> None:
        if self._work is not None:
            self._work.wait()
        to_device(self._x, self._host)
