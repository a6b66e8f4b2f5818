"""The front door holds: every block of code in README.md runs, and whatever it names is there."""

import re
from pathlib import Path

import pytest
from pool import ranks

import baguakit as bk

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
PYTHON = [text for kind, text in BLOCKS if kind == "python"]


def test_all_kinds_of_blocks_are_known():
    assert {kind for kind, _ in BLOCKS} == {"", "bash", "diff", "python"}  # those without a kind are figures


def runs(code):
    """Run code on this rank among what a reader would have at hand, and return what it leaves behind."""
    import torch

    import baguakit as bk

    torch.manual_seed(0)
    batches = [(torch.randn(4, 3), torch.randn(4, 2)) for _ in range(3)]
    names = {"__name__": "__main__", "batches": batches, "loader": batches, "Net": lambda: torch.nn.Linear(3, 2)}
    names |= {"loss": torch.nn.functional.mse_loss, "model": torch.nn.Linear(3, 2)}
    names["optimizer"] = torch.optim.SGD(names["model"].parameters(), lr=0.1)
    before = [p.detach().clone() for p in names["model"].parameters()]
    exec(compile(code, "README.md", "exec"), names)
    if "sign_sgd" in names:
        with bk.attach(names["model"], names["optimizer"], names["sign_sgd"]):
            for x, y in batches:
                names["loss"](names["model"](x), y).backward()
                names["optimizer"].step()
        assert all(p.grad.abs().eq(1).logical_or(p.grad.eq(0)).all() for p in names["model"].parameters())
    trained = any(not torch.equal(p, q) for p, q in zip(names["model"].parameters(), before, strict=True))
    return trained, [p.detach().tolist() for p in names["model"].parameters()]


@pytest.mark.parametrize("text", [text for kind, text in BLOCKS if kind == "diff"])
def test_a_loop_with_two_more_lines(text):
    """Without the marks of what is new, the loop runs and all ranks end alike."""
    assert sum(line.startswith("+") for line in text.splitlines()) == 2
    (_, one), (_, other) = ranks(2, runs, "\n".join(line[1:] for line in text.splitlines()))
    assert one == other


@pytest.mark.parametrize("text", [text for text in PYTHON if "bk.Ranks" not in text], ids=lambda text: text.split()[1])
def test_python_blocks(text):
    results = ranks(2, runs, text)
    if "optimizer.step()" in text:
        (trained, one), (_, other) = results
        assert trained and one == other


@pytest.mark.parametrize("text", [text for text in PYTHON if "bk.Ranks" in text])
def test_live_ranks(text, capfd):
    exec(compile(text, "README.md", "exec"), {"__name__": "__main__"})
    assert "[tensor([0.5000, 0.5000, 0.5000]), tensor([0.5000, 0.5000, 0.5000])]" in capfd.readouterr().out


def test_commands_are_there():
    lines = [line for kind, text in BLOCKS if kind == "bash" for line in text.splitlines()]
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert lines and all(line.startswith("make ") and line.split()[1] in targets for line in lines)


def test_names_are_there():
    """Everything in backticks that begins with `bk.` exists, and every call without ellipses can be evaluated."""
    for name in set(re.findall(r"`bk((?:\.\w+)+)", README)):
        thing = bk
        for part in name[1:].split("."):
            if part == "lightning":  # asked for only where it is installed
                break
            thing = getattr(thing, part, None)
            assert thing is not None, f"bk{name}"


def test_expressions_of_the_table_are_what_prints():
    """The column \"is\" of the table of algorithms begins with the repr of what the column before it calls."""
    rows = re.findall(r"^\| `((?:bk\.hierarchical|\w+)\(.*?\))` \| (.*?) \|", README, re.MULTILINE)
    known = vars(bk.algorithms) | vars(bk.stages) | {"bk": bk, "graph": bk.topology.Exponential()}
    seen = 0
    for call, expression in rows:
        if call.split("(")[0] not in bk.algorithms.__all__ and not call.startswith("bk.hierarchical"):
            continue
        made = eval(call, known)
        rules = made if isinstance(made, tuple) else (made,)
        stated = re.findall(r"`([^`]+)`", expression)
        if "fragments" in call or not stated:
            continue
        assert [
            repr(rule).replace("Exponential()", "graph") if "graph" in call else repr(rule) for rule in rules
        ] == stated
        seen += 1
    assert seen >= 15
