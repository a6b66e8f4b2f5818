"""Compile every kernel for a target that need not be here, and print what its code does as JSON: one line a variant.

A program of its own, because Triton decides once in a process whether kernels are interpreted.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from baguakit.kernels import minmax_uint8_triton as kernels

TARGETS = {
    "cuda:80": GPUTarget("cuda", 80, 32),
    "cuda:90": GPUTarget("cuda", 90, 32),
    "cuda:100": GPUTarget("cuda", 100, 32),
    "hip:gfx942": GPUTarget("hip", "gfx942", 64),
}
POINTERS = {"packed_ptr": "*u8", "sent_ptr": "*u8", "residual_ptr": "*fp32", "weights_ptr": "*fp32"}
SIZES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp64": 8}


def variants():
    for block, masked in ((512, False), (512, True), (2048, False), (2048, True)):
        for dtype in SIZES if block == 512 and not masked else ("fp32",):
            yield kernels.decompress_kernel, dtype, block, masked, False, {}
            yield kernels.add_kernel, dtype, block, masked, False, {}
            for residual in (False, True):
                yield kernels.compress_kernel, dtype, block, masked, residual, {"DRAWN": dtype == "fp16"}
        for residual in (False, True):
            yield kernels.reduce_kernel, "fp32", block, masked, residual, {"DRAWN": masked}


def compile_for(target, kernel, dtype, block, masked, residual, constants):
    """As the launcher would, for a length and tensors on multiples of sixteen."""
    tile = max(block, kernels.TILES[kernel])
    width = 16 // SIZES[dtype] if kernel is not kernels.reduce_kernel or residual else 16
    constants = constants | {"BLOCK": block, "BLOCKS": tile // block, "MASKED": masked, "WIDTH": width}
    if not residual:
        constants["residual_ptr"] = None
    signature, attributes = {}, {}
    for i, name in enumerate(kernel.arg_names):
        pointer = POINTERS.get(name, f"*{dtype}") if name.endswith("_ptr") else None
        signature[name] = "constexpr" if name in constants else pointer or "i32"
        aligned = pointer not in (None, "*u8") or name in ("stride", "row_bytes", "header_at")
        if aligned and name not in constants:
            attributes[(i,)] = [["tt.divisibility", 16]]
    constants = {(kernel.arg_names.index(name),): value for name, value in constants.items() if name in signature}
    source = ASTSource(kernel, signature=signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": tile // 1024, "enable_fp_fusion": False}
    return triton.compile(source, target=target, options=options), tile // (tile // 1024 * target.warp_size)


def cuda_facts(binary, values):
    text = binary.asm["ptx"]
    tools = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        usage = subprocess.run([tools, "-res-usage", file.name], capture_output=True, text=True).stdout
    accesses = Counter(re.findall(r"\b((?:ld|st)\.global[\w.]*?\.[bu]\d+)\b", text))
    moved = {
        kind: sum(count * _bytes(name) for name, count in accesses.items() if name.startswith(kind))
        for kind in ("ld", "st")
    }
    return {
        "accesses": accesses,
        "moved": {kind: total / values for kind, total in moved.items()},
        "fused": len(re.findall(r"\bfma\.", text)),
        "flushing": sorted(set(re.findall(r"\b[\w.]*\.ftz[\w.]*", text)) - {"cvt.rmi.ftz.f32.f32"}),
        "spilled": [int(n) for n in re.findall(r"(?:STACK|LOCAL):(\d+)", usage)],
        "registers": int(re.findall(r"REG:(\d+)", usage)[-1]),
        "shared": binary.metadata.shared,
    }


def _bytes(name):
    vector = re.search(r"\.v(\d)", name)
    return int(re.search(r"\d+$", name)[0]) // 8 * (int(vector[1]) if vector else 1)


def hip_facts(binary, values):
    text = binary.asm["amdgcn"]
    accesses = Counter(re.findall(r"\b((?:global|buffer)_(?:load|store)_\w+)", text))
    spilled = [int(n) for n in re.findall(r"_spill_count: *(\d+)", text)] + [len(re.findall(r"\bscratch_", text))]
    return {"accesses": accesses, "spilled": spilled}


if __name__ == "__main__":
    for name in sys.argv[1:]:
        for kernel, dtype, block, masked, residual, constants in variants():
            binary, values = compile_for(TARGETS[name], kernel, dtype, block, masked, residual, constants)
            facts = (cuda_facts if name.startswith("cuda") else hip_facts)(binary, values)
            described = {"target": name, "kernel": kernel.__name__, "dtype": dtype, "block": block, "masked": masked}
            print(json.dumps(described | {"residual": residual, "values": values} | facts), flush=True)
