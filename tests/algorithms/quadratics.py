"""Heterogeneous quadratics: rank i has f_i(x) = a_i/2 ‖x − c_i‖², so that every fixed point is a linear system."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

import baguakit as bk

DIMENSIONS = 3


class Point(nn.Module):
    """A model that is its weights."""

    def __init__(self, x: Tensor) -> None:
        super().__init__()
        self.x = nn.Parameter(x.clone())

    def forward(self, a: float, c: Tensor) -> Tensor:
        return a / 2 * (self.x - c).square().sum()


def curvatures(n: int) -> Tensor:
    """a (n, 1)."""
    return torch.linspace(0.5, 1.5, n, dtype=torch.float64).unsqueeze(1)


def optima(n: int) -> Tensor:
    """c (n, 3)."""
    return torch.from_numpy(np.random.default_rng(n).normal(size=(n, DIMENSIONS)))


def starts(n: int) -> Tensor:
    """The weights of each rank before the first step, (n, 3)."""
    return torch.from_numpy(np.random.default_rng(100 + n).normal(size=(n, DIMENSIONS)))


def minimum(n: int) -> Tensor:
    """x* of the mean of the f_i."""
    a = curvatures(n)
    return (a * optima(n)).sum(0) / a.sum()


def descend(
    rule: Callable[[Any], Any],
    steps: int,
    lr: float = 0.1,
    momentum: float = 0.0,
    each: Callable[[Any, Point], Any] | None = None,
    comm: Any = None,
    broadcast: bool = False,
    weight: Any = None,
) -> Any:
    """Run on a rank; returns its x, or what `each(attachment, model)` said after every step."""
    n, r = dist.get_world_size(), dist.get_rank()
    a, c, said = float(curvatures(n)[r]), optima(n)[r], []
    model = Point(starts(n)[r])
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
    with bk.attach(model, optimizer, rule(bk), broadcast=broadcast, comm=comm, weight=weight) as att:
        for _ in range(steps):
            optimizer.zero_grad()
            model(a, c).backward()
            optimizer.step()
            if each is not None:
                said.append(each(att, model))
    return said if each is not None else model.x.detach().clone()
