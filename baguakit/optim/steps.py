"""Functions that take optimizer steps: one launch steps all tensors, and the host does not wait for the GPU.

    norm = bk.primitives.gradient_norm(grads, found_inf=found)                # on the device, like all tensors below
    clip = (max_norm / (norm + 1e-6)).clamp(max=1)
    bk.primitives.adamw_step_(params, grads, m, v, steps, lr=3e-4, clip=clip, found_inf=found)

Each of p, g and the states is one tensor, or a list with one tensor for every parameter. A table on the device keeps
the addresses of these tensors; it is made again when an address changes. A step reads the addresses on the host, which
takes about a millisecond for 1,000 parameters. A step has one launch on CUDA, one call of C on a CPU, for each pair of
dtypes of p and g, with the same bits. If a number is in a CUDA tensor, a small launch comes first. After a first step
over the same tensors, a CUDA graph can capture a step, if the numbers that change (`step`, `lr`) are in tensors. All
four step functions take these arguments:

    p: parameters in fp32, bf16 or fp16; overwritten.
    g: gradients in fp32, bf16 or fp16.
    master: fp32 copies of bf16 or fp16 parameters; the step is taken on the copies. None (also in a list): no copy.
    key: seed of random, unbiased rounding of bf16 parameters; None: round to nearest. A random number depends on key,
        step and the position of the value among all values. Without `step`, pass another key in each step.
    grad_scale: gradients are divided by this number, such as the scale of a `GradScaler`.
    clip: gradients are then multiplied by this number, such as min(1, max_norm / norm).
    found_inf: if not zero, nothing changes, not even the count of steps.

lr, step, grad_scale, clip and found_inf are numbers, or tensors with one value, on the CPU or on the device of p (the
host does not wait). `step` is the number of steps taken before this step; if it is a tensor, it increases by one.

If tensors do not fit each other or an option is invalid, a step raises TypeError or ValueError and changes nothing.
"""

import math
from collections.abc import Sequence
from dataclasses import astuple
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..arguments import Betas, describe, instance, integer, kind_of, message, real, several, truth
from ..compressors import MinMaxUInt8
from ..kernels.steps import operators as steps_ops
from ..kernels.steps.definition import SGD, Adam, Columns, Conditions, Lion, Update
from ..tensors import is_dense, sharing

__all__ = ["adam_step_", "adamw_step_", "gradient_norm", "lion_step_", "sgd_step_"]

Tensors = Tensor | Sequence[Tensor]
Masters = Tensors | Sequence[Tensor | None]
Number = float | Tensor
BETAS = kind_of(Betas)
CPU = torch.device("cpu")
WEIGHTS = (torch.float32, torch.bfloat16, torch.float16)


@torch.no_grad()
def sgd_step_(
    p: Tensors, g: Tensors, momentum_buffer: Tensors | None = None, step: int | Tensor | None = None, *, lr: Number,
    momentum: float = 0.0, dampening: float = 0.0, nesterov: bool = False, weight_decay: float = 0.0,
    master: Masters | None = None, key: int | None = None, grad_scale: Number = 1.0,
    clip: Number = 1.0, found_inf: Number = 0.0,
) -> None:  # fmt: skip
    """Take one step of `torch.optim.SGD`:

        g ← g + λ p     b ← μ b + (1 − d) g  (b ← g at step 0)     p ← p − η (g + μ b  with Nesterov, else b)

    Args:
        momentum_buffer: b, fp32, zeros at first; overwritten. Only with a momentum.
        step: needed with a dampening, because the first step has no dampening.
        lr, momentum, dampening, weight_decay: η, μ, d and λ. With `nesterov`, the step uses g + μ b.
        master, key, grad_scale, clip, found_inf: see this module.
    """
    conditions = _conditions(
        lr, step, grad_scale, clip, found_inf, key, momentum=momentum, dampening=dampening, weight_decay=weight_decay
    )
    update = SGD(momentum, dampening, weight_decay, truth("nesterov", nesterov))
    if (momentum_buffer is not None) != (momentum != 0):
        _column("momentum_buffer", [] if momentum_buffer is None else momentum_buffer)
        raise ValueError(f"{momentum=} and momentum_buffer={describe(momentum_buffer)}: the one needs the other")
    if nesterov and (momentum <= 0 or dampening != 0):
        raise ValueError(f"nesterov=True needs a momentum and no dampening, not {momentum=} and {dampening=}")
    if dampening and momentum and step is None:
        raise ValueError(f"dampening={dampening} is left out at the first step; say how many went before with step=")
    states = {} if momentum_buffer is None else {"momentum_buffer": momentum_buffer}
    _take(update, p, g, states, master, conditions)


