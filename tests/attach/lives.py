"""A life of an attachment, from its first line to its last: every part that a fault may strike in is a function."""

import contextlib
from collections.abc import Callable
from typing import Any

TIMEOUT = 4.0  # seconds that attach() is given
FREE = ("async",)  # with these ranks are at different steps, and buckets stay as they are

ALGORITHMS: dict[str, Callable[[Any], Any]] = {
    "all-reduce": lambda bk: bk.algorithms.gradient_allreduce(),
    "bytegrad": lambda bk: bk.algorithms.bytegrad(error_feedback=True),
    "qadam": lambda bk: bk.algorithms.qadam(warmup_steps=1),
    "power_sgd": lambda bk: bk.algorithms.power_sgd(rank=2),
    "top_k": lambda bk: bk.algorithms.top_k(0.1),
    "awc": lambda bk: bk.algorithms.decentralized(bk.topology.Ring()),
    "atc": lambda bk: bk.algorithms.decentralized(order="atc"),
    "low_precision": lambda bk: bk.algorithms.low_precision_decentralized(),
    "choco": lambda bk: bk.algorithms.choco(),
    "tracking": lambda bk: bk.algorithms.gradient_tracking(bk.topology.Ring()),
    "local_sgd": lambda bk: bk.algorithms.local_sgd(every=2),
    "diloco": lambda bk: bk.algorithms.diloco(every=2, delay=1),
    "async": lambda bk: bk.algorithms.async_model_average(warmup_steps=1),
    "two at once": lambda bk: bk.algorithms.bytegrad(),  # and another on another model
    "ddp": lambda bk: bk.algorithms.bytegrad(error_feedback=True),  # in DDP's hook
}


def program(rank: int, algorithm: str) -> None:
    """Attach, train, merge, measure, save, load, recut, unfreeze, train, detach."""
    model, optimizer = trained(rank)
    free = algorithm in FREE
    if algorithm == "ddp":
        in_ddp(model, optimizer, rank)
        return
    model[3].weight.requires_grad_(False)
    with contextlib.ExitStack() as ended:
        if algorithm == "two at once":
            other, its_optimizer = trained(rank)
            ended.enter_context(attached(other, its_optimizer, "awc"))
            model.register_forward_hook(lambda *_: train(other, its_optimizer, rank))
        att = ended.enter_context(attached(model, optimizer, algorithm))
        for step in range(3):
            (second if step == 1 else train)(model, optimizer, rank)
        merge(att)
        consensus(att)
        att.load_state_dict(att.state_dict())
        if not free:
            recut(att)
        train(model, optimizer, rank)
        if not free:
            unfreeze(model)
        train(model, optimizer, rank)
        train(model, optimizer, rank)
        detach(att)


def in_ddp(model: Any, optimizer: Any, rank: int) -> None:
    """The same for a model in DDP."""
    from torch.nn.parallel import DistributedDataParallel

    ddp_model = DistributedDataParallel(model, broadcast_buffers=False)
    with attached(ddp_model, None, "ddp") as handle:
        for step in range(3):
            (second if step == 1 else train)(ddp_model, optimizer, rank)
        handle.load_state_dict(handle.state_dict())
        train(ddp_model, optimizer, rank)
        detach(handle)


def trained(rank: int) -> tuple[Any, Any]:
    """A model, and its optimizer, which has a state to broadcast."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 20), nn.BatchNorm1d(20), nn.Tanh(), nn.Linear(20, 8), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    backward(loss(model, rank))
    optimizer.step()
    return model, optimizer


def attached(model: Any, optimizer: Any, algorithm: str) -> Any:
    import baguakit as bk

    if algorithm == "ddp":
        return bk.interop.ddp(model, ALGORITHMS[algorithm](bk), timeout=TIMEOUT)
    return bk.attach(model, optimizer, ALGORITHMS[algorithm](bk), bucket_bytes=256, timeout=TIMEOUT)


def forward(model: Any, rank: int) -> Any:
    return loss(model, rank)


def loss(model: Any, rank: int) -> Any:
    import torch

    x = torch.randn(8, 6)
    return (model(x) - x.sum(1, keepdim=True) - rank).square().mean()


def backward(loss: Any) -> None:
    loss.backward()


def step(optimizer: Any) -> None:
    optimizer.step()


def train(model: Any, optimizer: Any, rank: int) -> None:
    optimizer.zero_grad()
    backward(forward(model, rank))
    step(optimizer)


def second(model: Any, optimizer: Any, rank: int) -> None:
    train(model, optimizer, rank)


def merge(att: Any) -> None:
    att.merge()


def consensus(att: Any) -> None:
    att.consensus_distance()


def recut(att: Any) -> None:
    att.recut(bucket_bytes=1024, flows=2)


def unfreeze(model: Any) -> None:
    model[3].weight.requires_grad_(True)


def detach(att: Any) -> None:
    att.detach()
