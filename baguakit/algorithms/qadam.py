"""QAdam: Adam whose variance is frozen after a warm-up, so that its momentum can be averaged in few bits.

For g the mean gradient, g_r that of rank r, t = 1, 2 … the optimizer step, T the length of the warm-up:

    t ≤ T    m ← β₁ m + (1 − β₁) g                  v ← β₂ v + (1 − β₂) g²           (exact Adam)
    t > T    m ← Q-mean over r of (β₁ m + (1 − β₁) g_r)                              (v stays)
    d ← m / (1 − β₁ᵗ) / ( √( v / (1 − β₂^min(t, T)) ) + ε )

d replaces the gradient, and a plain `SGD(lr)` then takes Adam's step: its `weight_decay` is AdamW's, decoupled. For
Adam's decay, which is added to the gradient before the moments, add ½ λ Σ w² to the loss.

Tang et al. 2021, "1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence Speed",
arXiv:2102.02888; Gan et al. 2021, arXiv:2107.01499. Of our own, |d| ≤ (1 − β₁)/√(1 − β₂) for t > T: Adam never moves a
value by more, but where the frozen v is small the error of the codes would.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..arguments import check_fields, checked, integer, pair, real
from ..buckets import Bucket
from ..comm import Comm
from ..compressors import Compressor, MinMaxUInt8
from ..compressors.base import check_dense
from ..costs import Cost, Load, Place
from ..keeping import finite, update_if_finite_
from ..lanes import temporaries
from ..primitives import compressed_mean_, mean_
from ..rules import Rule, during_backward
from ..stages import CompressedMean, Stage, State


@dataclass(frozen=True, repr=False)
class AdamDirection(Stage):
    """Adam's direction from gradients; see the module for the equations."""

    warmup_steps: int
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    compressor: Compressor = MinMaxUInt8()
    error_feedback: bool = False
    same_on_all_ranks: ClassVar[bool] = True
    keeps: ClassVar[bool] = True
    elementwise: ClassVar = {"m": "keep", "v": "keep", "residual": "mean"}

    def __post_init__(self) -> None:
        check_fields(self)
        integer("warmup_steps", self.warmup_steps, 1)
        pair("betas", self.betas, 0, below=1)
        real("eps", self.eps, above=0)
        check_dense("compressor", self.compressor)

    def multiple_of(self, comm: Comm) -> int:
        return 64 * comm.size

    def init(self, bucket: Bucket, comm: Comm) -> State:
        self.prepare(bucket.flat, comm)
        names = ["m", "v", *(["residual"] if self.error_feedback else [])]
        return {name: torch.zeros_like(bucket.flat, dtype=torch.float32) for name in names}

    def __call__(self, x: Tensor, state: State, comm: Comm) -> Tensor:
        (beta1, beta2), t = self.betas, comm.step + 1
        m, v = state["m"], state["v"]
        with temporaries() as new:
            if warming := t <= self.warmup_steps:
                comm.note(self.compressor, torch.float32, "warm-up")
                g = mean_(x.float(), comm)
                v = torch.mul(v, beta2, out=new(v)).addcmul_(g, g, value=1 - beta2)
                found = {"m": torch.lerp(m, g, 1 - beta1, out=new(m)), "v": v}
            else:
                found = {"m": torch.lerp(m, x.float(), 1 - beta1, out=new(m))}
                if self.error_feedback:
                    found["m"].add_(state["residual"])
                    found["residual"] = new(m)
                compressed_mean_(found["m"], self.compressor, comm, residual=found.get("residual"))
            # d = m̂ / (√v̂ + ε), with v̂ as the warm-up left it
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
        """Return the cost after the warm-up: of `CompressedMean` in fp32, and of 10 copies."""
        return CompressedMean(self.compressor).cost(load.fp32, place) + place.copies(10, load.fp32.size)


@checked
def qadam(
    warmup_steps: int = 100,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    compressor: Compressor = MinMaxUInt8(),
    error_feedback: bool = False,
) -> Rule:
    """Train by Adam with a momentum averaged in 8 bits after a warm-up. Attach it to `torch.optim.SGD(params, lr)`.

    Sends as much as `gradient_allreduce` in the warm-up, and a quarter of it from then on; costs two fp32 copies of
    the gradients, as Adam does, and one more with error feedback.

    Args:
        warmup_steps: T, at least 1; long enough for the variance to settle.
        betas, eps: of Adam; betas from 0 to below 1, `eps` above 0.
        compressor: of the momentum; one that keeps zeros, so that parameters without a gradient do not move.
        error_feedback: add what compression lost in one step to the momentum of the next.
    """
    return during_backward(AdamDirection(warmup_steps, betas, eps, compressor, error_feedback))
