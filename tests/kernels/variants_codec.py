"""The kernels of the wire formats, as they are launched for a length and tensors on multiples of sixteen."""

from formats import BLOCKWISE, MINMAX
from variants import DEFAULTS, Variant

from baguakit.compressors import Uniform
from baguakit.kernels.blockwise import gpu as kernels
from baguakit.kernels.blockwise import gpu as launch

POINTERS = {"packed_ptr": "*u8", "sent_ptr": "*u8", "ok_ptr": "*u8"}
POINTERS |= {"residual_ptr": "*fp32", "weights_ptr": "*fp32", "signs_ptr": "*fp32"}
SIZES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp64": 8}
OTHERS = [(each.form, each.block) for each in BLOCKWISE if each.form is not MINMAX]


def variants():
    for block, masked in ((512, False), (512, True), (2048, False), (2048, True)):
        for dtype in SIZES if block == 512 and not masked else ("fp32",):
            yield from of_format(MINMAX, dtype, block, masked, residuals=(False, True))
    for format, block in OTHERS:
        yield from of_format(format, "fp32", block, False, residuals=(True,))
        yield from of_format(format, "bf16", block, False, residuals=(False,))
        yield variant(kernels.reduce_kernel, format, "fp32", block, True, True, {"DRAWN": True})
        yield variant(kernels.reduce_kernel, format, "fp32", block, False, False, {"DRAWN": False})
    plain = Uniform(2, rotate=False)  # loads the residual early, as one bit does, but codes and grid are others
    yield variant(kernels.reduce_kernel, plain.form, "fp32", plain.block, False, True, {"DRAWN": False})

    for block, masked in ((512, False), (512, True), (2048, False)):
        yield variant(kernels.decompress_kernel, MINMAX, "fp32", block, masked, False, {}, told=True)
        yield variant(kernels.reduce_kernel, MINMAX, "fp32", block, masked, True, {"DRAWN": masked}, told=True)
    for dtype in ("fp16", "bf16", "fp64"):
        yield variant(kernels.decompress_kernel, MINMAX, dtype, 512, False, False, {}, told=True)
    for format, block in OTHERS:
        yield variant(kernels.decompress_kernel, format, "fp32", block, False, False, {}, told=True)

    for dtype in ("fp32", "bf16"):  # of several rows whose length is odd
        yield variant(kernels.compress_kernel, MINMAX, dtype, 512, False, True, {"DRAWN": False}, stride=1)
        yield variant(kernels.decompress_kernel, MINMAX, dtype, 512, False, False, {}, stride=1)


def of_format(format, dtype, block, masked, residuals):
    yield variant(kernels.decompress_kernel, format, dtype, block, masked, False, {})
    yield variant(kernels.add_kernel, format, dtype, block, masked, False, {})
    for residual in residuals:
        drawn = {"DRAWN": dtype == "fp16" or (dtype == "bf16" and format is not MINMAX)}
        yield variant(kernels.compress_kernel, format, dtype, block, masked, residual, drawn)
    for residual in residuals if dtype == "fp32" else ():
        yield variant(kernels.reduce_kernel, format, "fp32", block, masked, residual, {"DRAWN": masked})


def variant(kernel, format, dtype, block, masked, residual, drawn, stride=16, told=False):
    size = SIZES[dtype] if kernel is not kernels.reduce_kernel else 4 if residual else 1
    asked = launch.options_of(kernel, format, block, size, masked, stride, drawn.get("DRAWN", False))
    options = {name: asked.pop(name) for name in DEFAULTS if name in asked}
    constants = asked | drawn
    for name, there in (("residual_ptr", residual), ("signs_ptr", format.rotated), ("ok_ptr", told)):
        if not there and name in kernel.arg_names:
            constants[name] = None
    signature = {
        name: POINTERS.get(name, f"*{dtype}") if name.endswith("_ptr") else "i32"
        for name in kernel.arg_names
        if name not in constants
    }
    wide = [name for name, kind in signature.items() if kind[0] == "*" and name not in ("packed_ptr", "ok_ptr")]
    wide += ["stride"] * (stride % 16 == 0)
    return Variant(
        kernel,
        signature,
        constants,
        aligned=tuple(name for name in signature if name in (*wide, "row_bytes", "header_at")),
        options=options,
        values=constants["BLOCK"] * constants["BLOCKS"],
        facts={
            "format": format.name,
            "dtype": dtype,
            "block": block,
            "masked": masked,
            "narrow": constants["NARROW"],
            "residual": residual,
            "told": told,
            "bits": format.bits,
            "header": format.header_bytes,
        },
    )
