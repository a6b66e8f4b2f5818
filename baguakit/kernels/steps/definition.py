"""Optimizer steps: the update of weights p and of the optimizer's state (b, or m and v), value by value.

Step t = 1, 2, … has gradients g, rate η, decay λ, momentum μ and dampening d; Adam has β₁, β₂ and ε, Lion β₁ and β₂.
The step first scales g by clip / grad_scale (see `Conditions`), and then computes:

    SGD     g ← g + λ p     b ← μ b + (1 − d) g  (at t = 1: g)     p ← p − η (g + μ b  with Nesterov, else b)
    Adam    g ← g + λ p     AdamW instead:  p ← (1 − η λ) p
            m ← m + (1 − β₁) (g − m)     v ← β₂ v + ((1 − β₂) g) g
            p ← p + (−η / (1 − β₁ᵗ) m) / (√v / √(1 − β₂ᵗ) + ε)
    Lion    c = β₁ m + (1 − β₁) g     p ← (1 − η λ) p − η sign(c)     m ← β₂ m + (1 − β₂) g

SGD, Adam and AdamW are those of `torch.optim`; Lion is from Chen et al. 2023, arXiv:2302.06675. The *numbers* of a step
are the factors of g, m, v and p. They are computed in fp64 (βᵗ by repeated squaring) and rounded once to fp32. Values
are fp32, and each operation rounds separately, but torch's code fuses some products with sums. So a step equals torch's
bit for bit if such products are exact (gradients with at most 12 significant bits, as in bf16, and η, λ, μ, 1 − d and
1 − β that are powers of two), and otherwise up to rounding.

Weights in bf16 or fp16 are rounded to nearest at each step, which loses updates that are far smaller than the weights.
With an fp32 copy of the weights (`master`), the step updates this copy, and nothing is lost. With a `key`, bf16 weights
are rounded at random without bias: x between adjacent bf16 numbers lo < hi becomes hi with probability
(x − lo) / (hi − lo), a multiple of 2⁻¹⁶. A draw depends on key, t and the position of x among all values.

This file is the definition. The kernels have the same arithmetic: `gpu.py` for GPUs, `cpu.c` for CPUs.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from .. import noise

Numbers = tuple[float, ...]
# The columns of a step, by role: p and g (fp32, bf16 or fp16), u and v (the optimizer's state, fp32), master (fp32,
# or None). A column has a dense tensor for each parameter, with the parameter's strides. Other roles are left out.
Columns = dict[str, Sequence[Any]]
PAYLOAD = 0xFFFF  # the bits that fp32 has beyond bf16


def power(base: float, t: int) -> float:
    """Return baseᵗ in fp64 for 0 ≤ t < 2³¹, by repeated squaring."""
    result = 1.0
    for bit in range(31):
        result = result * base if t >> bit & 1 else result
        base = base * base
    return result


@dataclass(frozen=True)
class SGD:
    """SGD as in the module docstring. If `momentum` is 0, there is no b."""

    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False

    @property
    def states(self) -> int:
        return int(self.momentum != 0)

    def numbers(self, lr: float, t: int) -> Numbers:
        kept, taken = (0.0, 1.0) if t == 1 else (self.momentum, 1 - self.dampening)
        return self.weight_decay, kept, taken, self.momentum, -lr

    def apply(self, p: Tensor, g: Tensor, states: Sequence[Tensor], numbers: Sequence[Tensor]) -> Tensor:
        decay, kept, taken, momentum, rate = numbers
        if self.weight_decay:
            g = g + p * decay
        for b in states:
            b.copy_(b * kept + g * taken)
            g = g + b * momentum if self.nesterov else b
        return p + g * rate


@dataclass(frozen=True)
class Adam:
    """Adam as in the module docstring; AdamW if `decoupled`."""

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    decoupled: bool = False

    states: ClassVar[int] = 2

    def numbers(self, lr: float, t: int) -> Numbers:
        size = -(lr / (1 - power(self.beta1, t)))
        root = math.sqrt(1 - power(self.beta2, t))
        decay = 1 - lr * self.weight_decay if self.decoupled else self.weight_decay
        return decay, 1 - self.beta1, self.beta2, 1 - self.beta2, root, self.eps, size

    def apply(self, p: Tensor, g: Tensor, states: Sequence[Tensor], numbers: Sequence[Tensor]) -> Tensor:
        (m, v), (decay, first, kept, second, root, eps, size) = states, numbers
        if self.decoupled:
            p = p * decay
        elif self.weight_decay:
            g = g + p * decay
        m.copy_(m + (g - m) * first)
        v.copy_(v * kept + g * second * g)
        # The fp64 root gives a correctly rounded fp32 root. torch's fp32 root on a CPU may have an error of an ulp.
        return p + m * size / (v.double().sqrt().float() / root + eps)


@dataclass(frozen=True)
class Lion:
    """Lion as in the module docstring. The sign of a NaN is NaN."""

    beta1: float = 0.9
    beta2: float = 0.99
    weight_decay: float = 0.0

    states: ClassVar[int] = 1

    def numbers(self, lr: float, t: int) -> Numbers:
        return 1 - lr * self.weight_decay, self.beta1, 1 - self.beta1, self.beta2, 1 - self.beta2, -lr

    def apply(self, p: Tensor, g: Tensor, states: Sequence[Tensor], numbers: Sequence[Tensor]) -> Tensor:
        (m,), (decay, old, new, kept, taken, rate) = states, numbers
        c = m * old + g * new
        sign = torch.where(c > 0, 1.0, torch.where(c < 0, -1.0, c))
        m.copy_(m * kept + g * taken)
        return p * decay + sign * rate


Update = SGD | Adam | Lion
COUPLED, DECOUPLED = 1, 2  # what a decay is added to: gradients, or weights


def decay_of(update: Update) -> int:
    """Return the code that tells kernels where an update applies its weight decay; 0 if there is none."""
    return DECOUPLED if getattr(update, "decoupled", False) else COUPLED if update.weight_decay else 0


@dataclass(frozen=True)
class Conditions:
    """The inputs that may change from step to step. All but `key` may be tensors with one value."""

    lr: float | Tensor
    taken: int | Tensor = 1  # steps before this one, t − 1; a tensor is advanced by the step
    grad_scale: float | Tensor = 1.0  # gradients are divided by it
    clip: float | Tensor = 1.0  # and then multiplied by it: factor = clip / grad_scale, rounded to fp32 once
    found_inf: float | Tensor = 0.0  # if not zero, nothing is changed
    key: int | None = None  # of the draws; None rounds to nearest


def numbers_of(update: Update, conditions: Conditions) -> tuple[Numbers, float, tuple[int, int]]:
    """Return (numbers of the update, factor of the gradients, seed of the draws) of a step, as Python numbers."""
    t, seed = int(conditions.taken) + 1, (0, 0)
    if conditions.key is not None:
        low, high = noise.seed_words(conditions.key)
        seed = low, high ^ int(noise._mix(torch.tensor(t)))
    factor = float(conditions.clip) / float(conditions.grad_scale)
    return update.numbers(float(conditions.lr), t), factor, seed


def step_(update: Update, columns: Columns, conditions: Conditions, block: None = None) -> None:
    """If `found_inf` is 0, step every parameter (weights, masters, states); add 1 to `taken` if it is a tensor."""
    if float(conditions.found_inf) != 0:
        return
    values, factor, seed = numbers_of(update, conditions)
    device = columns["p"][0].device if columns["p"] else None
    numbers = torch.tensor((*values, factor), dtype=torch.float32, device=device).unbind()
    start = 0
    for i, p in enumerate(columns["p"]):
        target = columns["master"][i] if "master" in columns else None
        weights = dense(p if target is None else target)
        states = [dense(columns[name][i]) for name in "uv"[: update.states]]
        new = update.apply(weights.float(), dense(columns["g"][i]).float() * numbers[-1], states, numbers[:-1])
        weights.copy_(new if conditions.key is None or p.dtype != torch.bfloat16 else drawn(new, start, seed))
        if target is not None:
            dense(p).copy_(weights)
        start += p.numel()
    if isinstance(conditions.taken, Tensor):
        conditions.taken.add_(1)


def dense(x: Tensor) -> Tensor:
    """Return a view (numel,) of the values of a dense tensor, in their order in memory."""
    return x.as_strided((x.numel(),), (1,))


def drawn(x: Tensor, start: int, seed: tuple[int, int]) -> Tensor:
    """Round each fp32 value to one of its two neighbours in bf16 at random; NaN stays NaN."""
    position = torch.arange(start, start + x.numel(), device=x.device)
    chance = (noise.uniform(position, torch.tensor(seed, device=x.device)) * (PAYLOAD + 1)).long()
    bits = (x.view(torch.int32).long() & noise.WORD) + chance >> 16
    rounded = torch.where(x == x, bits, 0x7FC0).to(torch.int32) << 16
    return rounded.view(torch.float32).to(torch.bfloat16)


def gradient_norm_(norm: Tensor, grads: Sequence[Tensor], found_inf: Tensor | None) -> None:
    """Write √(Σ g²) of all gradients to `norm`. Set `found_inf`, if given, to 1 if the norm is not finite, else to 0.

    Squares and sums are fp64, so that squares of fp32 do not overflow. The root is rounded to fp32. A NaN or an
    infinity gives a norm of NaN or infinity. Kernels sum in other orders, which rarely changes the norm.
    """
    norms = [torch.linalg.vector_norm(dense(g), dtype=torch.float64) for g in grads]
    total = torch.linalg.vector_norm(torch.stack(norms)) if norms else norm.new_zeros(())
    norm.copy_(total)
    if found_inf is not None:
        found_inf.copy_(~norm.isfinite())
