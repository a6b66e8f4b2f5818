"""The kernels of optimizer steps, as they are launched."""

import torch
from variants import Variant

from baguakit.kernels.steps import gpu as kernels
from baguakit.kernels.steps.operators import SUM_TILE, TILE

SIZES = {"fp32": 4, "bf16": 2, "fp16": 2, "u8": 1}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "u8": torch.uint8}
RULES = {  # rule: (DECAY, NESTEROV, STATES)
    "SGD": (1, False, 0),
    "SGD with momentum": (1, True, 1),
    "Adam": (1, False, 2),
    "AdamW": (2, False, 2),
    "Lion": (1, False, 1),
}
FORMS = (  # p, g, master, drawn, block of packed gradients
    ("fp32", "fp32", False, False, None),
    ("bf16", "bf16", True, False, None),
    ("bf16", "bf16", False, True, None),
    ("fp16", "fp16", True, False, None),
    ("fp32", "bf16", False, False, None),
)
PACKED = (("fp32", "u8", False, False, 512), ("fp32", "u8", False, False, 2048), ("bf16", "u8", True, False, 512))


def variants():
    for rule in RULES:
        yield step(rule, FORMS[0], rule == "Adam")
    for form in FORMS[1:]:
        yield step("AdamW", form, True)
    for form in PACKED:
        yield step("AdamW", form, False)
    for rule in ("SGD", "Adam", "Lion"):
        yield numbers(rule, rule == "Adam")
    yield partials("fp32")
    yield partials("bf16")
    yield norm()


def step(rule, form, held):
    """`held`: the numbers lie on the device."""
    p, g, master, drawn, block = form
    decay, nesterov, states = RULES[rule]
    signature = {f"n{i}": "fp32" for i in range(7)} | {"tiles_ptr": "*i64", "records_ptr": "*i64", "factor": "fp32"}
    signature |= {"numbers_ptr": "*fp32", "seed": "i32", "seed_high": "i32"}
    constants = {"DECAY": decay, "NESTEROV": nesterov, "STATES": states, "MASTER": master, "DRAWN": drawn}
    constants |= {"P": kernels.TYPES[DTYPES[p]], "G": kernels.TYPES[DTYPES[g]], "BLOCK": block}
    constants |= {"RULE": rule.split()[0].removesuffix("W"), "TILE": TILE}
    if not held:
        constants["numbers_ptr"] = None
    return Variant(
        kernels.step_kernel,
        {name: kind for name, kind in signature.items() if name not in constants},
        constants,
        aligned=("tiles_ptr", "records_ptr", "numbers_ptr"),
        options={"num_warps": kernels.WARPS, "enable_fp_fusion": False},
        values=constants["TILE"],
        facts={
            "rule": rule, "p": p, "g": g, "master": master, "drawn": drawn, "block": block, "held": held,
            "read": (4 if master else SIZES[p]) + SIZES[g] + 4 * states,
            "written": SIZES[p] + 4 * states + 4 * master,
        },
    )  # fmt: skip


def numbers(rule, held):
    """`held`: everything that may lie on the device does."""
    pointers = {
        "lr_ptr": "*fp32",
        "taken_ptr": "*fp32",
        "scale_ptr": "*fp32",
        "clip_ptr": "*fp32",
        "found_ptr": "*fp32",
    }
    signature = dict.fromkeys(("lr", "scale", "clip", "o0", "o1", "o2", "o3"), "fp64") | {"taken": "i64"}
    signature |= {"numbers_ptr": "*fp32", "seed": "i32", "seed_high": "i32", **pointers}
    absent = {} if held else {name: None for name in pointers if name != "taken_ptr"}
    constants = {"RULE": rule, "DECAY": 2 if rule == "Adam" else 1} | absent
    return Variant(
        kernels.numbers_kernel,
        {name: kind for name, kind in signature.items() if name not in constants},
        constants,
        aligned=("numbers_ptr",),
        options={"num_warps": 1, "enable_fp_fusion": False},
        values=64,  # one for each thread of the widest warp: there are none
        facts={"rule": rule, "held": held},
    )


def partials(dtype):
    return Variant(
        kernels.partials_kernel,
        {"partials_ptr": "*fp64", "tiles_ptr": "*i64", "records_ptr": "*i64"},
        {"G": kernels.TYPES[DTYPES[dtype]], "TILE": SUM_TILE, "TURN": kernels.TURN},
        aligned=("partials_ptr", "tiles_ptr", "records_ptr"),
        options={"num_warps": 4, "enable_fp_fusion": False},
        values=kernels.TURN,
        facts={"g": dtype, "read": SIZES[dtype]},
    )


def norm():
    return Variant(
        kernels.norm_kernel,
        {"norm_ptr": "*fp32", "found_ptr": "*fp32", "partials_ptr": "*fp64", "count": "i32"},
        {"TURN": 4 * kernels.TURN},
        aligned=("partials_ptr",),
        options={"num_warps": 8, "enable_fp_fusion": False},
        values=4 * kernels.TURN,
    )
