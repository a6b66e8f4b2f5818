"""Launch every kernel as its launcher does, on a GPU that is not there, and print a line of JSON for each.

    python launches.py TARGET [once]

Triton binds the arguments to the kernel's own and says which code it needs; that code is made as far as Triton's own
language, where what a version of it does not know is found out, and nothing runs; with `once`, the code of one launch
of each kernel. What fails is a line with an `error`,
and the program then ends with 1. A program of its own, because Triton decides once in a process whether kernels are
interpreted.
"""

import importlib
import itertools
import json
import pkgutil
import sys
from unittest import mock

import torch
from absent_gpu import AbsentGPU
from ahead_of_time import TARGETS
from formats import FORMATS, KEY, NAMES
from triton._C.libtriton import ir
from triton.compiler import ASTSource, make_backend
from triton.runtime import JITFunction, driver
from variants import why

import baguakit.kernels
from baguakit.kernels import mixing_gpu as mixing_triton
from baguakit.kernels import topk
from baguakit.kernels import topk_gpu as topk_triton
from baguakit.kernels.blockwise import gpu as blockwise_launch
from baguakit.kernels.changes import definition as changes
from baguakit.kernels.changes import gpu as changes_launch
from baguakit.kernels.exchange import rows_gpu as rows_launch
from baguakit.kernels.exchange.mean_gpu import mean_
from baguakit.kernels.exchange.tiles_gpu import Memory, Wire
from baguakit.kernels.steps import gpu as steps_launch
from baguakit.kernels.steps import operators as steps_table
from baguakit.kernels.steps.definition import SGD, Adam, Conditions, Lion

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
RULES = (SGD(), SGD(0.9, 0.1, 0.01, nesterov=True), Adam(weight_decay=0.1), Adam(decoupled=True), Lion())
FORMS = (  # p, g, master, key, block of packed gradients
    (torch.float32, torch.float32, False, None, None),
    (torch.float32, torch.bfloat16, False, None, None),
    (torch.float16, torch.float16, True, None, None),
    (torch.bfloat16, torch.bfloat16, True, None, None),
    (torch.bfloat16, torch.bfloat16, False, KEY, None),
    (torch.float32, torch.uint8, False, None, 512),
)
LENGTH = 3 * 4096 + 77  # whole tiles of every kernel, and a rest


class Asked:
    """The code that launches ask for, each once; nothing is launched. `within` says which launch it is."""

    def __init__(self, target):
        self.target, self.within, self.seen = target, "", {}
        driver.set_active(AbsentGPU(target))
        JITFunction._do_compile = lambda kernel, key, *asked: self.note(kernel, key, *asked)

    def note(self, kernel, key, signature, device, constants, options, attrs, warmup):
        # None tells Triton that there is nothing to run.
        self.seen.setdefault((kernel, key), (self.within, options, ASTSource(kernel, signature, constants, attrs)))

    def facts(self, once):
        launched = {kernel: asked for (kernel, _), asked in self.seen.items()} if once else self.seen
        for within, options, source in launched.values():
            kinds = " ".join(str(kind) for kind in source.signature.values() if kind != "constexpr")
            facts = {"kernel": source.name, "launch": within, "signature": kinds}
            try:
                self.translate(options, source)
            except Exception as error:
                facts["error"] = why(error)
            yield facts

    def translate(self, options, source):
        backend, context = make_backend(self.target), ir.context()
        ir.load_dialects(context)
        backend.load_dialects(context)
        functions = backend.get_codegen_implementation(options)
        source.make_ir(self.target, options, functions, backend.get_module_map(), context)


# Each a launch by its name, and what makes it.


