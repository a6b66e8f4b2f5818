"""Delayed gradients:  x_{t+1} = x_t − γ d(s_{t−d}),  s_t = stage(g_t(x_t)),  s_t = 0 for t < 0."""

import math
import threading

import pytest
import torch
import torch.distributed as dist
from everything import made
from failing import Fails
from pool import ranks
from saying import TIMEOUT, said
from torch import nn
from training import flat, loss, net, net_and_sgd, run_steps

import baguakit as bk
from baguakit.attach.runners.runner import padded_multiple
from baguakit.buckets import split

MEAN, FEEDBACK = "Mean()", "ErrorFeedback(CompressedMean(MinMaxUInt8(block=64)))"
ONE_BUCKET, BUCKETS = 25 << 20, 200


def by_hand(stage, d, steps=7, bad=(), micro=1, bucket_bytes=ONE_BUCKET):
    """Train this rank by the equation, with one flight after another. Return the weights.

    In the steps `bad` rank 1 has a gradient that is not finite: nothing of it is kept, and no rank steps with it.
    """
    model, optimizer = net_and_sgd()
    comm, stage = bk.Comm(), made(stage)
    groups = split(list(model.parameters()), bucket_bytes)
    buckets = [bk.Bucket(group, padded_multiple(stage.multiple_of(comm), group)) for group in groups]
    states = [stage.init(bucket, comm) for bucket in buckets]
    air = [[torch.zeros_like(bucket.flat) for bucket in buckets] for _ in range(d)]
    for step in range(steps):
        optimizer.zero_grad()
        for part in range(micro):
            loss(model, dist.get_rank(), step + 100 * part).backward()
        flying = [bucket.load("grad").clone() for bucket in buckets]
        if step not in bad:
            flying = [stage(x, state, comm.at(step)) for x, state in zip(flying, states, strict=True)]
        air.append(flying)
        for bucket, landed in zip(buckets, air.pop(0), strict=True):
            bucket.flat.copy_(landed)
            bucket.store("grad")
        if step - d not in bad:
            optimizer.step()
    return flat(model)


@pytest.mark.parametrize("d", [1, 2])
def test_delayed_gradients_are_the_equation(d):
    """Bit for bit, with the gradients kept as zeros or dropped before each backward, and accumulated in three parts."""

    def attached(stage, bucket_bytes, to_none, micro):
        model, optimizer = net_and_sgd()
        rule = bk.during_backward(made(stage), delay=d)
        with bk.attach(model, optimizer, rule, bucket_bytes=bucket_bytes) as att:
            for step in range(7):
                optimizer.zero_grad(set_to_none=to_none)
                for part in range(micro - 1):
                    with att.no_sync():
                        loss(model, dist.get_rank(), step + 100 * part).backward()
                loss(model, dist.get_rank(), step + 100 * (micro - 1)).backward()
                optimizer.step()
            return flat(model)

    def run():
        same = []
        for stage in (MEAN, FEEDBACK):
            for bucket_bytes, to_none, micro in ((ONE_BUCKET, True, 1), (BUCKETS, False, 1), (BUCKETS, True, 3)):
                expected = by_hand(stage, d, micro=micro, bucket_bytes=bucket_bytes)
                same.append(torch.equal(attached(stage, bucket_bytes, to_none, micro), expected))
        return same

    assert ranks(3, run) == [[True] * 6] * 3
