"""Averages of gradients: exact, in 8 bits, sparse, from changes of an estimate, or as Adam's momentum.

For n ranks, g_r the gradient of rank r at the common weights x, Q the compressor, and γ d(·) the optimizer's step:

    x ← x − γ d( (1/n) Σ_r g_r )                  gradient_allreduce: the exact mean
    x ← x − γ d( Q( (1/n) Σ_r Q(g_r) ) )          bytegrad: the mean in 8 bits

**top_k.** Sparse gradients: each rank sends the largest entries, and adds the error e_r to its next gradient.

    y_r ← g_r + β e_r;     x ← x − γ d( (1/n) Σ_r top(y_r) );     e_r ← y_r − top(y_r)

β is the decay of e_r. The function top keeps the largest entries of each chunk, compressed if `values` is given.

Stich, Cordonnier and Jaggi 2018, "Sparsified SGD with Memory", arXiv:1809.07599; Lin et al. 2017, "Deep Gradient
Compression: Reducing the Communication Bandwidth for Distributed Training", arXiv:1712.01887; with chunks, `values` and
`decay`, Sarfi et al. 2025 (SparseLoCo), arXiv:2508.15706.

**ef21.** Each rank sends the compressed error of an estimate of its gradient; the error vanishes with any compressor.

For g_r the gradient of rank r, h_r its estimate (0 at first), Q the compressor, ⟨·⟩ the mean over ranks, γ a step size:

    v_r ← μ v_r + (1 − μ) g_r                         with momentum μ; else v_r = g_r
    q_r ← Q(v_r − h_r);    h_r ← h_r + q_r
    h   ← h + ⟨q_r⟩;       x ← x − γ h                h = ⟨h_r⟩, the same on all ranks

If ‖Q(y) − y‖² ≤ (1 − α) ‖y‖² for all y, constant gradients have ‖g_r − h_r‖² ≤ (1 − α)ᵗ ‖g_r‖² after t steps; top-k
has α = ratio. Error feedback (`top_k`) sends Q(g + e): all entries sooner or later, with a noise of the size of e.

A rank keeps h_r and h, and v_r with momentum. The q_r of all ranks are gathered, and added one rank after another, so
that h is the mean of the h_r. With many ranks and a dense Q, `TrackedMean(CompressedMean(Q))` sends fewer bytes, but
the error shrinks only if (1 − α)(1 + n) < 1, which holds for 8 bits.

Richtárik, Sokolov and Fatkhullin 2021, "EF21: A New, Simpler, Theoretically Better, and Practically Faster Error
Feedback", arXiv:2106.05203; with momentum, Fatkhullin, Tyurin and Richtárik 2023, "Momentum Provably Improves Error
Feedback!", arXiv:2305.15155.

**qadam.** Adam whose variance is frozen after a warm-up, so that its momentum can be averaged in few bits.

For g the mean gradient, g_r the gradient of rank r, t = 1, 2 … the optimizer step, T the length of the warm-up, m and v
Adam's momentum and variance, and β₁, β₂ and ε Adam's constants:

    t ≤ T    m ← β₁ m + (1 − β₁) g                  v ← β₂ v + (1 − β₂) g²           (exact Adam)
    t > T    m ← mean over r of (β₁ m + (1 − β₁) g_r), compressed                    (v stays)
    d ← m / (1 − β₁ᵗ) / ( √( v / (1 − β₂^min(t, T)) ) + ε )

d replaces the gradient, and a plain `SGD(lr)` then takes Adam's step. Its `weight_decay` is decoupled, as in AdamW. For
Adam's own decay λ, which adds λ w to the gradient of a weight w before the moments, add ½ λ Σ w² to the loss.

Tang et al. 2021, "1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence Speed",
arXiv:2102.02888; Gan et al. 2021, arXiv:2107.01499. Unlike in these papers, d is clamped for t > T to Adam's bound
|d| ≤ (1 − β₁)/√(1 − β₂), because a compression error divided by the root of a small frozen v could be larger.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from ..arguments import Betas, Decay, Positive, Range, check_fields, checked
from ..comm import Comm, weighed
from ..compressors import Compressor, MinMaxUInt8, TopK, check_dense
from ..costs import Cost, Load, Place
from ..keeping import finite, update_if_finite_
from ..lanes import temporaries
from ..primitives import compressed_mean_, mean_
from ..rules import Algorithm, during_backward
from ..stages import Adaptive, Around, Carry, CompressedMean, ErrorFeedback, Mean, SparseMean, Stage, State


@checked
def gradient_allreduce(*, delay: int = 0) -> Algorithm:
    """Average gradients exactly, as `DistributedDataParallel` does.

    Sends 2 (n − 1)/n times the size of the gradients in each step.

    Args:
        delay: the number of steps after which gradients land, as in `during_backward`.
    """
    return during_backward(Mean(), delay=delay)


@checked
def bytegrad(
    compressor: Compressor | None = None, error_feedback: bool = False, error: float | None = None, *, delay: int = 0
) -> Algorithm:
    """Average gradients in 8 bits: packed shards are scattered, averaged in fp32, packed again and gathered.

    Sends a quarter of the bytes of `gradient_allreduce` in fp32. Gan et al. 2021, "BAGUA: Scaling up Distributed
    Learning with System Relaxations", arXiv:2107.01499.

    Args:
        compressor: the wire format, a dense one; None for `MinMaxUInt8()`.
        error_feedback: add the compression error of a step to the next gradients; costs an fp32 copy of the gradients.
        error: the largest error of a compression, as in `stages.Adaptive`; in place of `compressor`.
        delay: as in `gradient_allreduce`.
    """
    if error is not None and compressor is not None:
        raise ValueError(f"bytegrad takes a compressor or an error, not both: {compressor!r} has an error of its own")
    mean = CompressedMean(MinMaxUInt8() if compressor is None else compressor) if error is None else Adaptive(error)
    return during_backward(ErrorFeedback(mean) if error_feedback else mean, delay=delay)


@checked
def top_k(ratio: float = 0.01, chunk: int = 4096, values: Compressor | None = None, decay: float = 1.0) -> Algorithm:
    """Average the gradient's entries of largest magnitude, a share `ratio` on each rank, with error feedback.

    Sends (n − 1) (b + log₂(chunk) / 8) bytes for each entry kept: b bytes for its value (4 in fp32, or the bytes of a
    value in `values`), and 12 bits for its position by default. Costs an fp32 copy of the gradients. The result is
    deterministic, because entries are added one rank after another.

    Args:
        ratio: the share of each chunk's entries that a rank sends; above 0 and at most 1.
        chunk: how many entries a chunk has: a power of two, 64 to 4096.
        values: the compressor of the sent values, a dense one such as `UInt2()`; None sends fp32.
        decay: β, the decay of the error, from 0 to 1. With less than 1, entries that are not sent fade out.
    """
    return during_backward(ErrorFeedback(SparseMean(TopK(ratio, chunk, values)), decay))


@dataclass(frozen=True, repr=False)
class TrackedMean(Around):
    """h_r ← h_r + q_r;  h ← h + ⟨q_r⟩;  x ← h,  for q_r the part of v_r − h_r that `inner` sends.

    The letters are those of `ef21` in the module; with weights of ranks, g_r is `comm.share` times the gradient. With
    one rank, x ← v. The state is fp32 for any dtype of x. A result that is not finite is passed on, and not kept.

    Args:
        inner: a lossy average, such as `SparseMean(TopK(0.01))`; not one that is lossy between nodes only.
        momentum: μ, from 0 to less than 1.
    """

    momentum: Decay = 0.0
    averages: ClassVar[bool] = False  # h is no mean of these gradients, so a second backward cannot add to it

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.inner.lossy:
            raise TypeError(
                f"TrackedMean tracks what a stage loses, and {self.inner!r} loses nothing here; "
                "try SparseMean(TopK(0.01)), and Hierarchical around all"
            )

    @property
    def copies(self) -> float:  # type: ignore[override]
        return 13 if self.momentum else 10

    @property
    def elementwise(self) -> Mapping[str, Carry]:  # type: ignore[override]
        """Return what becomes of h, its mean and v when ranks change."""
        own: dict[str, Carry] = {"own": "zero", "mean": "zero"}  # if ranks change, h is no longer ⟨h_r⟩
        return own | {"v": "keep"} if self.momentum else own

    def __call__(self, x: Tensor, state: State, comm: Comm) -> Tensor:
        own, mean, found = state["own"], state["mean"], dict[str, Tensor]()
        g, comm = weighed(x, comm)
        with temporaries() as new:
            v = g
            if self.momentum:
                v = torch.mul(state["v"], self.momentum, out=new(state["v"])).add_(g, alpha=1 - self.momentum)
            if comm.size == 1:
                h = v = self.inner(v, state["inner"], comm)
            else:
                change, lost = torch.sub(v, own, out=new(own)), new(own)
                q = self.inner(new(own).copy_(change), state["inner"], comm, residual=lost)  # type: ignore[call-arg]
                h = q.add_(mean)
                found |= {"own": change.sub_(lost).add_(own), "mean": h}
            if self.momentum:
                found["v"] = v
            ok = finite(h)
            for name, value in found.items():
                update_if_finite_(state[name], value, where=ok)
            return x.copy_(h)


@checked
def ef21(compressor: Compressor = TopK(0.01), momentum: float = 0.0) -> Algorithm:
    """Average gradients through compressed changes of an estimate; the compression error vanishes (EF21).

    Sends (n − 1) times the packed gradients, by default (n − 1) · 0.055 bytes a value. Costs memory for two fp32 copies
    of the gradients, and one more with momentum. Attach it to plain SGD, or to any optimizer without momentum.

    Args:
        compressor: any, sparse or dense.
        momentum: μ, from 0 to below 1. Each rank sends its own momentum in place of its gradient. Use 0.9 with
            mini-batches, because their gradients do not converge.
    """
    return during_backward(TrackedMean(SparseMean(compressor), momentum))


@dataclass(frozen=True, repr=False)
class AdamDirection(Stage):
    """Adam's direction d: see `qadam` in the module; with weights of ranks, g_r is `comm.share` times the gradient."""

    warmup_steps: Positive
    betas: Betas = (0.9, 0.999)
    eps: Annotated[float, Range(above=0)] = 1e-8
    compressor: Compressor = MinMaxUInt8()
    error_feedback: bool = False
    same_on_all_ranks: ClassVar[bool] = True
    keeps: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_fields(self)
        check_dense("compressor", self.compressor)

    def multiple_of(self, comm: Comm) -> int:
        return 64 * comm.size

    @property
    def elementwise(self) -> Mapping[str, Carry]:  # type: ignore[override]
        """Return what becomes of m, v and the residual when ranks change."""
        moments: dict[str, Carry] = {"m": "keep", "v": "keep"}
        return moments | {"residual": "mean"} if self.error_feedback else moments

    def __call__(self, x: Tensor, state: State, comm: Comm) -> Tensor:
        (beta1, beta2), t = self.betas, comm.step + 1
        m, v, (given, comm) = state["m"], state["v"], weighed(x, comm)
        with temporaries() as new:
            if warming := t <= self.warmup_steps:
                comm.note(self.compressor, torch.float32, "warm-up")
                g = mean_(given.float(), comm)
                v = torch.mul(v, beta2, out=new(v)).addcmul_(g, g, value=1 - beta2)
                found = {"m": torch.lerp(m, g, 1 - beta1, out=new(m)), "v": v}
            else:
                found = {"m": torch.lerp(m, given.float(), 1 - beta1, out=new(m))}
                if self.error_feedback:
                    found["m"].add_(state["residual"])
                    found["residual"] = new(m)
                compressed_mean_(found["m"], self.compressor, comm, residual=found.get("residual"))
            # d = m̂ / (√v̂ + ε), with bias-corrected m̂ and v̂; v̂ stays after the warm-up
            scale = torch.div(v, 1 - beta2 ** min(t, self.warmup_steps), out=new(v)).sqrt_().add_(self.eps)
            d = torch.div(found["m"], 1 - beta1**t, out=new(m)).div_(scale)
            if not warming:
                limit = (1 - beta1) / (1 - beta2) ** 0.5
                d.clamp_(-limit, limit)
            ok = finite(found["m"]) & finite(v) if warming else finite(found["m"])
            for name, value in found.items():
                update_if_finite_(state[name], value, where=ok)
            if ok.is_cpu and ok:  # reading it does not synchronize
                return x.copy_(d)
            return x.copy_(torch.where(ok, d, torch.nan))  # the clamp would hide an infinite value

    def cost(self, load: Load, place: Place) -> Cost:
        """Return the cost after the warm-up: the cost of `CompressedMean` in fp32, plus that of 10 copies."""
        return CompressedMean(self.compressor).cost(load.fp32, place) + place.copies(10, load.fp32.size)


@checked
def qadam(
    warmup_steps: int = 100,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    compressor: Compressor = MinMaxUInt8(),
    error_feedback: bool = False,
) -> Algorithm:
    """Train by Adam with a momentum averaged in 8 bits after a warm-up. Attach it to `torch.optim.SGD(params, lr)`.

    Sends as much as `gradient_allreduce` in the warm-up, and a quarter of it afterwards. Costs memory for two fp32
    copies of the gradients, as Adam does, and one more with error feedback.

    Args:
        warmup_steps: T, at least 1; long enough for the variance to settle.
        betas, eps: Adam's constants; betas from 0 to below 1, `eps` above 0.
        compressor: the compressor of the momentum. It must keep zeros, or parameters without a gradient would move.
        error_feedback: add the compression error of one step to the momentum of the next.
    """
    return during_backward(AdamDirection(warmup_steps, betas, eps, compressor, error_feedback))
