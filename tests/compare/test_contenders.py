"""Contenders on ranks: torch's DDP with each of its hooks averages gradients."""

import pytest
import torch
from pool import ranks

import baguakit as bk
from baguakit.compare.contenders import KNOWN


def gradients(name):
    """Return this rank's gradient of a model of a contender, after four backward passes."""
    comm = bk.Comm()
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 32, bias=False)
    with KNOWN[name].train(model, [torch.optim.SGD(model.parameters(), 0.1)], comm) as (called, _):
        for _ in range(4):  # PowerSGD begins with the third
            model.zero_grad()
            called(torch.full((1, 64), comm.rank + 1.0)).sum().backward()
    return model.weight.grad


@pytest.mark.parametrize("name", ["ddp", "bf16_hook", "powersgd_hook"])
def test_ddp_averages_with_each_hook(name):
    first, second = ranks(2, gradients, name)
    assert torch.equal(first, second)
    assert torch.allclose(first, torch.full((32, 64), 1.5), rtol=1e-5)  # of rank one, and a number of bf16