def launches():
    yield from stepping()
    yield "norm", lambda: norm(None)
    yield "norm, found_inf", lambda: norm(torch.zeros(()))
    for name, dtype in itertools.product(NAMES, DTYPES[:2]):
        (form, block, _), full = FORMATS[name], dtype == torch.bfloat16  # draws, and keeps what was lost
        described = f"{name}, {dtype}, drawn and residual: {full}"
        yield described, lambda args=(form, dtype, block, full): coding(*args)
    for dtype in DTYPES:
        yield f"land, {dtype}", lambda dtype=dtype: mixing_triton.land_(*values(dtype, 3))
        yield (
            f"land what is good, {dtype}",
            lambda dtype=dtype: mixing_triton.land_(*values(dtype, 3), torch.tensor(True)),
        )
        for others in (1, 9):
            yield f"mix {others}, {dtype}", lambda args=(dtype, others): mixing(*args)
        for chunk, lost in ((64, False), (4096, True)):
            yield f"top k, {dtype}, {chunk=}, {lost=}", lambda args=(dtype, chunk, lost): keeping(*args)
    for (name, wire), dtype, one_hop in itertools.product(wires(), DTYPES[:3], (False, True)):
        yield f"mean of ranks, {name}, {dtype}, {one_hop=}", lambda args=(wire, dtype, one_hop): joint(*args)
    for kind, (name, wire), dtype in itertools.product(ROWS, wires(), DTYPES[:3]):
        yield f"{kind}, {name}, {dtype}", lambda args=(kind, wire, dtype): in_rows(*args)
    for size in changes.WORDS:
        yield f"changes of {size} bytes", lambda size=size: changing(size)


def changing(size):
    x = torch.zeros(5000 * size, dtype=torch.uint8)
    left = {"side_effect": lambda *shape, **options: torch.zeros(*shape, **options) - 1}  # heads, which are not written
    with mock.patch.object(torch, "empty", **left):
        heads, (packed,) = changes_launch.encode(x, x.clone(), size)
    changes_launch.add_(x, size, heads, torch.zeros(len(heads), dtype=torch.int64), packed)


def wires():
    """Yield how values cross between ranks: a name, and a function of their dtype."""
    for name in NAMES:
        form, block, _ = FORMATS[name]
        yield name, lambda dtype, of=(form, block): Wire(*of)
    yield "cast", lambda dtype: Wire(None, dtype=torch.bfloat16)
    yield "exact", lambda dtype: Wire(None, dtype=dtype, exact=True)


def memory(neighbors=False):
    rank, ranks, ctas, half_bytes, limit = 1, 3, 2, 1 << 20, 10**9
    addresses = torch.zeros(ranks, dtype=torch.int64)
    counters, control = (torch.zeros(count, dtype=torch.int32) for count in (ctas, 1 + ranks))
    return Memory(rank, ranks, addresses, counters, control, half_bytes, limit, neighbors)


def joint(wire_of, dtype, one_hop, length=LENGTH):
    [x], [lost], wire = values(dtype, length=length), values(torch.float32, length=length), wire_of(dtype)
    mean_(memory(), wire, x, None if wire.exact else lost, one_hop)


ROWS = ("all-gather", "reduce-scatter", "all-to-all", "neighbours")


def in_rows(kind, wire_of, dtype, length=LENGTH):
    [x], [out], wire = values(dtype, length=3 * length), values(dtype, length=3 * length), wire_of(dtype)
    if kind == "reduce-scatter":
        [lost] = values(torch.float32, length=3 * length)
        rows_launch.reduce_scatter(memory(), wire, x, out[:length], None if wire.exact else lost, average=True)
    elif kind == "neighbours" and wire.exact:
        there, here, weights = [length, 0, 0], [length] * 3, [0.25, 0.5, 0.25, 1.0, 1.0, 1.0]
        rows_launch.neighbor_mean_(memory(neighbors=True), wire, x[:length], there, here, weights)
    elif kind == "all-gather":
        rows_launch.all_gather(memory(), None if wire.exact else wire, x[:length], out)
    elif kind == "all-to-all":
        rows_launch.all_to_all(memory(), None if wire.exact else wire, x, out, *[[length, length, length]] * 2)


