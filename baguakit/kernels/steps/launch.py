"""The launchers of optimizer steps: a launch for each kind of tensors, and one before it for numbers on the device.

That one is of a kernel with the fp64 arithmetic of `definition.py`: its one program leaves all numbers on the device,
with the count of steps advanced, unless the step is to be skipped.
"""

from typing import Any

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from ..shared.gpu import mix, on, signed, signed_words
from .definition import SGD, Adam, Conditions, Update, numbers_of
from .gpu import COUPLED, DECOUPLED, FACTOR, SEED, SEED_HIGH, SKIP, TYPES, step_kernel
from .table import StepTables, Table

WARPS = 4  # eight values a thread: Adam, with four streams, then needs about a hundred registers


@triton.jit
def fp64(number):
    return tl.full((), number, tl.float64)


@triton.jit
def power(base, t):
    result = fp64(1.0)
    for _ in tl.static_range(31):
        result = tl.where((t & 1) != 0, result * base, result)
        base = base * base
        t = t >> 1
    return result


@triton.jit
def held(ptr, number):
    """Return the number on the device, if there is one, else the one given."""
    return fp64(number) if ptr is None else tl.load(ptr).to(tl.float64)


@triton.jit
def numbers_of_rule(lr, t, o0, o1, o2, o3, RULE: tl.constexpr, DECAY: tl.constexpr):
    zero = fp64(0.0)
    if RULE == "SGD":
        momentum, dampening, decay, first = fp64(o0), fp64(o1), fp64(o2), t == 1
        kept, taken = tl.where(first, zero, momentum), tl.where(first, fp64(1.0), 1 - dampening)
        return decay, kept, taken, momentum, -lr, zero, zero
    elif RULE == "Adam":
        beta1, beta2, eps, decay = fp64(o0), fp64(o1), fp64(o2), fp64(o3)
        size = -(lr / (1 - power(beta1, t)))
        root = tl.sqrt(1 - power(beta2, t))
        return 1 - lr * decay if DECAY == DECOUPLED else decay, 1 - beta1, beta2, 1 - beta2, root, eps, size
    else:
        beta1, beta2, decay = fp64(o0), fp64(o1), fp64(o2)
        return 1 - lr * decay, beta1, 1 - beta1, beta2, 1 - beta2, -lr, zero


@triton.jit(do_not_specialize=["taken", "seed", "seed_high"])
def numbers_kernel(
    numbers_ptr, lr_ptr, taken_ptr, scale_ptr, clip_ptr, found_ptr, lr: tl.float64, taken: tl.int64, scale: tl.float64,
    clip: tl.float64, o0: tl.float64, o1: tl.float64, o2: tl.float64, o3: tl.float64, seed, seed_high,
    RULE: tl.constexpr, DECAY: tl.constexpr,
):  # fmt: skip
    """Write a step's numbers and whether it is skipped, and advance the count of steps if it is not."""
    words = numbers_ptr.to(tl.pointer_type(tl.int32))
    if found_ptr is not None:
        skip = tl.load(found_ptr) != 0
        tl.store(words + SKIP, skip.to(tl.int32))
        if skip:
            return
    else:
        tl.store(words + SKIP, 0)
    before = taken.to(tl.int64) if taken_ptr is None else tl.load(taken_ptr).to(tl.int64)
    n = numbers_of_rule(held(lr_ptr, lr), before + 1, o0, o1, o2, o3, RULE, DECAY)
    for i in tl.static_range(7):
        tl.store(numbers_ptr + i, n[i].to(tl.float32))
    tl.store(numbers_ptr + FACTOR, (held(clip_ptr, clip) / held(scale_ptr, scale)).to(tl.float32))
    tl.store(words + SEED, seed)
    step_seed = seed_high.to(tl.uint32, bitcast=True) ^ mix((before + 1).to(tl.uint32))
    tl.store(words + SEED_HIGH, step_seed.to(tl.int32, bitcast=True))
    if taken_ptr is not None:
        tl.debug_barrier()  # all threads have read it; one stores
        tl.store(taken_ptr, (before + 1).to(taken_ptr.dtype.element_ty))


def step_(update: Update, tables: StepTables, conditions: Conditions, block: int | None = None) -> None:
    """Step all tensors of the tables; `block` is that of packed gradients."""
    c, device = conditions, tables.numbers.device
    found = (c.lr, c.taken, c.grad_scale, c.clip, c.found_inf)
    held = [x if isinstance(x, Tensor) and x.device == device else None for x in found]  # the others are on the host
    if held[-1] is None and float(c.found_inf) != 0:
        return
    constants = {"RULE": type(update).__name__, "DECAY": _decay(update)}
    with on(device):
        numbers: tuple[Any, ...] = (tables.numbers, *(0.0,) * 8, 0, 0)
        if any(x is not None for x in held):
            _launch_numbers(update, tables.numbers, found, held, c.key, constants)
        else:
            values, factor, seed = numbers_of(update, conditions)
            numbers = (None, *values, *(0.0,) * (7 - len(values)), factor, *map(signed, seed))
        constants |= {"NESTEROV": isinstance(update, SGD) and update.nesterov, "STATES": update.states, "BLOCK": block}
        for table in tables.by_kind:
            _launch(table, numbers, constants, conditions.key is not None)
    if isinstance(conditions.taken, Tensor) and held[1] is None:
        conditions.taken.add_(1)


def _launch(table: Table, numbers: tuple[Any, ...], constants: dict[str, Any], drawn: bool) -> None:
    p, g, mastered = table.kind
    if len(table.tiles):
        step_kernel[(len(table.tiles),)](
            table.tiles, table.records, *numbers, **constants,
            P=TYPES[p], G=TYPES[g], MASTER=mastered, DRAWN=drawn and p == torch.bfloat16, TILE=table.tile,
            num_warps=WARPS, enable_fp_fusion=False,
        )  # fmt: skip


def _launch_numbers(
    update: Update, numbers: Tensor, found: Any, held: list[Tensor | None], key: int | None, constants: dict[str, Any]
) -> None:
    lr, taken, scale, clip, _ = (float(x) if there is None else 0.0 for x, there in zip(found, held, strict=True))
    options = [x for x in vars(update).values() if not isinstance(x, bool)]  # three, or four, in the kernel's order
    numbers_kernel[(1,)](
        numbers, *held, lr, int(taken), scale, clip, *(*options, 0.0)[:4], *signed_words(key or 0),
        **constants, num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip


def _decay(update: Update) -> int:
    if isinstance(update, Adam) and update.decoupled:
        return int(DECOUPLED.value)
    return int(COUPLED.value) if update.weight_decay else 0