@torch.no_grad()
def adam_step_(
    p: Tensors, g: Tensors, m: Tensors, v: Tensors, step: int | Tensor, *, lr: Number = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.0,
    master: Masters | None = None, key: int | None = None, grad_scale: Number = 1.0,
    clip: Number = 1.0, found_inf: Number = 0.0,
) -> None:  # fmt: skip
    """Take one step of `torch.optim.Adam`; with t = step + 1,

        g ← g + λ p     m ← m + (1 − β₁) (g − m)     v ← β₂ v + (1 − β₂) g²
        p ← p − η / (1 − β₁ᵗ) · m / (√(v / (1 − β₂ᵗ)) + ε)

    Args:
        m, v: fp32, zeros at first; overwritten. In torch, their names are exp_avg and exp_avg_sq.
        lr, betas, eps, weight_decay: η, (β₁, β₂), ε and λ.
        master, key, grad_scale, clip, found_inf: see this module.
    """
    conditions = _conditions(lr, step, grad_scale, clip, found_inf, key, eps=eps, weight_decay=weight_decay)
    _take(Adam(*_betas(betas), eps, weight_decay), p, g, {"m": m, "v": v}, master, conditions)


@torch.no_grad()
def adamw_step_(
    p: Tensors, g: Tensors | None, m: Tensors, v: Tensors, step: int | Tensor, *, lr: Number = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 1e-2,
    packed: Tensor | None = None, compressor: MinMaxUInt8 = MinMaxUInt8(),
    master: Masters | None = None, key: int | None = None, grad_scale: Number = 1.0,
    clip: Number = 1.0, found_inf: Number = 0.0,
) -> None:  # fmt: skip
    """Take one step of `torch.optim.AdamW`: like `adam_step_`, but first p ← (1 − η λ) p, and λ p is not added to g.

    On CUDA, a step with `packed` decompresses gradients as it reads them, without memory for decompressed gradients.

    Args:
        packed: compressed gradients: the row of bytes that `compressor.compress(g.view(1, -1))` returned. Then g is
            None, and each of p, m and v is one flat tensor.
        compressor: the compressor of `packed`. All other arguments: as in `adam_step_`.
        master, key, grad_scale, clip, found_inf: see this module.
    """
    conditions = _conditions(lr, step, grad_scale, clip, found_inf, key, eps=eps, weight_decay=weight_decay)
    instance("compressor", compressor, MinMaxUInt8, "MinMaxUInt8(), the only one whose bytes a step reads")
    update = Adam(*_betas(betas), eps, weight_decay, decoupled=True)
    if (g is None) == (packed is None):
        raise ValueError(f"give one of g and packed=, not g={describe(g)} and packed={describe(packed)}")
    _take(update, p, g, {"m": m, "v": v}, master, conditions, packed, compressor)


@torch.no_grad()
def lion_step_(
    p: Tensors, g: Tensors, m: Tensors, step: int | Tensor | None = None, *, lr: Number = 1e-4,
    betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0,
    master: Masters | None = None, key: int | None = None, grad_scale: Number = 1.0,
    clip: Number = 1.0, found_inf: Number = 0.0,
) -> None:  # fmt: skip
    """Take one step of Lion:

        c = β₁ m + (1 − β₁) g     p ← (1 − η λ) p − η sign(c)     m ← β₂ m + (1 − β₂) g

    Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms", arXiv:2302.06675.

    Args:
        m: fp32, zeros at first; overwritten.
        step: used only for random rounding (`key`).
        lr, betas, weight_decay: η, (β₁, β₂) and λ.
        master, key, grad_scale, clip, found_inf: see this module.
    """
    conditions = _conditions(lr, step, grad_scale, clip, found_inf, key, weight_decay=weight_decay)
    _take(Lion(*_betas(betas), weight_decay), p, g, {"m": m}, master, conditions)


