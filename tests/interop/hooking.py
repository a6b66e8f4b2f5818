"""Stages for the hooks of DDP and FSDP2, and the toy net trained with them."""

import io

import pytest
import torch
from torch import nn
from training import flat, loss, net, sgd

SMALL = 2e-4  # MiB: DDP makes two buckets of the toy net after its first backward
BLOCKS = 64  # values in a block of the compressor, so that the toy net has several


def compressed(bk):
    return bk.stages.CompressedMean(bk.compressors.MinMaxUInt8(block=BLOCKS))


def feedback(bk):
    return bk.stages.ErrorFeedback(compressed(bk))


def train(module, optimizer, steps, begin=0):
    """Train on this rank from step `begin` to step `steps`."""
    import torch.distributed as dist

    for step in range(begin, steps):
        optimizer.zero_grad()
        loss(module, dist.get_rank(), step).backward()
        optimizer.step()


def come_and_gone(put, wrapped, bk):
    """Let two stages come and go: beside one there is no place for another, and to detach twice is to detach once."""
    import torch.distributed as dist

    for stage in (compressed(bk), bk.stages.Mean()):
        handle = put(wrapped, stage)
        with pytest.raises(ValueError, match="has a stage already"):
            put(wrapped, stage)
        loss(wrapped, dist.get_rank(), 0).backward()
        handle.detach()
        handle.detach()
        wrapped.zero_grad()


def hooked(stage, steps=8, begin=0, saved=None, **options):
    """Train in DDP with `stage(bk)` in its hook, if there is one; return the weights, and what a checkpoint holds."""
    import baguakit as bk

    options = {"bucket_cap_mb": SMALL, **options}
    module = net()
    ddp = nn.parallel.DistributedDataParallel(module, **options)
    optimizer = sgd(module.parameters())
    handle = bk.interop.ddp(ddp, stage(bk)) if stage is not None else None
    if saved is not None:
        loaded = torch.load(io.BytesIO(saved), weights_only=True)
        module.load_state_dict(loaded["model"])
        optimizer.load_state_dict(loaded["optimizer"])
        handle.load_state_dict(loaded["handle"])
    train(ddp, optimizer, steps, begin)
    buffer = io.BytesIO()
    if handle is not None:
        state = {"model": module.state_dict(), "optimizer": optimizer.state_dict(), "handle": handle.state_dict()}
        torch.save(state, buffer)
        handle.detach()
    return flat(module), buffer.getvalue()
