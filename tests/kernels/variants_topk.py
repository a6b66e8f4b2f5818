"""The kernels of the k largest values, as they are launched for a single row on a multiple of sixteen bytes."""

from variants import Variant

from baguakit.kernels.topk import gpu as kernels

POINTERS = {"residual_ptr": "*fp32"}
LONG = {"TILE": kernels.TILE, "TILES": 8}
KEPT = {"TILE": kernels.KEPT_TILE, "TILES": 32}


def variants():
    for dtype in ("fp32", "bf16", "fp64"):
        yield variant(kernels.digits_kernel, dtype, LONG | {"SHIFT": 26, "BITS": 5})
        yield variant(kernels.keep_kernel, dtype, KEPT, warps=kernels.KEPT_WARPS)
    yield variant(kernels.keep_kernel, "fp32", KEPT | {"residual_ptr": None}, warps=kernels.KEPT_WARPS)
    yield variant(kernels.digits_kernel, "fp32", LONG | {"SHIFT": 0, "BITS": 8})
    yield variant(kernels.choose_kernel, "fp32", {"SHIFT": 26, "BITS": 5}, warps=4)
    yield variant(kernels.count_kernel, "fp32", LONG)
    yield variant(kernels.short_kernel, "fp32", {"TILE": kernels.SHORT}, warps=kernels.SHORT // 512)


def variant(kernel, dtype, constants, warps=kernels.WARPS):
    signature = {
        name: f"*{dtype}" if name == "x_ptr" else POINTERS.get(name, "*i32" if name.endswith("_ptr") else "i32")
        for name in kernel.arg_names
        if name not in constants
    }
    facts = {"dtype": dtype, "tile": constants.get("TILE"), "shift": constants.get("SHIFT")}
    return Variant(
        kernel,
        signature,
        constants,
        aligned=tuple(name for name, kind in signature.items() if kind[0] == "*" or name == "stride"),
        options={"num_warps": warps},
        values=constants.get("TILE", kernels.TILE),
        facts=facts | {"residual": "residual_ptr" in signature},
    )