@torch.no_grad()
def gradient_norm(grads: Tensors, found_inf: Tensor | None = None) -> Tensor:
    """Return the norm √(Σ g²) of all gradients, a 0-d fp32 tensor on their device. The host does not wait.

    The sum is in fp64, in a fixed order. The result is infinite or NaN if a gradient is, or if the norm overflows fp32.

    Args:
        grads: fp32, bf16 or fp16.
        found_inf: a floating-point tensor with one value, on the device of the gradients; overwritten by 1 if the norm
            is not finite, by 0 if it is.

    Raises:
        TypeError, ValueError: there are no gradients, they do not fit each other, or `found_inf` is on another device.
    """
    tensors = _column("grads", grads)
    norm: Tensor = (_norm if torch.compiler.is_compiling() else _gradient_norm)(tensors, found_inf)
    return norm


def _gradient_norm(tensors: Sequence[Tensor], found_inf: Tensor | None) -> Tensor:
    if not tensors:
        raise ValueError(f"there are no grads to take a norm of, only {describe(list(tensors))}")
    if found_inf is not None:
        instance("found_inf", found_inf, Tensor, "a tensor with one value, to be written to")
        check_number("found_inf", found_inf, tensors[0].device)
        if found_inf.device != tensors[0].device:
            raise ValueError(f"found_inf is on {found_inf.device} and the gradients are on {tensors[0].device}")
    norm = torch.empty((), dtype=torch.float32, device=tensors[0].device)
    steps_ops.gradient_norm_(norm, tensors, found_inf, lambda: check_gradients(tensors))
    return norm


_norm = torch.library.custom_op(
    "baguakit::gradient_norm", _gradient_norm, mutates_args={"found_inf"},
    schema="(Tensor[] tensors, Tensor(a!)? found_inf) -> Tensor",
)  # fmt: skip
_norm.register_fake(lambda tensors, found_inf: tensors[0].new_empty((), dtype=torch.float32))


# Check arguments, and take a step of any optimizer


def _column(name: str, tensors: Any) -> Sequence[Any]:
    """Return the argument `name` as a list: [x] for a single tensor x. A list is returned unchanged."""
    tensors = [tensors] if isinstance(tensors, Tensor) else tensors
    wanted = "a tensor or a list of tensors"
    given = tensors if isinstance(tensors, list | tuple) else several(name, tensors, wanted, True)
    for each in given:
        if not isinstance(each, Tensor) and (each is not None or name != "master"):
            raise TypeError(message(name, wanted, tensors) + "; leave out parameters without a gradient")
        if name == "p" and each is not None and each.is_meta:
            raise ValueError(message(name, "a tensor that holds values", each))
    return given


def _betas(betas: Any) -> tuple[float, float]:
    return tuple(BETAS.take("betas", betas))


def _conditions(
    lr: Number, step: Any, grad_scale: Number, clip: Number, found_inf: Any, key: int | None, **numbers: Any
) -> Conditions:
    """Return the `Conditions` of a step. Raise an error if key, step or one of `numbers` is not valid."""
    if key is not None:
        key = integer("key", key, -(1 << 63), (1 << 63) - 1)
    if not isinstance(step, Tensor):
        integer("step", 0 if step is None and "eps" not in numbers else step, 0, (1 << 31) - 2)  # Adam needs one
    elif not torch.compiler.is_compiling() and step.is_cpu and step.numel() == 1 and not 0 <= step.item() < math.inf:
        raise ValueError(f"step is a whole number, 0 or more, not {step.item()} in {describe(step)}")
    for name, value in numbers.items():
        real(name, value, 0)
    if isinstance(found_inf, Tensor) and step is not None:
        where = step.device if isinstance(step, Tensor) else "the host"
        if where != found_inf.device:
            raise ValueError(
                f"found_inf is on {found_inf.device} and step on {where}, where a skipped step would be counted; give "
                "step in a tensor beside found_inf"
            )
    return Conditions(lr, 1 if step is None else step, grad_scale, clip, found_inf, key)


