"""The kernel of the k largest values of chunks, as it is launched for a single row on a multiple of sixteen bytes."""

import torch
from variants import Variant

from baguakit.kernels import topk_gpu as kernels

HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}
POINTERS = {"places_ptr": "*i32", "values_ptr": "*fp32", "residual_ptr": "*fp32"}


def variants():
    for dtype in ("fp32", "bf16", "fp16", "fp64"):
        yield variant(dtype, 4096)
    yield variant("fp32", 4096, residual=False)
    yield variant("fp32", 512)
    yield variant("fp32", 64)


def variant(dtype, chunk, residual=True):
    constants = {"CHUNK": chunk, "ZEROS": kernels.ZEROS.get(HALVES.get(dtype), 0)}
    constants |= {} if residual else {"residual_ptr": None}
    signature = {
        name: f"*{dtype}" if name == "x_ptr" else POINTERS.get(name, "i32")
        for name in kernels.select_kernel.arg_names
        if name not in constants
    }
    return Variant(
        kernels.select_kernel,
        signature,
        constants,
        aligned=tuple(name for name, kind in signature.items() if kind[0] == "*" or name == "stride"),
        options=kernels.options_of(chunk),
        values=chunk,
        facts={"dtype": dtype, "chunk": chunk, "residual": residual},
    )
