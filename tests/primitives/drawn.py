"""Random tensors, the same in every process."""

import torch

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SHAPES = [(7, 5), (64,), (), (2, 3, 4), (0,), (1,)]


def draw(rank, n, dtype=torch.float32):
    """The values of a rank."""
    return torch.randn(n, generator=torch.Generator().manual_seed(rank)).to(dtype)


def values(seed=0, dtype=torch.float32, shapes=SHAPES):
    """A list of tensors."""
    source = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=source).to(dtype) for shape in shapes]
