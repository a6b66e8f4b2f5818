"""Optimizer steps by hand: all tensors in one launch, with nothing that waits for a GPU.

    norm = bk.primitives.gradient_norm(grads, found_inf=found)                # on the device, as all that follows
    clip = (max_norm / (norm + 1e-6)).clamp(max=1)
    bk.primitives.adamw_step_(params, grads, m, v, steps, lr=3e-4, clip=clip, found_inf=found)

p, g and the state are a tensor each, or a list each with one tensor for every parameter. Their addresses go into a
table on the device, which is made again when they change; to read 1,000 of each takes a fraction of a millisecond, and
no time if they are `Fixed`. On CUDA a step is one launch for each pair of dtypes of p and g, after a launch of a single
program if a number lies on the device. It can be captured in a CUDA graph after one step over the same tensors, if the
numbers that change (`step`, `lr`) are in tensors. On CPUs the definition runs, and gives the same bits.

The four have these arguments in common:

    master: fp32 copies of bf16 or fp16 parameters; the step is taken on the copies. None for those in fp32.
    key: rounds bf16 parameters up or down at random without bias, drawn from key, the step's number and the position
        of the value among all. Without `step`, pass another key each time.
    grad_scale: gradients are divided by it, such as the scale of a `GradScaler`.
    clip: they are then multiplied by it, such as min(1, max_norm / norm).
    found_inf: if not zero, everything stays as it is, the count of steps included.

lr, step, grad_scale, clip and found_inf are numbers, or tensors with one value on the device of p (read without
waiting) or on the CPU. `step` says how many steps were taken before this one; a tensor is advanced by one.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ...arguments import instance, pair, shown, truth
from ...compressors import MinMaxUInt8
from ...kernels.steps import operators as steps_ops
from ...kernels.steps.check import check_gradients, check_number
from ...kernels.steps.definition import SGD, Adam, Conditions, Lion
from ...kernels.steps.table import Role, listed
from .arguments import Number, Tensors, check_options, role_of
from .operator import step_


@torch.no_grad()
def sgd_step_(
    p: Tensors, g: Tensors, momentum_buffer: Tensors | None = None, step: int | Tensor | None = None, *, lr: Number,
    momentum: float = 0.0, dampening: float = 0.0, nesterov: bool = False, weight_decay: float = 0.0,
    master: Tensors | Sequence[Tensor | None] | None = None, key: int | None = None, grad_scale: Number = 1.0,
    clip: Number = 1.0, found_inf: Number = 0.0,
) -> None:  # fmt: skip
    """Take one step of `torch.optim.SGD`:

        g ← g + λ p     b ← μ b + (1 − d) g  (b ← g at step 0)     p ← p − η (g + μ b  with Nesterov, else b)

    Args:
        p: parameters in fp32, bf16 or fp16; overwritten.
        g: their gradients, likewise.
        momentum_buffer: b, fp32, zeros at first; overwritten. With a momentum only.
        step: how many steps were taken before; needed with a dampening, which the first step is without.
        lr, momentum, dampening, nesterov, weight_decay: η, μ, d, and λ.
        master, key, grad_scale, clip, found_inf: see this module.

    Raises:
        TypeError, ValueError: the tensors do not go together, or an option has no meaning; nothing has been changed.
    """
    key = check_options(key, found_inf, step, momentum=momentum, dampening=dampening, weight_decay=weight_decay)
    update = SGD(momentum, dampening, weight_decay, truth("nesterov", nesterov))
    if (momentum_buffer is not None) != (momentum != 0):
        role_of("momentum_buffer", [] if momentum_buffer is None else momentum_buffer)
        raise ValueError(f"momentum={momentum}, and momentum_buffer={shown(momentum_buffer)}; the one needs the other")
    if nesterov and (momentum <= 0 or dampening != 0):
        raise ValueError(f"nesterov=True needs a momentum and no dampening, not {momentum=} and {dampening=}")
    if dampening and momentum and step is None:
        raise ValueError(f"dampening={dampening} is left out at the first step; say how many went before with step=")
    states = {} if momentum_buffer is None else {"momentum_buffer": momentum_buffer}
    conditions = Conditions(lr, 1 if step is None else step, grad_scale, clip, found_inf, key)
    step_(update, p, g, states, master, conditions)


@torch.no_grad()
def adam_step_(
    p: Tensors, g: Tensors, m: Tensors, v: Tensors, step: int | Tensor, *, lr: Number = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.0,
    master: Tensors | Sequence[Tensor | None] | None = None, key: int | None = None, grad_scale: Number = 1.0,
    clip: Number = 1.0, found_inf: Number = 0.0,
) -> None:  # fmt: skip
    """Take one step of `torch.optim.Adam`; with t = step + 1,

        g ← g + λ p     m ← m + (1 − β₁) (g − m)     v ← β₂ v + (1 − β₂) g²
        p ← p − η / (1 − β₁ᵗ) · m / (√(v / (1 − β₂ᵗ)) + ε)

    Args:
        p: parameters in fp32, bf16 or fp16; overwritten.
        g: their gradients, likewise.
        m, v: fp32, zeros at first; overwritten. torch calls them exp_avg and exp_avg_sq.
        step: how many steps were taken before.
        lr, betas, eps, weight_decay: η, (β₁, β₂), ε and λ.
        master, key, grad_scale, clip, found_inf: see this module.

    Raises:
        TypeError, ValueError: the tensors do not go together, or an option has no meaning; nothing has been changed.
    """
    key = check_options(key, found_inf, step, eps=eps, weight_decay=weight_decay)
    conditions = Conditions(lr, step, grad_scale, clip, found_inf, key)
    step_(Adam(*pair("betas", betas, 0, below=1), eps, weight_decay), p, g, {"m": m, "v": v}, master, conditions)


@torch.no_grad()
def adamw_step_(
    p: Tensors, g: Tensors | None, m: Tensors, v: Tensors, step: int | Tensor, *, lr: Number = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 1e-2,
    packed: Tensor | None = None, compressor: MinMaxUInt8 = MinMaxUInt8(),
    master: Tensors | Sequence[Tensor | None] | None = None, key: int | None = None, grad_scale: Number = 1.0,
    clip: Number = 1.0, found_inf: Number = 0.0,
) -> None:  # fmt: skip
    """Take one step of `torch.optim.AdamW`: `adam_step_`, but p ← (1 − η λ) p before, and g as it is.

    With `packed`, gradients are read as they came over the wire and are never written out.

    Args:
        packed: in place of g (None), for p, m and v that are a flat tensor each: the one row of bytes that
            `compressor.compress(g.view(1, -1))` returned.
        compressor: what packed it. All else as in `adam_step_`.

    Raises:
        TypeError, ValueError: the tensors do not go together, or an option has no meaning; nothing has been changed.
    """
    key = check_options(key, found_inf, step, eps=eps, weight_decay=weight_decay)
    instance("compressor", compressor, MinMaxUInt8, "MinMaxUInt8(), the only one whose bytes a step reads")
    update = Adam(*pair("betas", betas, 0, below=1), eps, weight_decay, decoupled=True)
    conditions = Conditions(lr, step, grad_scale, clip, found_inf, key)
    if (g is None) == (packed is None):
        raise ValueError(
            f"give g, or packed= with None in its place: one of the two, not g={shown(g)} and packed={shown(packed)}"
        )
    step_(update, p, g, {"m": m, "v": v}, master, conditions, packed, compressor)


@torch.no_grad()
def lion_step_(
    p: Tensors, g: Tensors, m: Tensors, step: int | Tensor | None = None, *, lr: Number = 1e-4,
    betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0,
    master: Tensors | Sequence[Tensor | None] | None = None, key: int | None = None, grad_scale: Number = 1.0,
    clip: Number = 1.0, found_inf: Number = 0.0,
) -> None:  # fmt: skip
    """Take one step of Lion:

        c = β₁ m + (1 − β₁) g     p ← (1 − η λ) p − η sign(c)     m ← β₂ m + (1 − β₂) g

    Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms", arXiv:2302.06675.

    Args:
        p: parameters in fp32, bf16 or fp16; overwritten.
        g: their gradients, likewise.
        m: fp32, zeros at first; overwritten.
        step: how many steps were taken before; only draws (`key`) depend on it.
        lr, betas, weight_decay: η, (β₁, β₂) and λ.
        master, key, grad_scale, clip, found_inf: see this module.

    Raises:
        TypeError, ValueError: the tensors do not go together, or an option has no meaning; nothing has been changed.
    """
    key = check_options(key, found_inf, step, weight_decay=weight_decay)
    conditions = Conditions(lr, 1 if step is None else step, grad_scale, clip, found_inf, key)
    step_(Lion(*pair("betas", betas, 0, below=1), weight_decay), p, g, {"m": m}, master, conditions)


@torch.no_grad()
def gradient_norm(grads: Tensors, found_inf: Tensor | None = None) -> Tensor:
    """Return the norm √(Σ g²) of all gradients, fp32 with no dimensions, on their device: nothing waits for it.

    Summed in fp64, always in the same order. It is not finite if a gradient is not, or if it exceeds fp32.

    Args:
        grads: fp32, bf16 or fp16.
        found_inf: a floating tensor with one value, on their device; overwritten by 1 if the norm is not finite, by 0
            if it is.

    Raises:
        TypeError, ValueError: there are no gradients, they cannot be taken together, or `found_inf` is elsewhere.
    """
    if torch.compiler.is_compiling():
        norm: Tensor = _norm(list(listed(role_of("grads", grads))), found_inf)
        return norm
    return _gradient_norm(role_of("grads", grads), found_inf)


def _gradient_norm(role: Role, found_inf: Tensor | None) -> Tensor:
    tensors = listed(role)
    if not tensors:
        raise ValueError(f"there are no grads to take a norm of, only {shown(list(tensors))}")
    if found_inf is not None:
        if not isinstance(found_inf, Tensor):
            raise TypeError(f"found_inf is a tensor with one value, to be written to, not {found_inf!r}")
        check_number("found_inf", found_inf, tensors[0].device)
        if found_inf.device != tensors[0].device:
            raise ValueError(
                f"found_inf is written beside the gradients, on {tensors[0].device}, not {found_inf.device}"
            )
    norm = torch.empty((), dtype=torch.float32, device=tensors[0].device)

    def check() -> Sequence[Tensor]:
        check_gradients(tensors)
        return tensors

    steps_ops.gradient_norm_(norm, role, found_inf, check)
    return norm


@torch.library.custom_op("baguakit::gradient_norm", mutates_args={"found_inf"})
def _norm(grads: Sequence[Tensor], found_inf: Tensor | None) -> Tensor:
    return _gradient_norm(grads, found_inf)


@_norm.register_fake
def _(grads: Sequence[Tensor], found_inf: Tensor | None) -> Tensor:
    return grads[0].new_empty((), dtype=torch.float32)
