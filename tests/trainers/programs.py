"""The programs of docs/trainers, as they stand there, without baguakit, and with another algorithm, on two ranks."""

import ast
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from commands import blocks_of

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "trainers"
OURS = {"bk", "att", "callback"}
EACH = """
import contextlib, io, json, os, sys, warnings
import torch
import torch.distributed as dist
import baguakit as bk

warnings.simplefilter("ignore")
found = {}
for name, code in json.load(open(sys.argv[1])):
    names = {"__name__": "__main__"}
    with contextlib.redirect_stdout(io.StringIO()):
        exec(compile(code, name, "exec"), names)
    if names["found"] is not None:
        found[name] = names["found"]
    if "accelerate.state" in sys.modules:  # the next program may choose another precision
        sys.modules["accelerate.state"].AcceleratorState._reset_state()
dist.barrier()
with open(f"{sys.argv[1]}.{dist.get_rank()}", "w") as file:
    json.dump(found, file)
dist.destroy_process_group()
"""


def needs(*modules: str) -> None:
    """Skip the test where a module is not installed; in CI, which installs all of them, fail."""
    for module in modules:
        if find_spec(module) is None:
            said = f"{module} is not installed: pip install '.[trainers,lightning]'"
            pytest.fail(said) if os.environ.get("CI") else pytest.skip(said)


def program_of(page: str, number: int = 0) -> str:
    """Return a Python program of a page."""
    return blocks_of(PAGES / f"{page}.md")[number]


class Without(ast.NodeTransformer):
    """Take out whatever names baguakit, its callback or its attachment; the body of a `with` stays."""

    def plain(self, node: ast.AST) -> bool:
        named = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
        return not named & OURS and not (isinstance(node, ast.Import) and node.names[0].asname == "bk")

    def visit_With(self, node: ast.With) -> Any:
        self.generic_visit(node)
        node.items = [item for item in node.items if self.plain(item)]
        return node if node.items else node.body

    def visit_keyword(self, node: ast.keyword) -> Any:
        return node if self.plain(node) else None

    def statement(self, node: ast.stmt) -> Any:
        self.generic_visit(node)
        return node if self.plain(node) else None

    visit_Import = visit_Assign = visit_Expr = statement

    def visit_If(self, node: ast.If) -> Any:
        self.generic_visit(node)
        return node if node.body else None


class Instead(ast.NodeTransformer):
    """Put another algorithm in place of that of a program."""

    def __init__(self, algorithm: str) -> None:
        self.algorithm = ast.parse(algorithm, mode="eval").body

    def visit_Call(self, node: ast.Call) -> Any:
        self.generic_visit(node)
        return self.algorithm if ast.unparse(node.func).startswith("bk.algorithms.") else node


def without(program: str) -> str:
    """Return the user's own program: that of a page, without baguakit."""
    return ast.unparse(ast.fix_missing_locations(Without().visit(ast.parse(program)))) + "\n"


def instead(program: str, algorithm: str) -> str:
    """Return a program with another algorithm, an expression."""
    changed = ast.unparse(ast.fix_missing_locations(Instead(algorithm).visit(ast.parse(program)))) + "\n"
    assert algorithm.split("(")[0] in changed
    return changed


def on_two_ranks(folder: Path, programs: dict[str, str], limit: float = 500) -> dict[str, list[Any]]:
    """Run programs one after another in two processes that torchrun starts; return what each `found`, by rank.

    The processes are shared, because importing a trainer takes most of the time.
    """
    listed, script = folder / "programs.json", folder / "each.py"
    listed.write_text(json.dumps(list(programs.items())))
    script.write_text(EACH)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    offline = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "ACCELERATE_USE_CPU": "true"}
    environment = os.environ | offline | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    environment |= {"HF_HOME": str(folder / "hub")}
    done = subprocess.run(
        [*command, str(script), str(listed)], env=environment, cwd=folder, capture_output=True, text=True, timeout=limit
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = [json.loads(Path(f"{listed}.{rank}").read_text()) for rank in (0, 1)]
    return {name: [each[name] for each in found] for name in found[0]}


# What a program found, for `theorems` to compare.
FOUND = """
weights = [p.detach().float().flatten().tolist() for p in model.parameters()]
found = {"losses": losses, "weights": sum(weights, []), "parameters": len(weights)}
"""
REPORTED = """
found["steps"] = att.step
found["rows"] = [(r.values, r.flights, r.bytes_sent, r.flew) for r in att.report().rows]
"""


def theorems(folder: Path, program: str, after: str, att: str = "", programs: dict[str, str] | None = None) -> Any:
    """Check that a page's program, whose algorithm is `bytegrad()`, sends and trains what it should.

    `after` sets `losses` and `model` when it has run, and `att` sets `att`. Return what all programs found.
    """
    import torch

    plain, ours = after + FOUND, att + "\n" + after + FOUND + REPORTED
    assert "bk." not in without(program)
    found = on_two_ranks(
        folder,
        {
            "ddp": without(program) + plain,
            "exact": instead(program, "bk.algorithms.gradient_allreduce()") + ours,
            "bytegrad": program + ours,
            **{name: other + ours for name, other in (programs or {}).items()},
        },
    )
    for key in ("losses", "weights"):  # of DDP, to rounding
        ddp, exact = (torch.tensor(found[name][0][key]) for name in ("ddp", "exact"))
        assert len(ddp) and not torch.equal(ddp, torch.zeros_like(ddp))
        torch.testing.assert_close(exact, ddp, rtol=1e-4, atol=1e-6)
    for name in ("ddp", "exact", "bytegrad"):  # replicas are equal
        assert found[name][0]["weights"] == found[name][1]["weights"]
    check_bytes(found["exact"], found["bytegrad"])
    return found


def in_8_bits(n: int) -> int:
    """Return the bytes that a rank of two sends for a mean of n values in 8 bits, in one hop or in two."""
    import baguakit as bk

    row_bytes = bk.compressors.MinMaxUInt8().row_bytes
    one_hop = row_bytes(n) <= 1 << 15 and 2 * n < 1 << 16
    return row_bytes(n) if one_hop else 2 * row_bytes(n // 2)


def check_bytes(exact: Any, byte: Any) -> None:
    """Check the bytes of a rank of two: every bucket is sent once in a step, and a flag for each parameter."""
    for (one, other), sent in ((exact, lambda n: 4 * n), (byte, in_8_bits)):
        assert one["rows"] == other["rows"]
        assert all(flights == one["steps"] for _, flights, _, _ in one["rows"])
        values = sum(sent(n) for n, _, _, _ in one["rows"])
        assert sum(each[2] for each in one["rows"]) == one["steps"] * (values + one["parameters"])
