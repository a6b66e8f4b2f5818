"""Majority votes: each rank sends the signs of its momentum, and all step by the sign that most ranks sent.

For g_r the gradient of rank r at the common weights x, and m_r its own momentum, 0 at first:

    v_r ← sign(β₁ m_r + (1 − β₁) g_r)
    d   ← sign(Σ_r v_r)
    m_r ← β₂ m_r + (1 − β₂) g_r;     x ← x − γ d

With β₁ = β₂, v_r is the sign of the new momentum, and this is Signum; with others it is Lion. On one rank it is exactly
that optimizer. The vote is not the sign of the mean: one rank with a large gradient has one vote.

d replaces the gradient, and a plain `SGD(lr)` takes the step. Its `weight_decay` λ is decoupled, as in both papers:
x ← (1 − γ λ) x − γ d. Clip nothing: d has no size.

sign(0) = 0, and a tie gives 0, so that a weight which no rank's data reaches stays where it is, and no direction is
preferred. The published code of Lion counts a zero and a tie as −1. One bit cannot say 0; five of the three values −1,
0 and 1 fit in a byte, since 3⁵ = 243, and what is left of a byte says that a value is not finite: 1.6 bits a value, to
the owner of a shard, who counts, and back.

Bernstein et al. 2018, "signSGD: Compressed Optimisation for Non-Convex Problems", arXiv:1802.04434; Bernstein et al.
2018, "signSGD with Majority Vote is Communication Efficient And Fault Tolerant", arXiv:1810.05291; Liu et al. 2024,
"Communication Efficient Distributed Training with Distributed Lion", arXiv:2404.00438.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from ..arguments import check_fields, checked, pair, real
from ..buckets import Bucket
from ..comm import Comm
from ..costs import Cost, Load, Place
from ..keeping import finite, update_if_finite_
from ..lanes import temporaries
from ..primitives.transports import gathered, scattered
from ..rules import Rule, during_backward
from ..stages import Stage, State

DIGITS = 5  # of base 3 in a byte
NOT_FINITE = 255  # a byte of which one value or more is not finite


@dataclass(frozen=True, repr=False)
class MajorityVote(Stage):
    """v ← sign(β₁ m + (1 − β₁) g);  g ← sign(Σ_r v_r);  m ← β₂ m + (1 − β₂) g.

    The momentum is fp32 for any dtype of g, and each rank's own. A gradient that is not finite is passed on to all
    ranks, as NaN, and all then keep their momentum.
    """

    beta1: float = 0.9
    beta2: float = 0.9
    same_on_all_ranks: ClassVar[bool] = True
    keeps: ClassVar[bool] = True
    elementwise: ClassVar = {"m": "keep"}

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("beta1", "beta2"):
            real(name, getattr(self, name), 0, below=1)

    def multiple_of(self, comm: Comm) -> int:
        return DIGITS * comm.size

    def init(self, bucket: Bucket, comm: Comm) -> State:
        return {"m": torch.zeros_like(bucket.flat, dtype=torch.float32)}

    def __call__(self, x: Tensor, state: State, comm: Comm) -> Tensor:
        m, g = state["m"], x.float()
        with temporaries() as new:
            c, part = new(m), new(m)
            torch.mul(m, self.beta1, out=c).add_(torch.mul(g, 1 - self.beta1, out=part))
            d = voted_(signs_(c, part), comm)
            ok = finite(d)
            torch.mul(g, 1 - self.beta2, out=c)  # before x, which may be g, is overwritten
            x.copy_(d)
            update_if_finite_(m, torch.mul(m, self.beta2, out=part).add_(c), where=ok)
            return x

    def cost(self, load: Load, place: Place) -> Cost:
        """Return the cost: w = shards of N/n values, scattered and gathered, at 1.6 bits;  q = 18 copies in fp32."""
        n = place.ranks
        if n == 1:
            return place.copies(12, load.fp32.size)
        return place.shards(shard_bytes(load.values, n), place.copies(18, load.fp32.size).busy)


def signs_(x: Tensor, out: Tensor) -> Tensor:
    """Return in `out` the signs −1, 0 or 1, and NaN for values that are not finite; `x` is overwritten."""
    return torch.sub(x, x, out=out).add_(x.sign_())  # x − x is 0 or NaN


def voted_(v: Tensor, comm: Comm) -> Tensor:
    """Replace fp32 signs (N,) by the sign of their sum over all ranks: shards are scattered, counted and gathered."""
    n, N = comm.size, v.numel()
    if n == 1 or N == 0:
        return v
    b = shard_bytes(N, n)
    votes, signs = (torch.empty(n, b, dtype=torch.uint8, device=v.device) for _ in range(2))

    def counted(i: int) -> Tensor:
        first, *others = votes
        count = unpacked(first)
        for row in others:
            count += unpacked(row)
        return packed(signs_(count, torch.empty_like(count)), b).view(1, b)

    comm.agree_on_shares()
    heard = scattered(comm, [votes], lambda i, ranks: packed(v, n * b).view(n, b)[ranks])
    for _ in gathered(comm, [signs], map(counted, heard), tag=1):
        v.copy_(unpacked(signs.view(-1))[:N])
    return v


def shard_bytes(values: int, ranks: int) -> int:
    """Return the bytes of one shard if `values` are divided among `ranks`."""
    return -(-values // (DIGITS * ranks))


def packed(signs: Tensor, length: int) -> Tensor:
    """Return `length` bytes of five signs each; missing signs count as 0."""
    missing = DIGITS * length - signs.numel()
    rows = torch.nn.functional.pad(signs, (0, missing)) if missing else signs
    powers, _ = tables(signs.device)
    codes = torch.mv(rows.view(length, DIGITS), powers)  # whole numbers, exact in any precision
    return codes.add_(3**DIGITS // 2).nan_to_num_(NOT_FINITE).to(torch.uint8)


def unpacked(codes: Tensor) -> Tensor:
    """Return the signs in bytes (length,) as fp32 (5 · length,)."""
    _, signs = tables(codes.device)
    return signs.index_select(0, codes.int()).view(-1)


@lru_cache(maxsize=64)
def tables(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the powers of 3 (5,), and the signs in every byte (256, 5), NaN in bytes that no finite signs have."""
    powers = 3 ** torch.arange(DIGITS, device=device)
    codes = torch.arange(256, device=device).unsqueeze(1)
    signs = (codes // powers % 3 - 1).float()
    return powers.float(), torch.where(codes < 3**DIGITS, signs, torch.nan)


@checked
def signum(beta: float = 0.9) -> Rule:
    """Train by the sign that the momentum of most ranks has (Signum). Attach it to `torch.optim.SGD(params, lr)`.

    Sends 2 (n − 1)/n · 1.6 bits a value, a twentieth of `gradient_allreduce`; costs an fp32 copy of the gradients. Each
    step moves every weight by the step size or not at all: begin with that of Adam, 3e-4 for instance.

    Args:
        beta: β of the momentum, m ← β m + (1 − β) g.

    Raises:
        ValueError: `beta` is not in [0, 1).
    """
    real("beta", beta, 0, below=1)
    return during_backward(MajorityVote(beta, beta))


@checked
def lion_vote(betas: tuple[float, float] = (0.9, 0.99)) -> Rule:
    """Train by Lion, of which ranks vote on each sign. Attach it to `torch.optim.SGD(params, lr, weight_decay=…)`.

    Sends and costs what `signum` does. Begin with the step size of Lion, a third to a tenth of Adam's.

    Args:
        betas: β₁ of the sign and β₂ of the momentum.

    Raises:
        ValueError: a beta is not in [0, 1).
    """
    return during_backward(MajorityVote(*pair("betas", betas, 0, below=1)))
