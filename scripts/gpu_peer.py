"""Kill rank 1 of some in training, and see what becomes of the others.

    python scripts/gpu_peer.py FACTS [--cpu] [--ranks 2] [--after SECONDS] [--silent]

With NCCL they have the device wait for a message that never comes. Does the next step of each raise the sentence that
names the dead rank, how long after, how long does `detach` take then, and does its process still live `--after`
seconds from the death (torch's own watchdog would end it within a minute)? With `--silent` what NCCL reports is kept
from them, as it is where ranks share memory: they have the heartbeats alone. What is seen is written as it comes, so
that it is there if the process is not. Ends with 1 unless each has the sentence and lives; on a GPU with `--silent`
unless it came within 1.25 × min(timeout, the limit of heartbeats) + 2 s.
"""

import argparse
import functools
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TIMEOUT = 5.0  # seconds after which a flight is late
PATIENCE = 40.0  # seconds for the sentence


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("facts", type=Path)
    parser.add_argument("--cpu", action="store_true", help="over gloo")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--silent", action="store_true", help="NCCL's report does not reach them")
    parser.add_argument("--after", type=float, default=90.0, help="seconds from the death to the last look")
    asked = parser.parse_args(words)
    from baguakit.ranks import RankError, Ranks

    facts: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as room:
        error, call = None, (not asked.cpu, room, asked.after, asked.silent)
        try:
            with Ranks(asked.ranks, cuda=not asked.cpu, timeout=60) as ranks:
                ranks.run(trained, *call, lost=[1], limit=asked.after + PATIENCE)
        except RankError as raised:
            error = str(raised)
        for rank in (each for each in range(asked.ranks) if each != 1):
            seen = Path(room) / str(rank)
            facts[f"rank {rank}"] = facts_of(seen.read_text().splitlines() if seen.exists() else [], error)
    found = facts["rank 0"] if asked.ranks == 2 else facts
    asked.facts.write_text(json.dumps(found))
    print(json.dumps(found, indent=1))
    late = [name for name, each in facts.items() if asked.silent and not asked.cpu and not each["in time"]]
    return int(bool(late) or not all(each["named"] and each["alive"] for each in facts.values()))


def trained(cuda: bool, room: str, after: float, silent: bool) -> None:
    """Train until another rank is missed; rank 1 dies at its sixth step."""
    import os
    import signal

    import torch
    import torch.distributed as dist

    import baguakit as bk
    from baguakit.runtime import runtime

    if silent:
        runtime.error_in = lambda groups: ""
    device = "cuda" if cuda else "cpu"
    model = torch.nn.Linear(256, 256).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    att = bk.attach(model, optimizer, bk.algorithms.gradient_allreduce(), timeout=TIMEOUT)
    note = functools.partial(noted, f"{room}/{dist.get_rank()}")
    patience = att._life.runtime.monitor.patience
    try:
        began, step = time.monotonic(), 0
        while time.monotonic() < began + PATIENCE:
            if step == 5 and dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            if step == 5:
                note("killed", str(1.25 * min(TIMEOUT, patience) + 2))
                began = time.monotonic()
            optimizer.zero_grad()
            model(torch.ones(1, 256, device=device)).square().mean().backward()
            optimizer.step()
            step += 1
            time.sleep(0.1)
        note("said", "nothing")
    except Exception as error:
        note("said", f"{type(error).__name__}: {error}")
    try:
        att.detach()
        note("detached")
    except Exception as error:
        note("detached", f"{type(error).__name__}: {error}")
    time.sleep(max(0.0, after - (time.monotonic() - began)))
    note("alive")


def noted(path: str, what: str, said: str = "") -> None:
    """Append what happened, and when."""
    with open(path, "a") as file:
        print(json.dumps([what, time.monotonic(), said]), file=file)


def facts_of(lines: Sequence[str], error: str | None) -> dict[str, Any]:
    """Return what the notes of the rank that lives say; it is not alive if the call ended with an error."""
    notes = {what: (when, said) for what, when, said in map(json.loads, lines)}

    def between(first: str, last: str) -> float | None:
        return round(notes[last][0] - notes[first][0], 2) if first in notes and last in notes else None

    sentence, limit = notes.get("said", (0, None))[1], float(notes.get("killed", (0, ""))[1] or 0)
    seconds = between("killed", "said")
    return {
        "sentence": sentence,
        "named": sentence is not None and "rank 1" in sentence,
        "seconds to the sentence": seconds,
        "limit": limit,
        "in time": seconds is not None and seconds <= limit,
        "seconds to detach": between("said", "detached"),
        "detach said": notes.get("detached", (0, None))[1],
        "alive": "alive" in notes and error is None,
        "seconds from the death to the last look": between("killed", "alive"),
        "error": error,
    }


if __name__ == "__main__":
    import gpu_peer  # without cloudpickle, ranks find a function by the name of its module

    sys.exit(gpu_peer.main(sys.argv[1:]))
