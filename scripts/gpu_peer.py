"""Kill one of two ranks in training, and see what becomes of the other.

    python scripts/gpu_peer.py FACTS [--cpu] [--after SECONDS]

With NCCL the other has the device wait for a message that never comes. Does its next step raise the sentence that
names the dead rank, how long after, how long does `detach` take then, and does its process still live `--after`
seconds from the death (torch's own watchdog would end it within a minute)? What is seen is written as it comes, so that
it is there if the process is not. Ends with 1 unless the sentence came and the process lives.
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
    parser.add_argument("--after", type=float, default=90.0, help="seconds from the death to the last look")
    asked = parser.parse_args(words)
    from baguakit.ranks import RankError, Ranks

    with tempfile.TemporaryDirectory() as room:
        seen, error = Path(room) / "seen", None
        try:
            with Ranks(2, cuda=not asked.cpu, timeout=60) as ranks:
                ranks.run(trained, not asked.cpu, str(seen), asked.after, lost=[1], limit=asked.after + PATIENCE)
        except RankError as raised:
            error = str(raised)
        facts = facts_of(seen.read_text().splitlines() if seen.exists() else [], error)
    asked.facts.write_text(json.dumps(facts))
    print(json.dumps(facts, indent=1))
    return int(not (facts["named"] and facts["alive"]))


def trained(cuda: bool, seen: str, after: float) -> None:
    """Train until the other rank is missed; rank 1 dies at its sixth step."""
    import os
    import signal

    import torch
    import torch.distributed as dist

    import baguakit as bk

    device = "cuda" if cuda else "cpu"
    model = torch.nn.Linear(256, 256).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    att = bk.attach(model, optimizer, bk.algorithms.gradient_allreduce(), timeout=TIMEOUT)
    note = functools.partial(noted, seen)
    try:
        began, step = time.monotonic(), 0
        while time.monotonic() < began + PATIENCE:
            if step == 5 and dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            if step == 5:
                note("killed")
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

    sentence = notes.get("said", (0, None))[1]
    return {
        "sentence": sentence,
        "named": sentence is not None and "rank 1" in sentence,
        "seconds to the sentence": between("killed", "said"),
        "seconds to detach": between("said", "detached"),
        "detach said": notes.get("detached", (0, None))[1],
        "alive": "alive" in notes and error is None,
        "seconds from the death to the last look": between("killed", "alive"),
        "error": error,
    }


if __name__ == "__main__":
    import gpu_peer  # without cloudpickle, ranks find a function by the name of its module

    sys.exit(gpu_peer.main(sys.argv[1:]))
