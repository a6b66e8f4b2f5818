"""Small tables that the host has made, brought to a device."""

import torch
from torch import Tensor


def uploaded(x: Tensor, device: torch.device) -> Tensor:
    """Return `x` on `device`. The host waits for nothing.

    A tensor on the CPU is pinned first: the copy of another may wait for all that its stream has been given before.
    """
    if x.is_cpu and device.type == "cuda" and not torch.compiler.is_compiling():  # Dynamo need not know pinned memory
        x = x.pin_memory()
    return x.to(device, non_blocking=True)
