"""Stages for the hooks of DDP and FSDP2, and the toy net trained with them."""

import io

import pytest
import torch
import torch.distributed as dist
from torch import nn
from training import flat, loss, net, run_steps, sgd

import baguakit as bk

SMALL = 2e-4  # MiB: DDP makes two buckets of the toy net after its first backward
BLOCKS = 64  # values in a block of the compressor, so that the toy net has several


def compressed(bk):
    return bk.stages.CompressedMean(bk.compressors.MinMaxUInt8(block=BLOCKS))


def feedback(bk):
    return bk.stages.ErrorFeedback(compressed(bk))


def come_and_gone(put, wrapped, bk):
    """Let two stages come and go: beside one there is no place for another, and to detach twice is to detach once."""
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
    run_steps(ddp, optimizer, range(begin, steps))
    buffer = io.BytesIO()
    if handle is not None:
        state = {"model": module.state_dict(), "optimizer": optimizer.state_dict(), "handle": handle.state_dict()}
        torch.save(state, buffer)
        handle.detach()
    return flat(module), buffer.getvalue()
