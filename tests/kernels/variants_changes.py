"""The kernels of values that have changed, as they are launched for tensors on multiples of sixteen bytes."""

from variants import Variant

from baguakit.kernels.changes import definition as changes
from baguakit.kernels.changes import gpu as kernels

POINTERS = {
    "heads_ptr": "*i32", "starts_ptr": "*i64", "lengths_ptr": "*i64", "left_ptr": "*i64", "slots_ptr": "*u8",
    "words_ptr": "*i32", "packed_ptr": "*u8",
}  # fmt: skip


def variants():
    for size in changes.WORDS:
        for kernel in (kernels.few_kernel, kernels.many_kernel):
            yield from (variant(kernel, size, MASKED=masked) for masked in (False, True))
        yield variant(kernels.gather_kernel, size)
        yield variant(kernels.apply_kernel, size)


def variant(kernel, size, **constants):
    constants["SIZE"] = size
    words = dict.fromkeys(("new_ptr", "old_ptr", "x_ptr"), f"*i{8 * size}")
    types = POINTERS | words | {"n": "i32", "first": "i32"}
    signature = {name: types[name] for name in kernel.arg_names if name not in constants}
    anywhere = {kernels.apply_kernel: {"packed_ptr"}, kernels.gather_kernel: {"slots_ptr"}}.get(kernel, set())
    aligned = tuple(name for name in signature if name.endswith("_ptr") and name not in anywhere)
    warps = {"few_kernel": 4, "many_kernel": 8, "gather_kernel": 2, "apply_kernel": 4}[kernel.__name__]
    facts = {"size": size, "masked": constants.get("MASKED", True)}
    return Variant(
        kernel,
        signature,
        constants,
        aligned,
        {"num_warps": warps},
        changes.BLOCK,
        facts,
    )
