"""Translate units to C++ with Inductor, which takes seconds. Nothing else in the wire formats needs Dynamo.

Inductor writes kernels in C++, and Python code that allocates temporaries and calls the kernels. This file keeps the
text of the kernels. It runs the Python code twice, with different numbers of rows, and with kernels that only record
their operands. From the records it writes the calls in C++, so that a library needs neither Python nor torch.
"""

import contextlib
import logging
import threading
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.fx
from torch import Tensor

PIECE = 1 << 14  # values, about, whose temporaries stay in a core's cache
ROWS = 1 << 12  # of the example that is traced: enough for Inductor to divide the work among threads
FEW, MANY = 37, 54  # rows for which operands are noted; whatever number differs grows in proportion

# Only marked dimensions are dynamic, whatever shapes Dynamo has seen before.
DYNAMO_SETTINGS = {"assume_static_by_default": True, "automatic_dynamic_shapes": False, "suppress_errors": False}
INDUCTOR_SETTINGS = {
    "cpp.dynamic_threads": True,  # as many threads as torch.set_num_threads says when it runs, not when it was compiled
    "cpp.enable_floating_point_contract_flag": "off",
    "cpp.enable_unsafe_math_opt_flag": False,
    "cpp_wrapper": False,
    "compile_threads": 1,  # a few small functions are not worth a pool of processes
    "realize_reads_threshold": 64,  # else rows summed in one pass go through a temporary as large as their sum
    "realize_acc_reads_threshold": 64,
    "realize_opcount_threshold": 256,
    "force_disable_caches": True,  # what comes from a cache does not come as text
    "cpp_cache_precompile_headers": False,  # they are read once
}

_log = logging.getLogger("baguakit")

Unit = Callable[..., object]
Call = tuple[Unit, tuple[Any, ...]]  # a unit, and arguments like those that it is compiled for
Noted = list[tuple["Kernel", list[tuple[str, int]]]]  # operands: the place in C++ that they count from, and how far

_piecewise: set[Unit] = set()


def piecewise(unit: Unit) -> Unit:
    """Mark a unit whose rows are independent. It runs on a few rows at a time, so that temporaries fit in caches."""
    _piecewise.add(unit)
    return unit


@dataclass
class Kernel:
    """The text of a C++ kernel. A call does not run the kernel: it only records the operands."""

    name: str
    types: list[str]  # of the operands
    source: str
    calls: list[tuple["Kernel", tuple[Any, ...]]]  # of all kernels of a unit

    def __call__(self, *operands: Any) -> None:
        self.calls.append((self, operands))


def examples(like: tuple[Any, ...], rows: int) -> list[Any]:
    """Return random arguments like `like`, but with `rows` rows: floats of many magnitudes, with one row of zeros."""
    # A separate generator leaves the user's random numbers unchanged.
    source = torch.Generator().manual_seed(rows)

    def example(part: Any) -> Any:
        if not isinstance(part, Tensor):
            return part
        shape = (rows, *part.shape[1:]) if part.dim() == 2 else part.shape
        values = torch.randint(0, 256, shape, generator=source, device="cpu")
        if part.dtype.is_floating_point:
            scale = torch.randint(-40, 40, (*shape[:-1], 1), generator=source, device="cpu")
            values = torch.randn(shape, generator=source, dtype=torch.float32, device="cpu") * 2.0**scale
            values[0] = 0
        return values.to(part.dtype)

    return [example(part) for part in like]


def write(calls: list[Call]) -> str:
    """Return C++ source with a function `unit_0`, `unit_1` … for each pair (unit, example arguments) of `calls`.

    A function takes the addresses of the unit's tensors and the number of rows. It returns 0 if memory sufficed.
    A unit that cannot be translated is left out, with a warning in the log.
    """
    lines = ["#include <memory>", "#include <cstdint>"]
    for i, (unit, like) in enumerate(calls):
        try:
            lines += _function(f"unit_{i}", unit, like).splitlines()
        except Exception as error:  # the others need not do without it
            _log.warning("%s: %s: %s", unit.__name__, type(error).__name__, " ".join(str(error).split())[:300])
    return "\n".join(sorted(lines, key=lambda line: not line.startswith("#include")))


def build(source: str, folder: str) -> Path:
    """Compile C++ source to a shared library in `folder`, with Inductor's flags for this machine; return its path."""
    from torch._inductor.cpp_builder import CppBuilder, CppTorchDeviceOptions
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    written = Path(folder, "units.cpp")
    written.write_text(source)
    with torch._inductor.config.patch(INDUCTOR_SETTINGS):
        options = CppTorchDeviceOptions(vec_isa=pick_vec_isa(), device_type="cpu", include_pytorch=False)
        builder = CppBuilder(name="units", sources=str(written), output_dir=folder, BuildOption=options)
        builder.build()
    return Path(builder.get_target_file_path())


