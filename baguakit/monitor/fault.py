"""The error that names the rank at fault, and the flag by which a GPU learns of it."""

from collections.abc import Sequence

import torch
from torch import Tensor


class Fault:
    """A number in pinned memory, for each dtype: 1 at first, and then NaN, or False in that of bools.

    An abort ends the kernels of a flight before its data have come, and steps that the host has queued by then apply
    half a sum. The device reads the number after the flight, and it has been set before the abort; so the host waits
    for nothing. Gradients are multiplied by it, which changes no bit at first: a step that is lost shows in every
    parameter. Weights stay as they were.
    """

    def __init__(self) -> None:
        self._is_set = False
        self._numbers: dict[torch.dtype, Tensor] = {}

    def set(self) -> None:
        """Let what lands from now on be lost."""
        self._is_set = True
        for number in list(self._numbers.values()):
            number.fill_(torch.nan if number.is_floating_point() else 0)

    def multiply_(self, heads: Sequence[Tensor]) -> None:
        """Multiply tensors of one dtype and device, about a hundred in a launch. The host waits for nothing."""
        torch._foreach_mul_(list(heads), self._on(heads[0].device, heads[0].dtype))

    def choose_(self, out: Tensor, result: Tensor, own: Tensor) -> None:
        """Fill `out` with the result of a flight, or with `own` if that is lost. The host waits for nothing."""
        torch.where(self._on(out.device, torch.bool), result.to(out.dtype), own, out=out)

    def _on(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        if dtype not in self._numbers:
            number = torch.ones((), dtype=dtype)
            self._numbers[dtype] = number.pin_memory() if device.type == "cuda" else number
            if self._is_set:  # meanwhile, by another thread
                self.set()
        return self._numbers[dtype].to(device, non_blocking=True)


class PeerError(RuntimeError):
    """A rank is dead, late, gone or has raised: the message names it."""

    __module__ = "baguakit"  # tracebacks show the public name


def again(error: PeerError) -> PeerError:
    """Return a copy of an error, to be raised again with its own traceback."""
    new = PeerError(*error.args)
    new.__cause__ = error.__cause__
    return new


def from_network(error: BaseException) -> RuntimeError | None:
    """Return the error of a process group or store that caused `error`: the deepest RuntimeError in its chain; or None.

    torch wraps the errors of groups that it has not made itself in an error about its own log.
    """
    found, each = None, error
    seen: set[int] = set()
    while each is not None and id(each) not in seen:
        seen.add(id(each))
        found = each if isinstance(each, RuntimeError) else found
        each = each.__cause__ or each.__context__  # type: ignore[assignment]
    return found
