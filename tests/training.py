"""A toy problem that every rank can learn, and the loops that train it."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import baguakit as bk
from baguakit.testing.training import batch as batch
from baguakit.testing.training import loss, net, sgd


def flat(model: nn.Module) -> Tensor:
    """Return all weights as one tensor."""
    return torch.cat([p.detach().flatten() for p in model.parameters()]).clone()


def net_and_sgd() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the network and its optimizer."""
    model = net()
    return model, sgd(model.parameters())


def run_steps(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: Iterable[int], rank: int | None = None
) -> None:
    """Train with the batches of `rank`, by default this one."""
    for step in steps:
        optimizer.zero_grad()
        loss(model, dist.get_rank() if rank is None else rank, step).backward()
        optimizer.step()


def train(
    algorithms: Callable[[Any], Sequence[Any]],
    steps: int = 8,
    dtype: torch.dtype = torch.float32,
    optimizer: Callable[[Any], torch.optim.Optimizer] = sgd,
    bias: bool = True,
    **options: Any,
) -> Tensor:
    """Train on this rank with the rules of `algorithms(baguakit)`; return the weights."""
    model = net(dtype, bias)
    opt = optimizer(model.parameters())
    with bk.attach(model, opt, *algorithms(bk), **options):
        run_steps(model, opt, range(steps))
    return flat(model)


def simulate(n: int, exchange: Callable[[int, Tensor, Tensor], Tensor], steps: int, momentum: float = 0.9) -> Tensor:
    """Simulate n ranks in fp64:  X ← exchange(step, X, γ d), where rows are ranks and d is the direction of SGD."""
    models = [net(torch.float64) for _ in range(n)]
    x = torch.stack([flat(model) for model in models])
    d = torch.zeros_like(x)
    for step in range(steps):
        for rank, model in enumerate(models):
            nn.utils.vector_to_parameters(x[rank].clone(), model.parameters())
            model.zero_grad()
            loss(model, rank, step).backward()
        g = torch.stack([torch.cat([p.grad.flatten() for p in model.parameters()]) for model in models])
        d = momentum * d + g
        x = exchange(step, x, 0.05 * d)
    return x


def mean_loop(
    n: int,
    backward: Callable[[nn.Module, int, int], Any],
    steps: int = 4,
    model: Callable[[], nn.Module] = net,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = lambda model: sgd(model.parameters()),
    prepare: Callable[[nn.Module, torch.optim.Optimizer], Any] = lambda model, optimizer: None,
) -> nn.Module:
    """Train n ranks in one process, averaging gradients by hand; return the model of rank 0."""
    models = [model() for _ in range(n)]
    optimizers = [optimizer(m) for m in models]
    for step in range(steps):
        for rank, (m, o) in enumerate(zip(models, optimizers, strict=True)):
            o.zero_grad()
            backward(m, rank, step)
        for ps in zip(*(m.parameters() for m in models), strict=True):
            if any(p.grad is not None for p in ps):
                g = sum(p.grad if p.grad is not None else torch.zeros_like(p) for p in ps) / n
                for p in ps:
                    p.grad = g.clone()
        for m, o in zip(models, optimizers, strict=True):
            prepare(m, o)
            o.step()
    return models[0]


def attached(
    backward: Callable[[nn.Module, int, int], Any],
    steps: int = 4,
    model: Callable[[], nn.Module] = net,
    algorithm: Any = None,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = lambda model: sgd(model.parameters()),
    prepare: Callable[[nn.Module, torch.optim.Optimizer], Any] = lambda model, optimizer: None,
    **options: Any,
) -> Tensor:
    """Train like `mean_loop` on this rank, with an algorithm (all-reduce by default); return the weights."""
    m = model()
    o = optimizer(m)
    with bk.attach(m, o, (algorithm or bk.algorithms.gradient_allreduce()), **options):
        for step in range(steps):
            o.zero_grad()
            backward(m, dist.get_rank(), step)
            prepare(m, o)
            o.step()
    return flat(m)


def close(a: Tensor, b: Tensor) -> None:
    """Raise unless two runs agree but for the order of their sums."""
    torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
