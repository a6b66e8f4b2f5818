"""Compile a family of kernels for targets that need not be here, and print what its code does: a line of JSON each.

    python ahead_of_time.py FAMILY TARGET…

`variants_FAMILY.py` beside this file lists what is compiled; `variants.py` says what is printed. A variant that does
not compile is a line with an `error`, and the program then ends with 1. A program of its own, because Triton decides
once in a process whether kernels are interpreted.
"""

import importlib
import json
import linecache
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from variants import why

import baguakit
from baguakit.kernels.blockwise import uniform_gpu

ROOT = os.path.dirname(os.path.dirname(baguakit.__file__))
TARGETS = {
    "cuda:80": GPUTarget("cuda", 80, 32),
    "cuda:90": GPUTarget("cuda", 90, 32),
    "cuda:100": GPUTarget("cuda", 100, 32),
    "hip:gfx942": GPUTarget("hip", "gfx942", 64),
}


def compile_for(target, variant):
    """Compile a variant. A kernel knows by the build of torch that it is not for CUDA; here that build is missing."""
    uniform_gpu.PORTABLE = triton.language.constexpr(target.backend != "cuda")
    places = {name: i for i, name in enumerate(variant.kernel.arg_names)}
    types = {name: "constexpr" if name in variant.constants else variant.signature[name] for name in places}
    source = ASTSource(
        variant.kernel,
        signature=types,
        constexprs={(places[name],): value for name, value in variant.constants.items()},
        attrs={(places[name],): [["tt.divisibility", 16]] for name in variant.aligned if name not in variant.constants},
    )
    return triton.compile(source, target=target, options=dict(variant.options))


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
        "unasked": unasked(text),
        "flushing": sorted(set(re.findall(r"\b[\w.]*\.ftz[\w.]*", text)) - {"cvt.rmi.ftz.f32.f32"}),
        "spilled": [int(n) for n in re.findall(r"(?:STACK|LOCAL):(\d+)", usage)],
        "registers": int(re.findall(r"REG:(\d+)", usage)[-1]),
        "shared": binary.metadata.shared,
        "warps": binary.metadata.num_warps,
    }


def unasked(text):
    """Return how many products are fused with a sum at lines of source that do not call `tl.fma`."""
    files, line, count = dict(re.findall(r'\.file\s+(\d+)\s+"([^"]+)"', text)), "", 0
    # Triton keeps what it has compiled from the same source in another folder, with that folder's paths.
    files = {number: os.path.join(ROOT, path[path.rfind("/baguakit/") + 1 :]) for number, path in files.items()}
    for each in text.splitlines():
        if at := re.search(r"\.loc\s+(\d+)\s+(\d+)", each):
            line = linecache.getline(files[at[1]], int(at[2]))
        count += bool(re.search(r"\bfma\.", each)) and "tl.fma(" not in line
    return count


def _bytes(name):
    vector = re.search(r"\.v(\d)", name)
    return int(re.search(r"\d+$", name)[0]) // 8 * (int(vector[1]) if vector else 1)


def hip_facts(binary, values):
    text = binary.asm["amdgcn"]
    accesses = Counter(re.findall(r"\b((?:global|buffer)_(?:load|store)_\w+)", text))
    # Spilled scalars go to lanes of vector registers, and these to scratch memory.
    spilled = [int(n) for n in re.findall(r"vgpr_spill_count: *(\d+)", text)] + [len(re.findall(r"\bscratch_", text))]
    return {"accesses": accesses, "spilled": spilled}


def facts_of(name, variant):
    """Return the facts to print about a variant."""
    target = TARGETS[name]
    described = {"target": name, "kernel": variant.kernel.__name__, **variant.facts}
    try:
        binary = compile_for(target, variant)
    except Exception as error:  # Triton raises many kinds, its own and those of the tools that it runs
        return described | {"error": why(error)}
    values = variant.values // (binary.metadata.num_warps * target.warp_size)
    found = (cuda_facts if name.startswith("cuda") else hip_facts)(binary, values)
    return described | {"values": values} | found


if __name__ == "__main__":
    family, *targets = sys.argv[1:]
    failed = False
    for name in targets:
        for variant in importlib.import_module(f"variants_{family}").variants():
            facts = facts_of(name, variant)
            failed = failed or "error" in facts
            print(json.dumps(facts), flush=True)
    sys.exit(failed)
