"""The device on which Triton launches: the current one."""

import contextlib

import torch


def on(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Make `device` the current one in a block; do nothing if it is, as on a lane."""
    there = device.type != "cuda" or device.index == torch.cuda.current_device()
    return contextlib.nullcontext() if there else torch.cuda.device(device)
