"""A backward that fails, as one does that runs out of memory."""

import torch


class Fails(torch.autograd.Function):
    """The identity, whose backward raises."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        raise MemoryError("out of memory")
