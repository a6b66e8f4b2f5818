"""Random arguments for units, and a comparison of two units on them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Unit = Callable[..., object]


def examples(like: tuple[Any, ...], rows: int) -> list[Any]:
    """Return arguments of the dtypes and widths of `like`, with so many rows: many magnitudes, and a row of zeros."""
    # A generator of its own leaves the user's random numbers alone.
    source = torch.Generator().manual_seed(rows)
    return [_example(part, rows, source) if isinstance(part, Tensor) else part for part in like]


def _example(like: Tensor, rows: int, source: torch.Generator) -> Tensor:
    shape = (rows, *like.shape[1:]) if like.dim() == 2 else like.shape
    if not like.dtype.is_floating_point:
        return torch.randint(0, 256, shape, generator=source, device="cpu").to(like.dtype)
    scale = torch.randint(-40, 40, (*shape[:-1], 1), generator=source, device="cpu")
    values = torch.randn(shape, generator=source, dtype=torch.float32, device="cpu") * 2.0**scale
    values[0] = 0
    return values.to(like.dtype)


def agree(unit: Unit, candidate: Unit, arguments: list[Any]) -> bool:
    """Return whether two units write the same values into copies of the arguments."""
    copies = [part.clone() if isinstance(part, Tensor) else part for part in arguments]
    unit(*arguments)
    candidate(*copies)
    return all(_equal(*pair) for pair in zip(arguments, copies, strict=True) if isinstance(pair[0], Tensor))


def _equal(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are equal, and have NaN in the same places."""
    broken = a != a
    return torch.equal(broken, b != b) and torch.equal(a.masked_fill(broken, 0), b.masked_fill(broken, 0))