def _packed_row(packed: Tensor, compressor: MinMaxUInt8, p: Sequence[Tensor]) -> Tensor:
    """Return the packed gradients of p as a tensor of shape (bytes,). Raise an error if they do not fit p."""
    instance("packed", packed, Tensor, "a tensor of bytes, as compress returned them")
    if len(p) != 1 or not p[0].is_contiguous():
        raise ValueError("packed gradients are those of one contiguous tensor; step the flat tensor of a bucket")
    if packed.dtype != torch.uint8:
        raise TypeError(f"packed gradients are uint8, as compress returned them, not {packed.dtype}")
    size, device = compressor.row_bytes(p[0].numel()), p[0].device
    if packed.numel() != size or not packed.is_contiguous() or packed.device != device:
        raise ValueError(message("packed", f"one contiguous row of {size} bytes on {device}", packed))
    if packed.data_ptr() % 16:
        raise ValueError("packed gradients begin at an address that is no multiple of 16 bytes; clone them")
    return packed.view(-1)


def _take(
    update: Update, p: Tensors, g: Tensors | None, states: dict[str, Tensors], master: Masters | None,
    conditions: Conditions, packed: Tensor | None = None, compressor: MinMaxUInt8 = MinMaxUInt8(),
) -> None:  # fmt: skip
    """Take a step of `update`. `states` are in the order of the update; their keys are the names in error messages."""
    names = dict(zip("uv", states, strict=False))
    given: dict[str, Any] = {"p": p, "g": g if packed is None else (), **dict(zip("uv", states.values(), strict=False))}
    given |= {} if master is None else {"master": master}
    columns = {at: _column(names.get(at, at), tensors) for at, tensors in given.items()}
    step = _step_in_graph if torch.compiler.is_compiling() else _step
    step(update, columns, names, conditions, packed, compressor)


def _step(
    update: Update, columns: Columns, names: dict[str, str], conditions: Conditions, packed: Tensor | None,
    compressor: MinMaxUInt8,
) -> None:  # fmt: skip
    if not (p := columns["p"]):
        return
    check_conditions(conditions, p[0].device)
    block = None
    if packed is not None:
        row, n = _packed_row(packed, compressor, p), p[0].numel()
        columns["g"] = [row] if row.is_cuda else [compressor.decompress(row.view(1, -1), n).view(p[0].shape)]
        block = compressor.block if row.is_cuda else None
    check = partial(check_columns, columns, names, conditions.key is not None, block is not None)
    steps_ops.step_(update, columns, conditions, block, check)


# In a graph of torch.compile, Python numbers become tensors on the CPU, which a step reads without waiting.


def _step_in_graph(
    update: Update, columns: Columns, names: dict[str, str], c: Conditions, packed: Tensor | None,
    compressor: MinMaxUInt8,
) -> None:  # fmt: skip
    none = torch.empty(0, dtype=torch.float32)
    lists = [[none if x is None else x for x in columns.get(at, ())] for at in ("p", "g", "u", "v", "master")]
    numbers = [
        x if isinstance(x, Tensor) else torch.tensor(x, dtype=torch.int64 if isinstance(x, int) else torch.float64)
        for x in (c.lr, c.taken, c.grad_scale, c.clip, c.found_inf)
    ]
    options = type(update).__name__, list(map(float, astuple(update))), " ".join(names.values())
    _operator(*options, *lists, *numbers, c.key, packed, compressor.block)


@torch.library.custom_op("baguakit::step_", mutates_args={"p", "u", "v", "master", "taken"})
def _operator(
    update: str, options: Sequence[float], names: str, p: Sequence[Tensor], g: Sequence[Tensor],
    u: Sequence[Tensor], v: Sequence[Tensor], master: Sequence[Tensor], lr: Tensor,
    taken: Tensor, grad_scale: Tensor, clip: Tensor, found_inf: Tensor, key: int | None, packed: Tensor | None,
    block: int,
) -> None:  # fmt: skip
    *numbers, switch = options
    kind: Any = {each.__name__: each for each in (SGD, Adam, Lion)}[update]
    made = kind(*options) if kind is Lion else kind(*numbers, bool(switch))
    given = {"p": p, "g": g, "u": u, "v": v, "master": [x if x.numel() else None for x in master]}
    columns: Columns = {at: column for at, column in given.items() if column or at in "pg"}
    conditions = Conditions(lr, taken, grad_scale, clip, found_inf, key)
    _step(made, columns, dict(zip("uv", names.split(), strict=False)), conditions, packed, MinMaxUInt8(block))


# Check tensors and numbers before anything is launched


