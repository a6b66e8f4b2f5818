"""The kernels of the k largest values of chunks, as they are launched for a single row on a multiple of 16 bytes."""

import torch
from variants import Variant

from baguakit.kernels import topk_gpu as kernels

HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}
POINTERS = {"places_ptr": "*i32", "packed_ptr": "*u8", "ok_ptr": "*u8"} | {
    f"{name}_ptr": "*fp32" for name in ("values", "residual", "weights", "total")
}


def variants():
    for dtype in ("fp32", "bf16", "fp16", "fp64"):
        yield variant(dtype, 4096, 41)
    yield variant("fp32", 4096, 41, residual=False)
    yield variant("fp32", 4096, 150)
    yield variant("fp32", 4096, 682)
    yield variant("fp32", 512, 6)
    yield variant("bf16", 64, 1)
    yield variant("fp32", 64, 64)
    for bits, values, asking in ((12, True, True), (11, True, False), (9, True, False), (6, False, True)):
        constants = {"BITS": bits, "TILE": kernels.TILE} | ({} if values else {"values_ptr": None})
        constants |= {} if asking else {"ok_ptr": None}
        facts = {"bits": bits, "values": values, "asking": asking}
        yield made(kernels.join_kernel, constants, {}, ("packed_ptr", "places_ptr", "values_ptr"), kernels.TILE, facts)
    for dtype, weighted, chunk, asked in (
        ("fp32", False, 4096, True),
        ("fp32", False, 1024, False),
        ("fp32", True, 4096, False),
        ("bf16", False, 4096, True),
        ("fp16", True, 2048, False),
        ("fp64", False, 64, True),
        ("fp64", True, 512, False),
    ):
        yield adding(dtype, weighted, chunk, asked)


def variant(dtype, chunk, k, residual=True):
    """The kernel that keeps `k` values of a chunk, or up to twice as many."""
    form = kernels.form_of(chunk, k, HALVES.get(dtype))
    constants = {name: form.pop(name) for name in [*form] if name.isupper()}
    constants |= {} if residual else {"residual_ptr": None}
    facts = {"dtype": dtype, "chunk": chunk, "k": k, "residual": residual}
    aligned = ("places_ptr", "values_ptr", "residual_ptr", "x_ptr", "stride")
    values = constants["TILE"] if constants["SLOTS"] * constants["GROUP"] < chunk else chunk
    return made(kernels.select_kernel, constants, form, aligned, values, facts, dtype)


def adding(dtype, weighted, chunk, asked):
    options = kernels.options_of(chunk) | {"enable_fp_fusion": False}
    constants = {"CHUNK": chunk, "SLOTS": 32 * options["num_warps"], "BITS": chunk.bit_length() - 1}
    constants |= {} if weighted else {"weights_ptr": None}
    constants |= {} if asked else {"ok_ptr": None}
    constants |= {"out_ptr": None} if dtype in ("fp32", "fp64") else {}
    facts = {"dtype": dtype, "weighted": weighted, "chunk": chunk, "asked": asked}
    total = dtype if dtype == "fp64" else "fp32"
    return made(kernels.add_kernel, constants, options, ("total_ptr", "out_ptr"), chunk, facts, dtype, total)


def made(kernel, constants, options, aligned, values, facts, dtype="fp32", total="fp32"):
    kinds = POINTERS | {"x_ptr": f"*{dtype}", "out_ptr": f"*{dtype}", "total_ptr": f"*{total}", "weight": "fp32"}
    signature = {name: kinds.get(name, "i32") for name in kernel.arg_names if name not in constants}
    aligned = tuple(name for name in aligned if name in signature)
    return Variant(kernel, signature, constants, aligned, options, values, facts)
