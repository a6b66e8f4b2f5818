"""Decoupled momentum (DeMo): each rank sends the largest cosines of its momentum, and takes them out of it.

For g_r the gradient of rank r at the common weights x, m_r its own momentum, 0 at first, T the cosine transform of
blocks and top the largest of each chunk of coefficients:

    m_r ← β m_r + g_r
    q_r ← top(T m_r);    m_r ← m_r − Tᵀ q_r
    d   ← Tᵀ (1/n) Σ_r q_r;    x ← x − γ sign(d)

That is error feedback with the decay β, in cosines, and then a sign: its residual is the momentum. A gradient that is
smooth over neighbouring weights has few large cosines.

T is the orthonormal DCT-II, Tᵀ T = 1. A matrix is cut in blocks of h × w, h and w the largest divisors of its sides up
to 64; a vector in runs. A tensor of more dimensions is a matrix of its outermost dimension in memory against all
others. The largest blocks come first, so that a chunk of 4,096 coefficients is a block of 64 × 64.

The step differs from the published code in three ways. The mean is over all ranks, not only over ranks that sent a
coefficient, so that what leaves the momenta is what is applied. Every chunk sends the same share of its coefficients,
not the same number for small and large blocks. And g_r is not multiplied by γ: this matters while γ changes only.
sign(0) = 0. On one rank nothing is compressed, and m stays 0.

Peng et al. 2024, "DeMo: Decoupled Momentum Optimization", arXiv:2411.19870.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from ..arguments import check_fields, checked, real
from ..buckets import Bucket, pieces
from ..comm import Comm
from ..compressors import Compressor, TopK
from ..costs import Cost, Load, Place
from ..lanes import temporaries
from ..rules import Rule, during_backward
from ..stages import ErrorFeedback, SparseMean, State, cost
from ..stages.wrappers import Around

LONGEST = 64  # of the sides of a block


class Blocks(NamedTuple):
    """The span of a parameter in a flat tensor, as a matrix (rows, columns) in blocks of h × w."""

    at: int
    rows: int
    columns: int

    @property
    def sides(self) -> tuple[int, int]:
        """Return h and w; a vector is one row."""
        return side_of(self.rows), side_of(self.columns)

    def of(self, x: Tensor) -> Tensor:
        """Return the blocks in `x` as a view (rows / h, columns / w, h, w)."""
        h, w = self.sides
        span = x[self.at : self.at + self.rows * self.columns]
        return span.view(self.rows // h, h, self.columns // w, w).transpose(1, 2)


@dataclass(frozen=True, repr=False)
class InCosines(Around):
    """x ← Tᵀ inner(T x), in fp32; see the module for the equations.

    Raises:
        TypeError: `inner` remembers something, which other buckets could not take over, or needs shapes.
    """

    needs_shapes: ClassVar[bool] = True
    derived: ClassVar[tuple[str, ...]] = ("layout",)

    @property
    def lossy(self) -> bool:  # type: ignore[override]
        return self.inner.lossy

    def __post_init__(self) -> None:
        check_fields(self)
        if self.inner.remembers() or self.inner.wants_shapes():
            raise TypeError(
                f"InCosines gives coefficients without shapes to a stage that remembers nothing, not {self.inner!r}; "
                "say ErrorFeedback(InCosines(…)), not InCosines(ErrorFeedback(…))"
            )

    def init(self, bucket: Bucket, comm: Comm) -> State:
        """Return `layout` (parameters, 3), the `Blocks` of each, the largest first."""
        if not bucket.params and bucket.flat.numel():
            raise ValueError(f"{self!r} works on matrices and was given a bare tensor; give it a Bucket of parameters")
        layout, at = [], 0
        for view in pieces(bucket.flat, bucket.params):
            long = [dim for dim in range(view.dim()) if view.shape[dim] != 1]
            rows = view.shape[max(long, key=view.stride)] if len(long) > 1 and view.numel() else 1
            layout.append(Blocks(at, rows, view.numel() // rows))
            at += view.numel()
            for side in layout[-1].sides:
                cosines(side, view.device)  # a copy to the device, which no step need wait for
        layout.sort(key=lambda blocks: -math.prod(blocks.sides))
        held = torch.tensor(layout, dtype=torch.int64).view(-1, 3)
        return {"layout": held, "inner": self.inner.init(bucket, comm)}

    def __call__(self, x: Tensor, state: State, comm: Comm, residual: Tensor | None = None) -> Tensor:
        lost = {} if residual is None else {"residual": residual}
        if comm.size == 1:
            return self.inner(x, state["inner"], comm, **lost)
        layout = [Blocks(*row) for row in state["layout"].tolist()]  # on the CPU: nothing is waited for
        with temporaries() as new:
            wide = x.float()
            u = cosines_of(wide, layout, new(wide))
            if residual is not None:
                lost["residual"] = new(wide)
            u = self.inner(u, state["inner"], comm, **lost)
            if residual is not None:
                restore_(residual, lost["residual"], layout)
            restore_(x, u, layout)
            return x

    def cost(self, load: Load, place: Place) -> Cost:
        """Return the cost of `inner` in fp32 and of three transforms, of 20 copies each (one thread of a CPU)."""
        if place.ranks == 1:
            return cost(self.inner, load, place)
        return cost(self.inner, load.fp32, place) + place.copies(60, load.fp32.size)


@dataclass(frozen=True, repr=False)
class Signs(Around):
    """x ← sign(inner(x)): −1, 0 or 1, and NaN for what is not finite, which the sign would hide."""

    averages: ClassVar[bool] = False

    def __call__(self, x: Tensor, state: State, comm: Comm) -> Tensor:
        y = self.inner(x, state["inner"], comm)
        return x.copy_(torch.sub(y, y).add_(y.sign()))  # y − y is 0 or NaN

    def cost(self, load: Load, place: Place) -> Cost:
        """Return the cost of `inner` and of 3 copies."""
        return cost(self.inner, load, place) + place.copies(3, load.size)


def cosines_of(x: Tensor, layout: list[Blocks], out: Tensor) -> Tensor:
    """Return in `out` the coefficients of a flat tensor, block after block; padding follows as it is."""
    at = 0
    for each in layout:
        blocks = each.of(x)
        down, across = (cosines(side, x.device) for side in each.sides)
        end = at + blocks.numel()
        torch.matmul(down, blocks @ across.T, out=out[at:end].view(blocks.shape))
        at = end
    out[at:] = x[at:]
    return out


def restore_(x: Tensor, coefficients: Tensor, layout: list[Blocks]) -> None:
    """Write to `x` the values of coefficients: the inverse of `cosines_of`."""
    at = 0
    for each in layout:
        blocks = each.of(x)
        down, across = (cosines(side, x.device) for side in each.sides)
        end = at + blocks.numel()
        blocks.copy_(down.T @ (coefficients[at:end].view(blocks.shape) @ across))
        at = end
    x[at:] = coefficients[at:]


def side_of(length: int) -> int:
    """Return the largest divisor of `length` that is 64 or less."""
    return next(side for side in range(min(LONGEST, max(length, 1)), 0, -1) if length % side == 0)


@lru_cache(maxsize=256)
def cosines(side: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the orthonormal DCT-II of `side` values, C_kj = √(2/s) cos(π k (2 j + 1) / 2 s), its first row / √2."""
    k, j = torch.arange(side, dtype=torch.float64).unsqueeze(1), torch.arange(side, dtype=torch.float64)
    c = torch.cos(math.pi * k * (2 * j + 1) / (2 * side)) * math.sqrt(2 / side)
    c[0] *= math.sqrt(0.5)
    c[c.abs() < 1e-12] = 0  # cos(π/2), of which a rounding would have a sign
    return c.to(device, dtype)


