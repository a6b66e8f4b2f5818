"""Four hosts of unequal speed: seconds to DDP's loss, and goodput: `python -m bench.frontier.speeds --out FILE`.

The hosts compute at speeds 1, 1, 1/2 and 1/4. They share this machine's cores, so the model is small and a step is
slept until it has taken as long as its host's speed says: computing is slept, the network and the losses are real.

goodput    steps that counted in the shared weights / steps that the hosts could make alone in that time

Every host copies its weights at times. At the end, the mean of the hosts' copies is validated. Needs root, as
`bench.netlab` does.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import baguakit as bk
from baguakit.compare.language import gpt
from baguakit.compare.names import algorithm
from bench.netlab import Lab

SPEEDS, STEP, EVERY, RATE, LR = (1.0, 1.0, 0.5, 0.25), 0.15, 2.0, "500mbit", 1e-3
OUTER = "lr=0.7, momentum=0.9, nesterov=True"
CONTENDERS = {
    "DDP": "gradient_allreduce()",
    "diloco": f"diloco(every=12, {OUTER})",
    "DyLU": f"decoupled_diloco(every=BySpeed(12), {OUTER})",
    "decoupled, quorum 3": f"decoupled_diloco(every=12, quorum=3, grace=3.0, {OUTER})",
    "decoupled, quorum 3, plain mean": "decoupled_diloco(every=12, quorum=3, grace=3.0, lr=0.75)",
    "async": "async_model_average(interval=1.0)",
}


def train(name: str, seconds: float, seed: int) -> dict[str, Any]:
    """Train on this host for some seconds; return the losses and the steps of all. Collective."""
    comm, speed = bk.Comm(), SPEEDS[dist.get_rank()]
    model, loss, validate = gpt(seed, comm.rank, comm.size, layers=2, width=64, heads=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    made, copies = algorithm(CONTENDERS[name]), list[torch.Tensor]()
    free = any(rule.window == "free_running" for rule in made.rules)
    most = 10**9 if free else int(seconds / STEP * min(SPEEDS))  # of ranks that wait for each other
    with bk.attach(model, optimizer, made) as att:
        dist.barrier()
        began = now = time.perf_counter()
        while (over := now - began) < seconds and att.step < most:
            if over >= EVERY * len(copies):
                copies.append(torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone())
            optimizer.zero_grad()
            loss(model, att.step).backward()
            optimizer.step()
            time.sleep(max(0.0, STEP / speed - (time.perf_counter() - now)))
            now = time.perf_counter()
        copies.append(torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone())
        taken, steps = time.perf_counter() - began, att.step
        waiting = att._life.free.paces[0].steps if att._life.free else 0  # made since the host contributed last
    shared = comm.gather_objects((len(copies), taken, steps, waiting))
    losses = []
    for copy in copies[: min(each[0] for each in shared)]:
        mean = bk.primitives.mean_(copy, comm)
        torch.nn.utils.vector_to_parameters(mean, model.parameters())
        losses.append(sum(comm.gather_objects(validate(model)["bits per byte"])) / comm.size)
    taken = max(each[1] for each in shared)
    counted = sum(steps - waiting for _, _, steps, waiting in shared)
    alone = sum(taken / STEP * speed for speed in SPEEDS)
    return {"name": name, "expression": repr(made), "losses": losses, "seconds": taken, "goodput": counted / alone,
            "steps": [each[2] for each in shared]}  # fmt: skip


def main() -> None:
    """Train every contender in a laboratory; print and write what was found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", nargs="*", metavar="NAME", help="contenders to train, after DDP")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--a-host", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.a_host:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        found = train(options.a_host, options.seconds, options.seed)
        if dist.get_rank() == 0:
            print("found", json.dumps(found), flush=True)
        dist.barrier()
        return
    rows = []
    for name in [each for each in CONTENDERS if options.only is None or each in ("DDP", *options.only)]:
        words = [sys.executable, "-m", "bench.frontier.speeds", "--seconds", str(options.seconds)]
        with Lab(len(SPEEDS), RATE) as lab:
            ended = lab.start([*words, "--seed", str(options.seed), "--a-host", name]).wait(3 * options.seconds + 120)
        line = next((line for line in ended.outputs[0].splitlines() if line.startswith("found ")), None)
        if line is None:
            print(f"{name} failed: {''.join(ended.outputs)[-1500:]}", file=sys.stderr)
            continue
        rows.append(json.loads(line.removeprefix("found ")))
        target = rows[0]["losses"][-1]
        at = next((EVERY * i for i, each in enumerate(rows[-1]["losses"]) if each <= target), None)
        print(f"{name:<34}{rows[-1]['losses'][-1]:>8.3f}{at or -1:>8.0f} s{rows[-1]['goodput']:>8.2f}", flush=True)
        if options.out:
            options.out.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
