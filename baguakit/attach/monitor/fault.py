"""The fault: a number by which a GPU multiplies gradients as they land, which becomes NaN when the monitor gives up."""

from collections.abc import Sequence

import torch
from torch import Tensor


class Fault:
    """A number in pinned memory, for each dtype:  x ← fault · x,  1 at first, which changes no bit of x.

    An abort ends the kernels of a flight before its data have come, and steps that the host has queued by then apply
    half a sum. The device reads the number after the flight, and it has been set before the abort; so the host waits
    for nothing, and a step that is lost shows in every parameter.
    """

    def __init__(self) -> None:
        self._value = 1.0
        self._numbers: dict[torch.dtype, Tensor] = {}

    def set(self) -> None:
        """Multiply by NaN from now on."""
        self._value = torch.nan
        for number in list(self._numbers.values()):
            number.fill_(torch.nan)

    def multiply_(self, heads: Sequence[Tensor]) -> None:
        """Multiply tensors of one dtype and device, about a hundred in a launch. The host waits for nothing."""
        dtype, device = heads[0].dtype, heads[0].device
        if dtype not in self._numbers:
            number = torch.ones((), dtype=dtype)
            self._numbers[dtype] = number.pin_memory() if device.type == "cuda" else number
            if self._value != 1:  # it was set meanwhile, by another thread
                self._numbers[dtype].fill_(torch.nan)
        torch._foreach_mul_(list(heads), self._numbers[dtype].to(device, non_blocking=True))
