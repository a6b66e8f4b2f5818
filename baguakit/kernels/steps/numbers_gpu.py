"""The numbers of a step if some of its conditions lie on the device: the fp64 arithmetic of `definition.py`.

One program leaves them all on the device, with the count of steps advanced, unless the step is to be skipped.
"""

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from ..shared.gpu import mix
from .gpu import DECOUPLED, FACTOR, SEED, SEED_HIGH, SKIP


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
        n = (decay, kept, taken, momentum, -lr, zero, zero)
    elif RULE == "Adam":
        beta1, beta2, eps, decay = fp64(o0), fp64(o1), fp64(o2), fp64(o3)
        size = -(lr / (1 - power(beta1, t)))
        root = tl.sqrt(1 - power(beta2, t))
        n = (1 - lr * decay if DECAY == DECOUPLED else decay, 1 - beta1, beta2, 1 - beta2, root, eps, size)
    else:
        beta1, beta2, decay = fp64(o0), fp64(o1), fp64(o2)
        n = (1 - lr * decay, beta1, 1 - beta1, beta2, 1 - beta2, -lr, zero)
    return n


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
