"""A life of an attachment, from its first line to its last: every part that a fault may strike in is a function."""

import contextlib
from typing import Any

import torch
from everything import made, runs_free, usual
from torch import nn

import baguakit as bk

TIMEOUT = 4.0  # seconds that attach() is given, unless a life says otherwise
PLACES = {  # with one more attachment on another model, and in DDP's hook
    "two at once": "bytegrad(MinMaxUInt8(block=64))",
    "ddp": "bytegrad(MinMaxUInt8(block=64), error_feedback=True)",
}
ALGORITHMS = (
    *usual().values(),
    "decentralized(order='atc')",
    "diloco(every=2, delay=1)",
    "gradient_allreduce(delay=1)",
    *PLACES,
)

PARTS = ("attached", "forward", "backward", "step", "merge", "consensus", "recut", "unfreeze", "detach")  # may wait


def algorithm_of(name: str) -> Any:
    """Return the algorithm of an entry of `ALGORITHMS`."""
    return made(PLACES.get(name, name))


def program(rank: int, algorithm: str, timeout: float = TIMEOUT) -> None:
    """Attach, train, merge, measure, save, load, recut, unfreeze, train, detach."""
    model, optimizer = trained(rank)
    free = runs_free(algorithm_of(algorithm))  # ranks are at different steps, and buckets stay as they are
    if algorithm == "ddp":
        in_ddp(model, optimizer, rank, timeout)
        return
    model[3].weight.requires_grad_(False)
    with contextlib.ExitStack() as ended:
        if algorithm == "two at once":
            other, its_optimizer = trained(rank)
            ended.enter_context(attached(other, its_optimizer, "decentralized()", timeout))
            model.register_forward_hook(lambda *_: train(other, its_optimizer, rank))
        att = ended.enter_context(attached(model, optimizer, algorithm, timeout))
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


def in_ddp(model: Any, optimizer: Any, rank: int, timeout: float) -> None:
    """The same for a model in DDP."""
    from torch.nn.parallel import DistributedDataParallel

    ddp_model = DistributedDataParallel(model, broadcast_buffers=False)
    with attached(ddp_model, None, "ddp", timeout) as handle:
        for step in range(3):
            (second if step == 1 else train)(ddp_model, optimizer, rank)
        handle.load_state_dict(handle.state_dict())
        train(ddp_model, optimizer, rank)
        detach(handle)


def trained(rank: int) -> tuple[Any, Any]:
    """A model, and its optimizer, which has a state to broadcast."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 20), nn.BatchNorm1d(20), nn.Tanh(), nn.Linear(20, 8), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    backward(loss(model, rank))
    optimizer.step()
    return model, optimizer


def attached(model: Any, optimizer: Any, algorithm: str, timeout: float) -> Any:
    if algorithm == "ddp":
        return bk.interop.ddp(model, algorithm_of(algorithm), timeout=timeout)
    return bk.attach(model, optimizer, algorithm_of(algorithm), bucket_bytes=256, timeout=timeout)


def forward(model: Any, rank: int) -> Any:
    return loss(model, rank)


def loss(model: Any, rank: int) -> Any:
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
