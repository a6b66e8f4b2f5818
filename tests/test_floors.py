"""The architecture: which room may know which. Read from the source, so that nothing has to work for it to hold."""

import ast
import functools
import graphlib
import importlib
import subprocess
import sys
from itertools import accumulate
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "baguakit"
FILES = sorted(PACKAGE.rglob("*.py"))

FLOORS = [
    {"annotations", "compiling", "tensors"},
    {"hashing"},
    {"arguments"},
    {"kernels", "expressions"},
    {"compressors", "topology", "comm", "lanes", "buckets"},
    {"optim", "costs"},  # optim steps the tensors of one rank: it knows no group
    {"primitives", "keeping", "schedules"},
    {"windows"},
    {"stages"},
    {"rules"},
    {"monitor"},
    {"runtime"},
    {"flights"},
    {"report"},
    {"algorithms", "attach"},
    {"interop", "elastic", "backend"},
]
LEVEL = {room: level for level, rooms in enumerate(FLOORS) for room in rooms}
# Beside the floors: a wing may use them up to the algorithms, and no floor may use a wing.
WINGS = {"data", "net", "pictures", "ranks", "sync", "tune"}
# Above all of them: comparisons, the store, checks, the command, and the module that `python -m baguakit` runs.
TOP = ({"compare", "store", "testing"}, {"command"}, {"__main__"})
TOPMOST = {room: level for level, rooms in enumerate(TOP) for room in rooms}
# Who may speak to torch.distributed: the door; what gives it hooks; and what makes processes that have a group.
DISTRIBUTED = {
    "comm",
    "monitor",
    "runtime",
    "flights",
    "attach",
    "interop",
    "backend",
    "ranks",
    "command",
    "compare",
    "elastic",
    "store",
    "testing",
}
ROOF = "__init__"
# Rooms that others know by their `__init__` only.
FACED = {"monitor", "flights", "report", "attach"}
# (from, to): why this import is an exception.
NOTED = {
    ("comm", "lanes"): "each flow of a divided message is waited for on a lane of its own",
    ("tune", "pictures"): "a simulation draws itself",
    ("tune", "ranks"): "a simulation trains on live ranks, if losses are asked for",
    ("__init__", "testing"): "bk.testing is imported at its first use",
}


def room(path):
    """The room of a file: baguakit/buckets.py is buckets, baguakit/kernels/steps/gpu.py is kernels."""
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


@functools.cache
def tree(path):
    """Return the nodes of a file, of which the first is the module."""
    return [*ast.walk(ast.parse(path.read_text(), path.name))]


@pytest.fixture(scope="module", autouse=True)
def forgotten():
    """The nodes of all files are read once, and kept no longer than the tests of this one."""
    yield
    tree.cache_clear()


@functools.cache
def imported(path):
    """Return (line, full name) of every module or name that a file imports, at its top or inside a function."""
    return [*imports_of(path)]


def imports_of(path):
    package = ("baguakit", *path.relative_to(PACKAGE).parts[:-1])
    for node in tree(path):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*above, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def rooms_used(path):
    """Yield (line, room) for what a file imports from the package; the package itself counts as the roof."""
    for line, name in imported(path):
        parts = name.split(".")
        if parts[0] == "baguakit":
            yield line, parts[1] if len(parts) > 1 and parts[1] in LEVEL.keys() | WINGS | TOPMOST.keys() else ROOF


def may_use(user, used):
    if user == used or (user, used) in NOTED:
        return True
    if used in TOPMOST:
        return TOPMOST.get(user, -1) > TOPMOST[used]
    if user == ROOF:
        return True
    if used == ROOF:
        return False
    if user in TOPMOST:
        return True
    if used in FACED | {"runtime"} and user in WINGS | {"algorithms"}:
        return False
    if user in WINGS:
        return used in LEVEL and used != "interop"
    return used in LEVEL and LEVEL[used] < LEVEL[user]


