"""Code in documents, run on a rank among what a reader would have at hand."""

import os
import re
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

import baguakit as bk

ROOT = Path(__file__).parents[1]


def blocks(path: Path, kind: str = "python") -> list[str]:
    """Return the blocks of code of a kind in a Markdown document."""
    return re.findall(rf"^```{kind}\n(.*?)^```$", path.read_text(), re.MULTILINE | re.DOTALL)


def runs(code: str) -> tuple[bool, list[object]]:
    """Run code on this rank; return whether the model was trained, and its parameters."""
    torch.manual_seed(0)
    batches = [(torch.randn(4, 3), torch.randn(4, 2)) for _ in range(3)]
    names = {"__name__": "__main__", "batches": batches, "loader": batches, "Net": lambda: torch.nn.Linear(3, 2)}
    names |= {"loss": torch.nn.functional.mse_loss, "model": torch.nn.Linear(3, 2), "device": torch.device("cpu")}
    names |= {"os": os, "torch": torch, "dist": dist, "bk": bk}
    names["optimizer"] = torch.optim.SGD(names["model"].parameters(), lr=0.1)
    before = [p.detach().clone() for p in names["model"].parameters()]
    # This rank has a group already, and keeps it.
    with mock.patch.multiple(dist, init_process_group=mock.DEFAULT, destroy_process_group=mock.DEFAULT):
        exec(compile(code, "document", "exec"), names)
    if "sign_sgd" in names:
        with bk.attach(names["model"], names["optimizer"], names["sign_sgd"]):
            for x, y in batches:
                names["loss"](names["model"](x), y).backward()
                names["optimizer"].step()
        assert all(p.grad.abs().eq(1).logical_or(p.grad.eq(0)).all() for p in names["model"].parameters())
    after = [p.detach() for p in names["model"].parameters()]
    trained = any(not torch.equal(p, q) for p, q in zip(after, before, strict=True))
    return trained, [p.tolist() for p in after]