def values(dtype, count=1, length=LENGTH):
    return [torch.zeros(length, dtype=dtype) for _ in range(count)]


def stepping():
    held = {name: torch.ones(()) for name in ("lr", "taken", "grad_scale", "clip", "found_inf")}
    for rule, form in itertools.product(RULES, FORMS):
        yield f"{rule}, {form}", lambda args=(rule, *form, {"lr": 0.1}): step(*args)
    for rule, names in itertools.product(RULES, (["found_inf"], held)):
        conditions = {"lr": 0.1} | {name: held[name] for name in names}
        yield f"{rule}, on the device: {[*names]}", lambda args=(rule, *FORMS[0], conditions): step(*args)


def step(rule, p, g, mastered, key, block, conditions):
    columns = {"p": values(p), "g": values(g, length=2 * LENGTH if block else LENGTH)}
    columns |= {name: values(torch.float32) for name in "uv"[: rule.states]}
    columns |= {"master": values(torch.float32)} if mastered else {}
    plan = steps_table.tables_of(columns)
    steps_launch.step_(rule, plan, Conditions(**({"taken": 3} | conditions), key=key), block)


def norm(found):
    grads = [*values(torch.float32), *values(torch.bfloat16)]
    steps_launch.gradient_norm_(torch.zeros(()), steps_table.tables_of({"g": grads}), found)


def coding(format, dtype, block, full):
    x, key = torch.zeros(2, LENGTH, dtype=dtype), KEY if full else None
    packed = blockwise_launch.compress(format, x, block, torch.zeros(2, LENGTH) if full else None, key)
    ok = torch.ones((), dtype=torch.bool) if full else None
    blockwise_launch.decompress_(format, x, packed, block, ok)
    blockwise_launch.add_(format, x[0], packed, torch.ones(2), block)
    blockwise_launch.reduce(format, packed, LENGTH, block, torch.zeros(LENGTH) if full else None, key, ok)


def mixing(dtype, others):
    x, *ys = values(dtype, others + 1)
    mixing_triton.mix_(x, ys, [0.5] * (others + 1))


def keeping(dtype, chunk, lost):
    x = torch.zeros(1 + lost, 9999, dtype=dtype)
    places, kept = topk_triton.select(x, chunk, 7, 3, torch.zeros(x.shape) if lost else None)
    sizes = topk.values_at(places.shape[1], chunk), 4 * places.shape[1]
    for values, size in ((kept, sum(sizes)), (None, sizes[0])):
        packed = torch.zeros(len(x), size, dtype=torch.uint8)
        ok = torch.tensor(True) if lost else None
        topk_triton.join_(packed, places, values, chunk, ok)
        beside, weights = None if values is kept else kept, None if lost else x[:, 0].float()
        topk_triton.add_(x[0], packed, beside, weights, chunk, 7, 3, ok)


def kernels():
    """The names of all kernels there are."""
    names = [module.name for module in pkgutil.walk_packages(baguakit.kernels.__path__, "baguakit.kernels.")]
    modules = [importlib.import_module(name) for name in names]
    return {x.__name__ for module in modules for x in vars(module).values() if isinstance(x, JITFunction)}


if __name__ == "__main__":
    asked = Asked(TARGETS[sys.argv[1]])
    failed = []
    for described, launch in launches():
        asked.within = described
        try:
            launch()
        except Exception as error:
            failed.append({"launch": described, "error": why(error)})
    facts = [*asked.facts(once="once" in sys.argv[2:]), *failed]
    missing = {name for name in kernels() if name.endswith("_kernel")} - {each.get("kernel") for each in facts}
    facts += [{"kernel": name, "error": "no launcher was seen to launch it"} for name in sorted(missing)]
    for each in facts:
        print(json.dumps(each), flush=True)
    sys.exit(any("error" in each for each in facts))
