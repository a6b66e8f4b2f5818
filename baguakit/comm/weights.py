"""The weights by which ranks count in a mean. For w_r the weight of rank r, and n ranks:

mean = Σ_r w_r x_r / Σ_r w_r = (1/n) Σ_r c_r x_r           c_r = n w_r / Σ_j w_j, the share of rank r
"""

from collections.abc import Callable, Sequence
from math import fsum, inf
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..arguments import message
from .sending import device_of

Weight = float | Callable[[], float] | None  # of a rank: None means 1; a function gives that of each step
Row = tuple[float, float, float]  # the weight of a rank, its node, and its place in the node
Weights = tuple[Row, ...]  # of all ranks, by rank: not all equal; their sum is 1


def weights_of(rows: Sequence[Row]) -> Weights | None:
    """Return the weights of a group, of the sum 1; None if all are equal. Raise a ValueError if one is impossible."""
    for rank, (weight, *_) in enumerate(rows):
        if not 0 <= weight < inf:
            raise ValueError(f"the weight of rank {rank} is a finite number, 0 or more, not {weight}")
    most = max(row[0] for row in rows)
    if all(row[0] == most for row in rows):
        return None
    total = fsum(row[0] / most for row in rows)  # finite
    return tuple((weight / most / total, node, place) for weight, node, place in rows)


def within(weights: Weights | None, node: int) -> Weights | None:
    """Return the weights of the ranks of a node, by their place in it."""
    return weights and weights_of(sorted((row for row in weights if row[1] == node), key=itemgetter(2)))


def between(weights: Weights | None) -> Weights | None:
    """Return the weights of the nodes: that of a node is the sum of its ranks' weights."""
    nodes = sorted({node for _, node, _ in weights or ()})
    sums = [(fsum(row[0] for row in weights or () if row[1] == node), node, 0) for node in nodes]
    return weights and weights_of(sums)


def number(weight: Any) -> float:
    """Return the weight of a rank as a float, which may be impossible; raise a TypeError if it is no number."""
    if isinstance(weight, bool) or not isinstance(weight, int | float | np.integer | np.floating):
        raise TypeError(message("weight", "a number, such as that of the tokens in a batch", weight))
    try:
        return float(weight)
    except OverflowError:
        return inf


def row_of(mine: float, comm: Any) -> Row:
    """Return the `Row` of this rank, whose nodes are those of `comm`."""
    return (mine, comm.inter.rank, comm.intra.rank) if comm.hierarchical else (mine, 0, comm.rank)


def weights_over(comm: Any, row: Row) -> Weights | None:
    """Return the weights of all ranks of `comm`; `row` is this rank's. Collective."""
    mine = torch.tensor([row], dtype=torch.float64, device=device_of(comm.group))
    return weights_of(comm.all_gather(mine).tolist())


def times_(x: Tensor, factor: float) -> Tensor:
    return x.mul_(factor) if factor else x.zero_()  # 0 · NaN would not be 0


def weighed(x: Tensor, comm: Any) -> tuple[Tensor, Any]:
    """Return  c x  for the share c of this rank, in fp32 at least, and `comm` without weights. May overwrite `x`."""
    if comm._weights is None:
        return x, comm
    return times_(x.to(torch.promote_types(x.dtype, torch.float32)), comm.share), comm._with(_weights=None)


class Weighted:
    """The methods of a `Comm` about weights."""

    rank: int
    size: int
    _weights: Weights | None
    _with: Any

    def weighted(self, weight: float) -> Any:
        """Return this `Comm` with the weights of all ranks: means over it are  Σ_r w_r x_r / Σ_r w_r. Collective.

        All means of `bk.primitives` and `bk.stages` have weights then; sums and gathers have none. If all weights are
        equal, also if all are 0, means are as without weights. With a weight of 0, values count as zeros, also NaN.

        Args:
            weight: w_r of this rank, such as its number of tokens: finite, 0 or more. Ranks may pass different ones.

        Raises:
            TypeError: `weight` is not a number.
            ValueError: the weight of a rank is negative or not finite. Raised on all ranks.
        """
        return self._with(_weights=weights_over(self, row_of(number(weight), self)))

    @property
    def share(self) -> float:
        """The share of this rank in a weighted mean, n w_r / Σ_j w_j; 1 without weights."""
        return 1.0 if self._weights is None else self.size * self._fraction

    @property
    def _fraction(self) -> float:
        return 1 / self.size if self._weights is None else self._weights[self.rank][0]
