"""Training that goes wrong, and the sentence that it ends with."""

import time

import torch
import torch.distributed as dist
from everything import made
from training import flat, loss, net, sgd

import baguakit as bk

TIMEOUT = 3.0


class Fails(torch.autograd.Function):
    """The identity, whose backward raises."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, *g):
        raise MemoryError("out of memory")


def said(run, *args):
    """Return the kind and the sentence of the error that `run` raises; "" if none."""
    try:
        run(*args)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def train(algorithm, each, steps=8, timeout=TIMEOUT, **options):
    """Train; `each(att, model, optimizer, step, rank)` comes before a step's backward, and may say to skip it."""
    rank, model = dist.get_rank(), net()
    optimizer = sgd(model.parameters())
    with bk.attach(model, optimizer, made(algorithm), timeout=timeout, bucket_bytes=200, **options) as att:
        for step in range(steps):
            optimizer.zero_grad()
            if each(att, model, optimizer, step, rank) != "skip":
                loss(model, rank, step).backward()
                optimizer.step()
            time.sleep(0.05)
    return flat(model)
