"""Let two ranks speak over NCCL, on one GPU if there is no second, and say how they do.

    python scripts/gpu_pair.py FACTS [--cpu]

Ranks are forked, which a process that has asked CUDA anything cannot be; NCCL refuses two of them on one GPU, unless
each claims a host of its own. So this says first whether anything on GPUs can be tested with ranks at all: whether they
start, what NCCL finds between them, and what it and torch warn of. Writes JSON; ends with 1 if a sum is wrong.
"""

import json
import os
import re
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any


def main(words: Sequence[str]) -> int:
    cuda = "--cpu" not in words
    with tempfile.TemporaryDirectory() as room:
        os.environ.update(NCCL_DEBUG="INFO", NCCL_DEBUG_FILE=f"{room}/%p")
        from baguakit.ranks import Ranks

        with Ranks(2, cuda=cuda, timeout=30) as ranks:
            found = ranks.run(spoken, cuda, limit=35 if cuda else 600)
        lines = [line for path in sorted(Path(room).iterdir()) for line in path.read_text().splitlines()]
    facts = {"sums right": all(each["sums"] == [3.0] for each in found), **heard(lines), "ranks": found}
    Path(words[0]).write_text(json.dumps(facts))
    print(json.dumps(facts, indent=1))
    return int(not facts["sums right"])


def spoken(cuda: bool) -> dict[str, Any]:
    """A sum over the ranks, a step of an algorithm, and what this rank was warned of meanwhile."""
    import warnings

    import torch
    import torch.distributed as dist

    import baguakit as bk

    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        x = torch.full((1000,), dist.get_rank() + 1.0, device=device)
        dist.all_reduce(x)
        model = torch.nn.Linear(100, 100).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with bk.attach(model, optimizer, bk.algorithms.bytegrad(), timeout=20):
            model(torch.ones(1, 100, device=device)).sum().backward()
            optimizer.step()
    said = sorted({f"{each.category.__name__}: {each.message}" for each in warned})
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if cuda else None
    return {"sums": x.unique().tolist(), "device": str(device), "nccl": nccl, "warnings": said}


def heard(lines: Iterable[str]) -> dict[str, Any]:
    """Return which network NCCL says that it uses, over which transports, and what it warns of."""
    lines = list(lines)
    networks = {found[1] for line in lines if (found := re.search(r"Using network (\w+)", line))}
    transports = {found[1] for line in lines if (found := re.search(r" via ([A-Z][\w/]+)", line))}
    return {
        "networks": sorted(networks),
        "transports": sorted(transports),
        "duplicate GPU": any("Duplicate GPU" in line for line in lines),
        "NCCL warns": sorted({line.partition(" WARN ")[2] for line in lines if " WARN " in line}),
    }


if __name__ == "__main__":
    import gpu_pair  # without cloudpickle, ranks find a function by the name of its module

    sys.exit(gpu_pair.main(sys.argv[1:]))
