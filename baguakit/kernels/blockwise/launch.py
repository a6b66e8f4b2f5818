"""The operations of `definition.py` for GPUs, with the same arguments.

Launches turn off the fusion of multiplication and addition, which would round once where the definition rounds twice.
"""

from functools import lru_cache
from importlib import import_module
from math import gcd
from typing import Any, NamedTuple

import torch
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from ..shared.gpu import INTERPRETED, on, signed_words
from ..shared.rotation import signs_of
from .format import Format
from .gpu import add_kernel, compress_kernel, decompress_kernel, reduce_kernel
from .layout import Layout, planes_of

# Values of a tile; a warp takes WARP of it, so that each thread has eight 16-byte loads of fp32 in flight. What looks
# for the range of a block keeps blocks of up to 1024 within one warp, which then waits for no other; what only
# streams fills a multiprocessor, which holds 32 programs, with two; unless a byte holds several codes: within one warp
# a thread can hold the values of the very bytes it reads.
WARP = 1024
TILES = {compress_kernel: WARP, decompress_kernel: 2 * WARP, add_kernel: 2 * WARP, reduce_kernel: WARP}
WORDS = {1: tl.uint8, 4: tl.uint32, 8: tl.uint64}  # by the bytes of a header
KERNELS = {"compress": compress_kernel, "decompress": decompress_kernel, "add": add_kernel, "reduce": reduce_kernel}


def compress(format: Format, x: Tensor, block: int, residual: Tensor | None = None, key: int | None = None) -> Tensor:
    rows, n = x.shape
    stride, x = _stride(x), x.contiguous()
    plan = plan_of("compress", format, n, block, x.itemsize, stride)
    packed = plan.layout.empty(rows, x.device)
    _launch(plan, rows, x.device, (x, residual, packed, stride), _draws(key))
    return packed


def decompress_(format: Format, out: Tensor, packed: Tensor, block: int) -> None:
    (rows, n), stride = out.shape, _stride(out)
    plan = plan_of("decompress", format, n, block, out.itemsize, stride)
    _launch(plan, rows, out.device, (out, _aligned(packed), stride), {})


def add_(format: Format, out: Tensor, packed: Tensor, weights: Tensor, block: int) -> None:
    plan = plan_of("add", format, len(out), block, out.itemsize)
    _launch(plan, 1, out.device, (out, _aligned(packed), weights, _count(packed)), {})


def reduce(
    format: Format, packed: Tensor, n: int, block: int, residual: Tensor | None = None, key: int | None = None
) -> Tensor:
    plan = plan_of("reduce", format, n, block, 1 if residual is None else 4)
    sent = plan.layout.empty(1, packed.device)
    _launch(plan, 1, sent.device, (sent, residual, _aligned(packed), _count(packed)), _draws(key))
    return sent


class LaunchPlan(NamedTuple):
    """The launches of a kernel on rows of one length.

    Attributes:
        rotated: the width of blocks that are rotated; 0 where none are.
        runs: (first, tiles, options) of a row: its tiles that hold values throughout, and then the last if it does not.
    """

    kernel: Any
    rotated: int
    n: int
    layout: Layout
    runs: tuple[tuple[int, int, dict[str, Any]], ...]


@lru_cache(maxsize=1024)  # the lengths of a model's buckets are few
def plan_of(operation: str, format: Format, n: int, block: int, itemsize: int, stride: int = 0) -> LaunchPlan:
    """Return how an operation on rows of `n` values, of so many bytes each and so far apart, is launched."""
    kernel, layout = KERNELS[operation], format.layout(n, block)
    whole, rest = divmod(n, block * blocks_of(kernel, format, block))
    runs = []
    for first, count, masked in ((0, whole, False), (whole, int(rest > 0), True)):
        if count:
            constants = constants_of(kernel, format, block, itemsize, masked, stride)
            runs.append((first, count, constants | options_of(constants)))
    return LaunchPlan(kernel, block if format.rotated else 0, n, layout, tuple(runs))


def blocks_of(kernel: Any, format: Format, block: int) -> int:
    tile = TILES[kernel] if format.bits == 8 and not format.rotated else WARP
    return max(block, tile) // block


def constants_of(
    kernel: Any, format: Format, block: int, itemsize: int, masked: bool, stride: int = 0
) -> dict[str, Any]:
    """Return the constants of a kernel for a format and for values of so many bytes, in rows so far apart."""
    module = import_module(f"{type(format).__module__}_gpu")
    form = format.bits, format.padded, format.rotated, *format.numbers
    device = {"MEASURE": module.measure, "ENCODE": module.encode, "DECODE": module.decode}
    device |= {"WORD": WORDS[format.header_bytes], "FORM": form}
    width = min(16 // itemsize, 4 * planes_of(format.bits)[0])  # a thread's part of what a warp of 32 holds
    return {name: value for name, value in device.items() if name in kernel.arg_names} | {
        "BLOCK": block,
        "BLOCKS": blocks_of(kernel, format, block),
        "MASKED": masked,
        # Values are masked one by one; and a row begins where its number times the stride does.
        "WIDTH": 1 if masked else gcd(width, stride),
        "NARROW": masked or stride % 16 != 0,
    }


def options_of(constants: dict[str, Any]) -> dict[str, Any]:
    """Return the options with which a kernel of these constants is launched."""
    values = constants["BLOCK"] * constants["BLOCKS"]
    return {"num_warps": values // WARP, "enable_fp_fusion": False}


def _aligned(packed: Tensor) -> Tensor:
    return packed if packed.data_ptr() % 16 == 0 else packed.clone()


def _count(packed: Tensor) -> Any:
    # The interpreter of Triton 3.6 cannot count to an argument, only to a constant.
    return tl.constexpr(len(packed)) if INTERPRETED.value else len(packed)


def _stride(x: Tensor) -> int:
    # A single row begins where the tensor does, whatever its length: zero keeps its accesses wide.
    return x.shape[1] if x.shape[0] > 1 else 0


def _draws(key: int | None) -> dict[str, Any]:
    seed, seed_high = (0, 0) if key is None else signed_words(key)
    return {"seed": seed, "seed_high": seed_high, "DRAWN": key is not None}


def _launch(
    plan: LaunchPlan, rows: int, device: torch.device, arguments: tuple[Any, ...], draws: dict[str, Any]
) -> None:
    if not rows:
        return
    row, header_at = plan.layout.row, plan.layout.header_at
    with on(device):
        signs = signs_of(plan.rotated, device) if plan.rotated else None
        for first, tiles, options in plan.runs:
            plan.kernel[(rows * tiles,)](*arguments, signs, row, header_at, plan.n, first, tiles, **draws, **options)
