"""Which bf16 weights a step of AdamW changes, and the bytes that `bk.sync` sends of them.

    python -m bench.changed_weights          writes bench/results/changed-weights.json, and prints the table

Two GPTs are trained on text in fp32, as masters of bf16 weights. From there, one step is made at each learning rate.
What is sent must give the new weights back, bit for bit.
"""

import argparse
import copy
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import baguakit as bk
from baguakit.compare.language import BATCH, CONTEXT, GPT, drawn, loss_of, text
from baguakit.sync.packing import shorter

from .measuring import machine

RESULT = Path(__file__).parent / "results" / "changed-weights.json"
MODELS = {"small": (4, 256, 8), "large": (10, 512, 8)}  # layers, width, heads
STEPS, RATE, RATES, LEVEL = 60, 3e-4, (1e-6, 1e-5, 1e-4, 1e-3), 1
PAIR = 6  # bytes of a place and a value


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
    optimizer.zero_grad()
    loss_of(model, batch).backward()
    optimizer.step()


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().bfloat16().view(-1) for p in model.parameters()])


def measured(old: Tensor, new: Tensor) -> dict[str, float]:
    """Return the share of values that change, and the bytes sent without and with zstd, as shares of all bytes."""
    changed = int((old.view(torch.int16) != new.view(torch.int16)).sum())
    packed = bk.sync.changes(new, x := old.clone())
    if not (torch.equal(x, new) and torch.equal(bk.sync.apply_(old.clone(), packed), new)):
        raise AssertionError("what was packed does not give the new weights")
    return {
        "changed": changed / old.numel(),
        "sent": len(packed) / old.nbytes,
        "of_pairs": len(packed) / (PAIR * changed),
        "zstd": len(shorter(packed, LEVEL)) / old.nbytes,
    }


def trajectory(layers: int, width: int, heads: int, steps: int) -> dict[str, Any]:
    """Train for `steps` steps, and return what one more step changes, by learning rate."""
    torch.manual_seed(0)
    windows = text(CONTEXT)[0]
    model = GPT(layers, width, heads)
    optimizer = torch.optim.AdamW(model.parameters(), RATE)
    for i in range(steps):
        step(model, optimizer, drawn(windows, BATCH, 0, i))
    rates = {}
    for rate in RATES:
        one = copy.deepcopy(model)
        there = torch.optim.AdamW(one.parameters(), rate)
        there.load_state_dict(optimizer.state_dict())
        there.param_groups[0]["lr"] = rate
        step(one, there, drawn(windows, BATCH, 0, steps))
        rates[f"{rate:.0e}".replace("e-0", "e-")] = measured(weights(model), weights(one))
    return {"values": weights(model).numel(), "rates": rates}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.changed_weights", description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=STEPS, help="steps before the one that is measured (%(default)s)")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="(both)")
    parser.add_argument("--out", type=Path, default=RESULT.parent, metavar="FOLDER", help="(%(default)s)")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    found = {name: trajectory(*MODELS[name], options.steps) for name in options.models}
    on = {"steps": options.steps, "rate": RATE, "level": LEVEL} | machine()
    (options.out / RESULT.name).write_text(json.dumps({"on": on, "models": found}, indent=1) + "\n")
    print("\n".join(table(found)))


def table(found: dict[str, Any]) -> list[str]:
    """Return the rows of the table of docs/situations/rl_weights.md."""
    rows = []
    for model in found.values():
        for rate, each in model["rates"].items():
            changed, sent, zstd = (f"{100 * each[name]:.1f} %" for name in ("changed", "sent", "zstd"))
            values = f"{model['values'] / 1e6:.1f} million"
            rows.append(f"| {values} | {rate} | {changed} | {sent} | {each['of_pairs']:.2f} | {zstd} |")
    return rows


if __name__ == "__main__":
    main()
