"""Training that goes wrong, and the sentence that it ends with."""

import time

from training import flat, loss, net, sgd

TIMEOUT = 3.0


def said(run, *args):
    """The sentence that `run` raises, with what kind of error it is; "" if none."""
    try:
        run(*args)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def train(rule, each, steps=8, timeout=TIMEOUT, **options):
    """Train; `each(att, model, optimizer, step, rank)` comes before a step's backward, and may say to skip it."""
    import torch.distributed as dist

    import baguakit as bk

    rank, model = dist.get_rank(), net()
    optimizer = sgd(model.parameters())
    with bk.attach(model, optimizer, rule(bk), timeout=timeout, bucket_bytes=200, **options) as att:
        for step in range(steps):
            optimizer.zero_grad()
            if each(att, model, optimizer, step, rank) != "skip":
                loss(model, rank, step).backward()
                optimizer.step()
            time.sleep(0.05)
    return flat(model)
