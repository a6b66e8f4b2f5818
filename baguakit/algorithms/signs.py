"""Sign steps: a step takes the sign that most ranks vote for, or the sign of a mean sent as cosine coefficients.

Majority votes: each rank sends the signs of its momentum, and all ranks step by the sign that most ranks sent.

For g_r the gradient and m_r the momentum of rank r (0 at first), x the weights, β₁, β₂ decays, and γ the step size:

    v_r ← sign(β₁ m_r + (1 − β₁) g_r)
    d   ← sign(Σ_r v_r)
    m_r ← β₂ m_r + (1 − β₂) g_r;     x ← x − γ d

With β₁ = β₂, v_r is the sign of the new momentum, and this is Signum; otherwise it is Lion. On one rank it is
exactly Signum or Lion. Each rank has one vote, however large its gradient is.

d replaces the gradient, and a plain `SGD(lr)` takes the step. Its `weight_decay` λ is decoupled, as in both papers:
x ← (1 − γ λ) x − γ d. Do not clip gradients: d is −1, 0 or 1, and clipping would scale it.

sign(0) = 0, and a tie gives 0: a weight that has no gradient on any rank does not move. Lion's published code takes
−1 in both cases. A byte holds five signs (1.6 bits a value), as 3⁵ = 243; a byte of 243 or more marks values that are
not finite. Each rank owns a shard: it receives and counts the votes on the shard, and sends the result to all ranks.

Bernstein et al. 2018, "signSGD: Compressed Optimisation for Non-Convex Problems", arXiv:1802.04434; Bernstein et al.
2018, "signSGD with Majority Vote is Communication Efficient And Fault Tolerant", arXiv:1810.05291; Liu et al. 2024,
"Communication Efficient Distributed Training with Distributed Lion", arXiv:2404.00438.

**decoupled_momentum.** DeMo: each rank subtracts the largest cosine coefficients from its momentum, and sends them.

For T the cosine transform of blocks, top the function that keeps the largest coefficients of each chunk, and n ranks:

    m_r ← β m_r + g_r
    q_r ← top(T m_r);    m_r ← m_r − Tᵀ q_r
    d   ← Tᵀ (1/n) Σ_r q_r;    x ← x − γ sign(d)

This is error feedback with the decay β on cosine coefficients, followed by a sign. The residual is the momentum.

T is the orthonormal DCT-II, Tᵀ T = 1. A matrix is cut in blocks of h × w; h and w are the largest divisors of its sides
up to 64. A vector is a matrix of one row. In a tensor of more dimensions, the dimension with the largest stride gives
the rows. The largest blocks come first, so that a chunk of 4,096 coefficients is a block of 64 × 64.

Differences from the published code: the mean is over all ranks, not only over the ranks that sent a coefficient; every
chunk sends the same share of its coefficients, not the same number; g_r is not multiplied by γ. sign(0) = 0. On one
rank nothing is compressed, and m stays 0.

Peng et al. 2024, "DeMo: Decoupled Momentum Optimization", arXiv:2411.19870.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor, float32

from ..arguments import Betas, Decay, Declared, checked, real
from ..buckets import Bucket, Span, pieces
from ..comm import Comm
from ..compressors import Compressor, TopK
from ..costs import Cost, Load, Place
from ..keeping import finite, update_if_finite_
from ..lanes import temporaries
from ..primitives.compressed import mean_of_shards
from ..rules import Algorithm, during_backward
from ..stages import Around, ErrorFeedback, SparseMean, Stage, State

DIGITS = 5  # of base 3 in a byte
NOT_FINITE = 255  # a byte of which one value or more is not finite


@dataclass(frozen=True, repr=False)
class MajorityVote(Declared, Stage):
    """v ← sign(β₁ m + (1 − β₁) g);  m ← β₂ m + (1 − β₂) g;  g ← sign(Σ_r w_r v_r).

    All w_r are 1 without weights of ranks. A rank of weight 0 has no vote, and its gradient counts as 0.

    The momentum is fp32 for any dtype of g, and differs by rank. A gradient that is not finite reaches all ranks as
    NaN, and no rank then changes its momentum.
    """

    beta1: Decay = 0.9
    beta2: Decay = 0.9
    same_on_all_ranks: ClassVar[bool] = True
    keeps: ClassVar[bool] = True
    elementwise: ClassVar = {"m": "keep"}

    def multiple_of(self, comm: Comm) -> int:
        return DIGITS * comm.size

    def __call__(self, x: Tensor, state: State, comm: Comm) -> Tensor:
        m, g, weights = state["m"], x.float(), comm._weights
        if not comm.share:
            g.zero_()
        with temporaries() as new:
            c, part = new(m), new(m)
            torch.mul(m, self.beta1, out=c).add_(torch.mul(g, 1 - self.beta1, out=part))
            d = signs_(c, part)
            if comm.size > 1 and d.numel():
                mean_of_shards(d, Ternary(tuple(w for w, *_ in weights) if weights else None), comm, None)
            ok = finite(d)
            torch.mul(g, 1 - self.beta2, out=c)  # before x, which may be g, is overwritten
            x.copy_(d)
            update_if_finite_(m, torch.mul(m, self.beta2, out=part).add_(c), where=ok)
            return x

    def cost(self, load: Load, place: Place) -> Cost:
        """Return the cost of scattering and gathering shards at 1.6 bits a value, and of 18 copies (12 on one rank)."""
        n = place.ranks
        if n == 1:
            return place.copies(12, load.fp32.size)
        return place.shards(Ternary().row_bytes(-(-load.values // n)), place.copies(18, load.fp32.size).busy)


def signs_(x: Tensor, out: Tensor) -> Tensor:
    """Write the sign of each value (NaN if it is not finite) to `out`, and return `out`. Overwrite `x`."""
    return torch.sub(x, x, out=out).add_(x.sign_())  # x − x is 0 or NaN


@dataclass(frozen=True)
class Ternary(Compressor):
    """Rows of fp32 signs, five in a byte; the last byte is padded with 0. The mean of rows is the majority's sign."""

    votes: tuple[float, ...] | None = None  # of each row; None: one

    def row_bytes(self, n: int) -> int:
        return -(-n // DIGITS)

    def compress(self, x: Tensor, residual: Tensor | None = None, key: int = 0) -> Tensor:
        signs = torch.nn.functional.pad(x, (0, -x.shape[1] % DIGITS)).view(-1, DIGITS)
        powers, _ = tables(x.device)
        codes = torch.mv(signs, powers)  # whole numbers, exact in any precision
        return codes.add_(3**DIGITS // 2).nan_to_num_(NOT_FINITE).to(torch.uint8).view(len(x), -1)

    def decompress(self, packed: Tensor, n: int, dtype: torch.dtype = float32, out: Tensor | None = None) -> Tensor:
        _, signs = tables(packed.device)
        rows = signs.index_select(0, packed.flatten().int()).view(len(packed), -1)[:, :n]
        return rows.to(dtype) if out is None else out.copy_(rows)

    def reduce(self, packed: Tensor, n: int, residual: Tensor | None = None, key: int = 0) -> Tensor:
        rows = self._unchecked_decompress(packed, n, float32, None)
        if self.votes is not None:
            rows *= torch.tensor(self.votes, dtype=float32).view(-1, 1).to(rows.device)
        count = rows.sum(0, keepdim=True)  # without votes exact in any order
        return self._unchecked_compress(signs_(count, torch.empty_like(count)), None, key)


@lru_cache(maxsize=64)
def tables(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the powers of 3 (5,) and the five signs of each byte (256, 5); NaN for bytes that encode no signs."""
    powers = 3 ** torch.arange(DIGITS, device=device)
    codes = torch.arange(256, device=device).unsqueeze(1)
    signs = (codes // powers % 3 - 1).float()
    return powers.float(), torch.where(codes < 3**DIGITS, signs, torch.nan)


@checked
def signum(beta: Decay = 0.9) -> Algorithm:
    """Train with a majority vote on the sign of the momentum (Signum). Attach it to `torch.optim.SGD(params, lr)`.

    Sends 2 (n − 1)/n · 1.6 bits a value, a twentieth of `gradient_allreduce`. Costs memory for an fp32 copy of the
    gradients. Begin with the step size of Adam, such as 3e-4.

    Args:
        beta: β of the momentum, m ← β m + (1 − β) g, from 0 to below 1.
    """
    return during_backward(MajorityVote(beta, beta))


@checked
def lion_vote(betas: Betas = (0.9, 0.99)) -> Algorithm:
    """Train with Lion. The ranks vote on the sign of each value. Attach it to `SGD(params, lr, weight_decay=…)`.

    Bytes and memory are those of `signum`. Begin with the step size of Lion, a third to a tenth of Adam's.

    Args:
        betas: β₁ of the sign and β₂ of the momentum, from 0 to below 1.
    """
    return during_backward(MajorityVote(*betas))


@dataclass(frozen=True, repr=False)
class InCosines(Around):
    """x ← Tᵀ inner(T x), in fp32;  x ← inner(x) on one rank: see the module. `inner` needs neither shapes nor state."""

    copies: ClassVar[float] = 60  # three transforms of 20 each, on one thread of a CPU
    needs_shapes: ClassVar[bool] = True

    @property
    def lossy(self) -> bool:  # type: ignore[override]
        return self.inner.lossy

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.inner.remembers() or any(each.needs_shapes for each in self.inner.whole()):
            raise TypeError(
                f"InCosines gives coefficients without shapes to a stage that remembers nothing, not {self.inner!r}; "
                "say ErrorFeedback(InCosines(…)), not InCosines(ErrorFeedback(…))"
            )

    def init(self, bucket: Bucket, comm: Comm) -> State:
        if not bucket.params and bucket.flat.numel():
            raise ValueError(f"{self!r} works on matrices and was given a bare tensor; give it a Bucket of parameters")
        layout, at = [], 0
        for view in pieces(bucket.flat, bucket.params):
            long = [dim for dim in range(view.dim()) if view.shape[dim] != 1]
            rows = view.shape[max(long, key=view.stride)] if len(long) > 1 and view.numel() else 1
            sides = rows, view.numel() // rows
            h, w = (next(d for d in range(min(64, max(n, 1)), 0, -1) if n % d == 0) for n in sides)
            blocks = bucket.flat[at : at + view.numel()].view(rows // h, h, sides[1] // w, w).transpose(1, 2)
            layout.append(Span(at, blocks.shape, blocks.stride()))
            at += view.numel()
            for side in (h, w):
                cosines(side, view.device)  # copies the matrix to the device before the first step
        layout.sort(key=lambda span: -math.prod(span.shape[2:]))
        return {"layout": layout, "inner": self.inner.init(bucket, comm)}

    def __call__(self, x: Tensor, state: State, comm: Comm, residual: Tensor | None = None) -> Tensor:
        lost = {} if residual is None else {"residual": residual}
        if comm.size == 1:
            return self.inner(x, state["inner"], comm, **lost)
        layout = state["layout"]
        with temporaries() as new:
            wide = x.float()
            transform_(wide, u := new(wide), layout)
            if residual is not None:
                lost["residual"] = new(wide)
            u = self.inner(u, state["inner"], comm, **lost)
            if residual is not None:
                transform_(residual, lost["residual"], layout, back=True)
            transform_(x, u, layout, back=True)
            return x


@dataclass(frozen=True, repr=False)
class Signs(Around):
    """x ← sign(inner(x)): −1, 0 or 1, and NaN for values that are not finite."""

    averages: ClassVar[bool] = False
    copies: ClassVar[float] = 3

    def __call__(self, x: Tensor, state: State, comm: Comm) -> Tensor:
        y = self.inner(x, state["inner"], comm)
        return x.copy_(signs_(y, torch.empty_like(y)))


def transform_(x: Tensor, u: Tensor, layout: list[Span], back: bool = False) -> None:
    """Write the coefficients of the flat `x` to `u`, block after block, or `back` to `x`. Padding is copied."""
    at = 0
    for each in layout:
        blocks = each.of(x)
        down, across = (cosines(side, x.device) for side in each.shape[2:])
        coefficients = u[at : at + blocks.numel()].view(blocks.shape)
        if back:
            blocks.copy_(down.T @ (coefficients @ across))
        else:
            torch.matmul(down, blocks @ across.T, out=coefficients)
        at += blocks.numel()
    source, target = (u, x) if back else (x, u)
    target[at:] = source[at:]


@lru_cache(maxsize=256)
def cosines(side: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the DCT-II matrix for s = `side`: C_kj = √(2/s) cos(π k (2 j + 1) / (2 s)), with row 0 divided by √2."""
    k, j = torch.arange(side, dtype=torch.float64).unsqueeze(1), torch.arange(side, dtype=torch.float64)
    c = torch.cos(math.pi * k * (2 * j + 1) / (2 * side)) * math.sqrt(2 / side)
    c[0] *= math.sqrt(0.5)
    c[c.abs() < 1e-12] = 0  # cos(π/2) is rounded to a small value, which has a sign
    return c.to(device, dtype)


@checked
def decoupled_momentum(
    ratio: float = 1 / 128, beta: float = 0.999, values: Compressor | None = None, sign: bool = True
) -> Algorithm:
    """Train by the sign of momentum sent as its largest cosine coefficients (DeMo). Attach it to `SGD(params, lr)`.

    Sends (n − 1) · 5.5 · `ratio` bytes a value, (n − 1)/23 bytes by default. Costs memory for an fp32 copy of the
    gradients, and on a CPU the time of about 60 copies. The `weight_decay` of SGD is decoupled. Use the same kind of
    processor on all ranks, because a different last bit may flip the sign of a value near zero.

    Args:
        ratio: the share of the coefficients that a rank sends: 32 of 4,096 by default.
        beta: β, the decay of the momentum, from 0 to 1.
        values: the compressor of the sent coefficients, such as `UInt2()`; None sends fp32.
        sign: take the sign of the mean. With False, the optimizer gets the mean: error feedback in cosines.
    """
    stage = ErrorFeedback(InCosines(SparseMean(TopK(ratio, values=values))), real("beta", beta, 0, 1))
    return during_backward(Signs(stage) if sign else stage)
