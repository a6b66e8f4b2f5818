"""The operations of `blockwise.py` for GPUs, with the same arguments.

Launches turn off the fusion of multiplication and addition, which would round once where the definition rounds twice.
"""

import contextlib
from typing import Any

import torch
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from ._format import Format
from ._noise_triton import signed_words
from ._rounding_triton import INTERPRETED
from .blockwise_triton import add_kernel, compress_kernel, decompress_kernel, reduce_kernel

# Values of a tile; a warp takes WARP of it, so that each thread has eight 16-byte loads of fp32 in flight. What looks
# for the range of a block keeps blocks of up to 1024 within one warp, which then waits for no other; what only
# streams fills a multiprocessor, which holds 32 programs, with two; unless a byte holds several codes: within one warp
# a thread can hold the values of the very bytes it reads.
WARP = 1024
TILES = {compress_kernel: WARP, decompress_kernel: 2 * WARP, add_kernel: 2 * WARP, reduce_kernel: WARP}


def compress(format: Format, x: Tensor, block: int, residual: Tensor | None = None, key: int | None = None) -> Tensor:
    rows, n = x.shape
    packed, constants = format.empty(rows, n, block, x.device), constants_of(compress_kernel, format, block, x.itemsize)
    x = x.contiguous()
    _launch(compress_kernel, rows, n, constants, _draws(key), x, residual, packed, _stride(x), *_row(format, n, block))
    return packed


def decompress_(format: Format, out: Tensor, packed: Tensor, block: int) -> None:
    (rows, n), constants = out.shape, constants_of(decompress_kernel, format, block, out.itemsize)
    _launch(decompress_kernel, rows, n, constants, {}, out, _aligned(packed), _stride(out), *_row(format, n, block))


def add_(format: Format, out: Tensor, packed: Tensor, weights: Tensor, block: int) -> None:
    n, constants = len(out), constants_of(add_kernel, format, block, out.itemsize)
    _launch(add_kernel, 1, n, constants, {}, out, _aligned(packed), weights, _count(packed), *_row(format, n, block))


def reduce(
    format: Format, packed: Tensor, n: int, block: int, residual: Tensor | None = None, key: int | None = None
) -> Tensor:
    sent = format.empty(1, n, block, packed.device)
    constants = constants_of(reduce_kernel, format, block, 1 if residual is None else 4)
    tensors = sent, residual, _aligned(packed), _count(packed)
    _launch(reduce_kernel, 1, n, constants, _draws(key), *tensors, *_row(format, n, block))
    return sent


def constants_of(kernel: Any, format: Format, block: int, itemsize: int) -> dict[str, Any]:
    """The constants with which a kernel is compiled for a format and for values of so many bytes, besides MASKED."""
    device = format.device()
    tile = max(block, WARP if device["STRIPES"] > 1 else TILES[kernel])
    return {name: value for name, value in device.items() if name in kernel.arg_names} | {
        "BLOCK": block,
        "BLOCKS": tile // block,
        "WIDTH": min(16 // itemsize, 32 // device["STRIPES"]),  # a thread's part of what a warp of 32 holds
    }


def options_of(constants: dict[str, Any]) -> dict[str, Any]:
    """The options with which a kernel of these constants is launched."""
    return {"num_warps": constants["BLOCK"] * constants["BLOCKS"] // WARP, "enable_fp_fusion": False}


def _row(format: Format, n: int, block: int) -> tuple[int, int]:
    return format.row_bytes(n, block), format.header_at(n, block)


def _aligned(packed: Tensor) -> Tensor:
    return packed if packed.data_ptr() % 16 == 0 else packed.clone()


def _count(packed: Tensor) -> Any:
    # The interpreter of Triton 3.6 cannot count to an argument, only to a constant.
    return tl.constexpr(len(packed)) if INTERPRETED.value else len(packed)


def _stride(x: Tensor) -> int:
    # A single row begins where the tensor does, whatever its length: zero keeps its accesses wide.
    return x.shape[1] if x.shape[0] > 1 else 0


def _draws(key: int | None) -> dict[str, Any]:
    seed, seed_high = signed_words(key or 0)
    return {"seed": seed, "seed_high": seed_high, "DRAWN": key is not None}


def _launch(
    kernel: Any, rows: int, n: int, constants: dict[str, Any], draws: dict[str, Any], *arguments: Tensor | int | None
) -> None:
    """Launch the tiles that lie wholly in their row, and then the last of each row if it does not."""
    block = constants["BLOCK"]
    whole, rest = divmod(n, block * constants["BLOCKS"])
    options = constants | draws | options_of(constants)
    device = next(argument.device for argument in arguments if isinstance(argument, Tensor))
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        for first, tiles, masked in ((0, whole, False), (whole, int(rest > 0), True)):
            if rows * tiles:
                kernel[(rows * tiles,)](*arguments, n, first, tiles, MASKED=masked, **options)
