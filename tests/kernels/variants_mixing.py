"""The kernels of mixing and landing, as they are launched for tensors on multiples of sixteen bytes."""

from variants import Variant

from baguakit.kernels import mixing_gpu as kernels

DTYPES = ("fp32", "bf16", "fp16", "fp64")


def variants():
    for dtype in DTYPES:
        yield from (landing(dtype, False, told) for told in (False, True))
        yield mixing(dtype, dtype, dtype, 2, False)
    for count in (1, 8):
        yield mixing("fp32", "fp32", "fp32", count, False)
    for sums in (("fp32", "bf16"), ("bf16", "fp32")):  # more than eight halves: the sum begins and goes on in fp32
        yield mixing("bf16", *sums, 8, False)
    yield landing("fp64", True, False)
    yield landing("fp32", True, True)
    yield mixing("fp64", "fp64", "fp64", 8, True)


def landing(dtype, masked, told):
    pointers = {name: f"*{dtype}" for name in kernels.land_kernel.arg_names if name.endswith("_ptr")}
    pointers["good_ptr"] = "*u8" if told else None
    return variant(kernels.land_kernel, pointers, {}, masked, {"dtype": dtype, "told": told})


def mixing(dtype, out, begun, count, masked):
    pointers = {"out_ptr": f"*{out}", "x_ptr": f"*{begun}"}
    pointers |= {f"y{k}_ptr": f"*{dtype}" if k <= count else None for k in range(1, 9)}
    weights = {f"w{k}": "fp64" for k in range(9)}
    facts = {"dtype": dtype, "out": out, "begun": begun, "count": count}
    return variant(kernels.mix_kernel, pointers | weights, {"SCALED": begun == dtype}, masked, facts)


def variant(kernel, arguments, constants, masked, facts):
    constants |= {"MASKED": masked, "TILE": kernels.TILE} | {n: None for n, kind in arguments.items() if kind is None}
    signature = {name: kind for name, kind in arguments.items() if kind} | {"n": "i32", "first": "i32"}
    return Variant(
        kernel,
        signature,
        constants,
        aligned=tuple(name for name, kind in signature.items() if kind[0] == "*" and name != "good_ptr"),
        options={"num_warps": kernels.WARPS, "enable_fp_fusion": False},
        values=kernels.TILE,
        facts=facts | {"masked": masked},
    )