@checked
def decoupled_momentum(
    ratio: float = 1 / 128, beta: float = 0.999, values: Compressor | None = None, sign: bool = True
) -> Rule:
    """Train by signs of the largest cosines of each rank's momentum (DeMo). Attach it to `torch.optim.SGD(params, lr)`.

    Sends (n − 1) · 5.5 · `ratio` bytes a value, (n − 1)/23 bytes by default; costs an fp32 copy of the gradients, and
    on a CPU computes as long as about 60 copies of them. The `weight_decay` of SGD is decoupled, as in `signum`.
    Clipping behind it is meaningless, since signs have no size. Ranks compute d from the same bytes in the same order;
    give them processors of the same kind, since a last bit may turn the sign of a value near zero.

    Args:
        ratio: the share of the coefficients that is sent: 32 of 4,096 by default.
        beta: β, the decay of the momentum, from 0 to 1.
        values: how the coefficients sent are compressed, such as `UInt2()`; None: in fp32.
        sign: step by the signs. False leaves d as the gradient, for any optimizer: error feedback in cosines.

    Raises:
        TypeError: `values` is no compressor.
        ValueError: `ratio` is not in (0, 1], or `beta` not in [0, 1]; `values` is sparse itself.
    """
    stage = ErrorFeedback(InCosines(SparseMean(TopK(ratio, values=values))), real("beta", beta, 0, 1))
    return during_backward(Signs(stage) if sign else stage)
