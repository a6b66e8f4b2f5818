"""Timelines of two ranks under every kind of rule, recorded once for all tests that read them."""

from functools import cache

import pytest
import torch.distributed as dist
from pool import ranks
from training import batch, net, sgd

import baguakit as bk

STEPS = 6
# Each as an expression, evaluated on the rank.
RULES = {
    "gradients": "[bk.algorithms.gradient_allreduce()]",
    "delayed gradients": "[bk.algorithms.gradient_allreduce(delay=2)]",
    "awc": "[bk.algorithms.decentralized(bk.topology.Ring())]",
    "atc": "[bk.after_step(bk.stages.Mean(), every=2)]",
    "delayed, with gradients": "[bk.algorithms.bytegrad(), bk.after_step(bk.stages.Mean(), every=3, delay=2)]",
    "free": "[bk.algorithms.async_model_average()]",
}


def timed(device="cpu"):
    """On a rank, for each of `RULES`: the timeline, that of the latest two steps, and the flights that have landed."""
    results = {}
    for name, expression in RULES.items():
        model = net().to(device)
        optimizer = sgd(model.parameters())
        with bk.attach(model, optimizer, *eval(expression, {"bk": bk}), bucket_bytes=300) as att:
            for step in range(STEPS):
                optimizer.zero_grad()
                x, y = (t.to(device) for t in batch(dist.get_rank(), step))
                (model(x) - y).square().mean().backward()
                optimizer.step()
            att.state_dict()  # waits for flights, which stay in the air
            whole, two = att.timeline(), att.timeline(2)
            landed = {(row.rule, row.bucket): row.landed for row in att.report().rows}
        results[name] = whole, two, landed
    return results


@cache
def everyone():
    return ranks(2, timed)


def of(name):
    whole, two, landed = zip(*(results[name] for results in everyone()), strict=True)
    return whole, two, landed


every_rule = pytest.mark.parametrize("name", RULES)