def module(path):
    """The name of a file's module."""
    return ".".join(("baguakit", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")


def cycle_in(imports):
    """The modules of a cycle, in order, from the names that each module imports: modules, or what is in them."""
    graph = {}
    for user, names in imports.items():
        parents = (list(accumulate(name.split("."), "{}.{}".format)) for name in names)
        used = [next((each for each in reversed(above) if each in imports), user) for above in parents]
        graph[user] = set(used) - {user}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


def mentions(path, name):
    """Lines that import the module `name`, or reach it as an attribute."""
    lines = [line for line, full in imported(path) if full == name or full.startswith(f"{name}.")]
    for node in tree(path):
        if isinstance(node, ast.Attribute) and name.endswith(f".{node.attr}") and ast.unparse(node) == name:
            lines.append(node.lineno)
    return sorted(lines)


def where(path, line):
    return f"{path.relative_to(ROOT)}:{line}"


def test_every_room_has_a_floor():
    assert {room(path) for path in FILES} <= LEVEL.keys() | WINGS | TOPMOST.keys() | {ROOF}


def test_imports_point_only_downwards():
    wrong = [
        f"{where(path, line)}: {room(path)} uses {used}"
        for path in FILES
        for line, used in rooms_used(path)
        if not may_use(room(path), used)
    ]
    assert not wrong


def reaches_past(path, name):
    """Return whether a file imports a name of another room, with a face, from a module behind it."""
    _, *parts = name.split(".")
    return len(parts) > 2 and parts[0] in FACED and parts[0] != room(path)


def test_rooms_with_a_face_are_known_by_it():
    wrong = [
        f"{where(path, line)}: {name}"
        for path in FILES
        for line, name in imported(path)
        if name.startswith("baguakit.") and reaches_past(path, name)
    ]
    assert not wrong


@pytest.mark.parametrize("each", sorted(FACED))
def test_a_face_offers_what_another_room_uses(each):
    used = {
        name.removeprefix(f"baguakit.{each}.")
        for path in FILES
        if room(path) != each
        for _, name in imported(path)
        if name.startswith(f"baguakit.{each}.")
    }
    assert set(importlib.import_module(f"baguakit.{each}").__all__) == used


def test_no_import_closes_a_cycle():
    """Not even one inside a function, or for types only."""
    assert cycle_in({module(path): [name for _, name in imported(path)] for path in FILES}) == []


def test_only_the_door_knows_torch_distributed():
    wrong = [
        where(path, line)
        for path in FILES
        if room(path) not in DISTRIBUTED
        for line in mentions(path, "torch.distributed")
    ]
    assert not wrong


def test_only_kernels_know_triton():
    wrong = [where(path, line) for path in FILES if room(path) != "kernels" for line in mentions(path, "triton")]
    assert not wrong


def test_no_room_is_called_utils():
    assert not [str(path.relative_to(ROOT)) for path in FILES if "utils" in path.stem]


def test_a_file_has_400_lines_at_most():
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in FILES}
    assert {path: length for path, length in lengths.items() if length > 400} == {}


def test_a_folder_has_14_files_at_most():
    folders = {path.parent for path in FILES}
    assert {str(each.relative_to(ROOT)): n for each in folders if (n := len(list(each.glob("*.py")))) > 14} == {}


def test_every_file_says_what_it_is():
    assert not [str(path.relative_to(ROOT)) for path in FILES if not ast.get_docstring(tree(path)[0])]


def test_no_docstring_begins_with_a_question_word():
    """They say what a thing is ("The record of …") or does ("Return …")."""
    questions = ("What ", "Whether ", "Where ", "Who ", "How ")
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    folders = ("baguakit", "bench", "docs", "examples", "notebooks", "scripts", "tests")
    wrong = [
        where(path, getattr(node, "lineno", 1))
        for folder in folders
        for path in sorted((ROOT / folder).rglob("*.py"))
        if "_build" not in path.parts
        for node in tree(path)
        if isinstance(node, kinds) and (ast.get_docstring(node) or "").startswith(questions)
    ]
    assert not wrong


@functools.cache
def names_in(path):
    """Return the names that a module may define: those that its statements bind, at any depth of its blocks."""
    bound = {node.id for node in tree(path) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    kinds = (ast.ClassDef, ast.FunctionDef)
    bound |= {node.name for node in tree(path) if isinstance(node, kinds)}
    imports = (node for node in tree(path) if isinstance(node, (ast.Import, ast.ImportFrom)))
    return bound | {(each.asname or each.name).split(".")[0] for node in imports for each in node.names}


def test_what_others_import_from_the_package_is_there():
    """Benchmarks, scripts, examples and tests, also those that `make test` does not run."""
    missing = []
    for folder in ("bench", "docs", "examples", "scripts", "tests"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in tree(path):
                if not isinstance(node, ast.ImportFrom) or (node.module or "").split(".")[0] != "baguakit":
                    continue
                home = ROOT.joinpath(*node.module.split("."))
                file = home / "__init__.py" if home.is_dir() else home.with_suffix(".py")
                offered = names_in(file) if file.exists() else set()
                offered = offered | ({each.stem for each in home.iterdir()} if home.is_dir() else set())
                names = [each.name for each in node.names if each.name not in offered]
                missing += [f"{where(path, node.lineno)} imports {name}" for name in names]
    assert not missing


IMPORT = """
import sys, threading, os
import torch, torch.distributed
def tasks():
    return set(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else set()
modules, threads, environment = set(sys.modules), set(threading.enumerate()), dict(os.environ)
descriptors = set(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else set()
before = tasks()
import baguakit
names = ("backend", "data", "elastic", "net", "pictures", "ranks", "sync", "tune")
later = {"triton", *(f"baguakit.{name}" for name in names)}
print("new modules:", sorted(later & set(sys.modules) - modules))
print("new threads:", sorted(set(threading.enumerate()) - threads, key=str), sorted(tasks() - before))
print("environment changed:", dict(os.environ) != environment)
print("process group:", torch.distributed.is_initialized())
print("CUDA:", torch.cuda.is_initialized())
"""


@pytest.mark.timeout(120)  # importing torch in a fresh process takes seconds on a busy machine
def test_importing_runs_nothing():
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", IMPORT], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.splitlines() == [
        "new modules: []",
        "new threads: [] []",
        "environment changed: False",
        "process group: False",
        "CUDA: False",
    ]