def check_columns(columns: Columns, names: dict[str, str], drawn: bool, packed: bool = False) -> Columns:
    """Return the columns if they fit, else raise. Errors call u and v by `names`; packed g is not checked."""
    weights, named = columns["p"], {}
    for name, column in ((names.get(at, at), columns[at]) for at in columns if at != "g" or not packed):
        if len(column) != len(weights):
            raise ValueError(f"{name} has {len(column)} tensors for {len(weights)} parameters: {describe(column)}")
        for i, (x, p) in enumerate(zip(column, weights, strict=True)):
            if x is not None or name != "master":
                x = named[f"{name}[{i}]"] = _dense(f"{name}[{i}]", x, WEIGHTS if name in "pg" else (torch.float32,))
                _check_like(f"{name}[{i}]", x, p)
    for i, p in enumerate(weights):
        mastered = f"master[{i}]" in named
        if p.device != weights[0].device:
            raise ValueError(f"p[{i}] is on {p.device} and p[0] on {weights[0].device}; step each device by itself")
        if mastered and p.dtype == torch.float32:
            raise ValueError(f"p[{i}] is float32 and needs no master; put None in its place")
        if mastered and drawn:
            raise ValueError(f"p[{i}] has a master, which loses nothing to rounding; leave key= out, or the master")
        if drawn and p.dtype == torch.float16:
            raise TypeError(f"p[{i}] is float16, and only bfloat16 is rounded at random; give it a master instead")
    names_of = [*named]
    for group in ([names_of[i] for i in group] for group in sharing([*named.values()]) if len(group) > 1):
        for one in (name for name in group if not name.startswith("g[")):  # gradients are only read
            other = next(each for each in group if each != one and len(sharing([named[one], named[each]])) == 1)
            raise ValueError(f"{one} and {other} share memory, and one is overwritten; clone one, or give it only once")
    return columns


def check_gradients(grads: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the gradients if one norm can be taken of all gradients; else raise."""
    for i, g in enumerate(grads):
        _dense(f"grads[{i}]", g, WEIGHTS)
        if g.device != grads[0].device:
            raise ValueError(f"grads[{i}] is on {g.device} and grads[0] on {grads[0].device}; take a norm for each")
    return grads


def check_conditions(conditions: Conditions, device: torch.device) -> None:
    """Raise unless the conditions of a step are valid for tensors on this device."""
    for name in ("lr", "clip", "grad_scale", "found_inf"):
        check_number(name, getattr(conditions, name), device, 0.0 if name in ("lr", "clip") else -math.inf)
    taken = conditions.taken
    if isinstance(taken, Tensor) and (taken.numel() != 1 or taken.device not in (device, CPU) or taken.is_complex()):
        raise ValueError(f"step is a number or a tensor with one value on {device}, not {describe(taken)}")


def check_number(name: str, number: object, device: torch.device, least: float = -math.inf) -> None:
    """Raise unless this is a finite number, or a floating tensor with one value that can be read without waiting."""
    if not isinstance(number, Tensor):
        real(name, number, least, above=0 if name == "grad_scale" else -math.inf)
    elif number.numel() != 1 or not number.is_floating_point() or number.device not in (device, CPU):
        raise ValueError(f"{name} is a floating tensor with one value on {device}, not {describe(number)}")


def _dense(name: str, x: object, dtypes: Sequence[torch.dtype]) -> Tensor:
    """Return `x` if it is a dense tensor of one of the dtypes; else raise."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} is a {type(x).__name__}; give tensors, and leave out parameters without a gradient")
    if x.layout is not torch.strided:
        raise TypeError(f"{name} has the layout {x.layout}; call .to_dense() first")
    if x.dtype not in dtypes:
        allowed = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise TypeError(f"{name} is {x.dtype}, and must be {allowed}; convert it with .to(…)")
    if not is_dense(x):
        raise TypeError(f"{name} has gaps (shape {tuple(x.shape)}, strides {x.stride()}); call .contiguous() first")
    return x


def _check_like(name: str, x: Tensor, p: Tensor) -> None:
    if x.device != p.device:
        raise ValueError(f"{name} is on {x.device} and its parameter on {p.device}; move one to the other")
    if x.numel() != p.numel():
        raise ValueError(f"{name} has {x.numel()} values and that in p {p.numel()}: {describe(x)}, {describe(p)}")
    if not (x.is_contiguous() and p.is_contiguous()) and (x.shape, x.stride()) != (p.shape, p.stride()):
        raise ValueError(f"{name} has strides {x.stride()}, its parameter {p.stride()}; use torch.empty_like(p)")