def _function(name: str, unit: Unit, like: tuple[Any, ...]) -> str:
    with _kernels(name) as kernels:
        run = _trace(unit, examples(like, ROWS))
    tensors = {f"a{i}": part for i, part in enumerate(like) if isinstance(part, Tensor)}
    strides = {a: part[0].nbytes if part.dim() == 2 else 0 for a, part in tensors.items()}
    few, many = (_noted(run, kernels[0].calls, examples(like, rows)) for rows in (FEW, MANY))
    # A piece has an odd multiple of 16 rows, because columns of 2ᵏ rows would all map to a few lines of the cache.
    piece = max(PIECE // like[0].shape[1] - 16, 16) if unit in _piecewise and few[1] else "all"
    begins = "\n            ".join(f"char *{a} = all_{a} + begin * {stride};" for a, stride in strides.items())
    calls = "\n            ".join(_statements(few, many))
    written = "\n".join(f"#define kernel {each.name}\n{each.source}\n#undef kernel" for each in kernels)
    return f"""{written}
extern "C" int {name}({", ".join(f"char *all_{a}" for a in tensors)}, int64_t all)
{{
    const int64_t piece = {piece};
    int failed = 0;
    #pragma omp parallel for if (all > piece)
    for (int64_t begin = 0; begin < all; begin += piece) {{
        const int64_t rows = begin + piece < all ? piece : all - begin;
        try {{
            {begins}
            {calls}
        }} catch (...) {{
            #pragma omp atomic write
            failed = 1;
        }}
    }}
    return failed;
}}
"""


@contextlib.contextmanager
def _kernels(name: str) -> Iterator[list[Kernel]]:
    """Yield the list of kernels that Inductor writes in this thread for unit `name`. They are not compiled."""
    from torch._inductor.async_compile import AsyncCompile

    found, calls = list[Kernel](), list[Any]()
    before, here = AsyncCompile.cpp_pybinding, threading.get_ident()

    def take(self: AsyncCompile, argtypes: list[str], source_code: str) -> Any:
        if threading.get_ident() != here:  # the user's own
            return before(self, argtypes, source_code)
        found.append(Kernel(f"{name}_kernel_{len(found)}", argtypes, source_code, calls))
        return found[-1]

    AsyncCompile.cpp_pybinding = take  # type: ignore[method-assign]
    try:
        yield found
    finally:
        AsyncCompile.cpp_pybinding = before  # type: ignore[method-assign]


def _trace(unit: Unit, arguments: list[Any]) -> Unit:
    """Return the Python function that Inductor writes for a unit."""
    taken: list[tuple[Unit, list[int | None]]] = []

    def take(graph: torch.fx.GraphModule, inputs: list[Any]) -> Unit:
        with torch._inductor.config.patch(INDUCTOR_SETTINGS):
            made = torch._dynamo.lookup_backend("inductor")(graph, inputs)
        taken.append((made, [next((i for i, a in enumerate(arguments) if a is given), None) for given in inputs]))
        return made

    for argument in arguments:
        if isinstance(argument, Tensor) and argument.dim() == 2:
            torch._dynamo.mark_dynamic(argument, 0)
    # Dynamo limits the number of its records per code object. With a copy of the object, each width has its own limit.
    copy = types.FunctionType(unit.__code__.replace(), unit.__globals__, unit.__name__)
    with torch._dynamo.config.patch(DYNAMO_SETTINGS):
        torch.compile(copy, backend=take, fullgraph=True)(*arguments)
    if not taken:
        raise RuntimeError("torch.compile is disabled")
    made, order = taken[0]

    def run(*arguments: Any) -> None:
        # The only input that is not an argument is the number of rows, the only dynamic size.
        made(*[arguments[0].shape[0] if i is None else arguments[i] for i in order])

    return run


def _noted(run: Unit, calls: list[tuple[Kernel, tuple[Any, ...]]], arguments: list[Any]) -> tuple[Noted, list[int]]:
    """Run Inductor's Python once; return the kernel calls, recorded in `calls`, and the size of each temporary."""
    calls.clear()
    run(*arguments)
    begins = {part.data_ptr(): f"a{i}" for i, part in enumerate(arguments) if isinstance(part, Tensor)}
    sizes: list[int] = []

    def place(operand: Any) -> tuple[str, int]:
        if not isinstance(operand, Tensor):
            return "", int(operand)
        memory = operand.untyped_storage()
        if memory.data_ptr() not in begins:
            begins[memory.data_ptr()] = f"t{len(sizes)}.get()"
            sizes.append(memory.nbytes())
        return begins[memory.data_ptr()], operand.data_ptr() - memory.data_ptr()

    return [(kernel, [*map(place, operands)]) for kernel, operands in calls], sizes


def _statements(few: tuple[Noted, list[int]], many: tuple[Noted, list[int]]) -> Iterator[str]:
    """Yield C++ statements for any number of rows, from the calls of two runs with different numbers of rows."""
    for i, sizes in enumerate(zip(few[1], many[1], strict=True)):
        yield f"std::unique_ptr<char[]> t{i}(new char[{_in_rows(*sizes)}]);"
    for (kernel, operands), (same, others) in zip(few[0], many[0], strict=True):
        given = []
        for type, (place, number), (its, other) in zip(kernel.types, operands, others, strict=True):
            if kernel is not same or place != its:
                raise RuntimeError(f"what {kernel.name} is called with depends on the number of rows")
            given.append(f"({type})({place or 0} + {_in_rows(number, other)})")
        yield f"{kernel.name}({', '.join(given)});"


def _in_rows(few: int, many: int) -> str:
    """Return a C++ expression, linear in `rows`, that gives `few` for FEW rows and `many` for MANY rows."""
    each, odd = divmod(many - few, MANY - FEW)
    if odd:
        raise RuntimeError(f"{few} for {FEW} rows and {many} for {MANY} are not in proportion")
    return f"rows * {each} + {few - each * FEW}"
