"""The device on which Triton launches: the current one."""

import contextlib

import torch


def on(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Let `device` be the current one in a block; where it is, as on a lane, nothing is done."""
    there = device.type != "cuda" or device.index == torch.cuda.current_device()
    return contextlib.nullcontext() if there else torch.cuda.device(device)
