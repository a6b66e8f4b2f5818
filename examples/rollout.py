"""A trainer publishes its weights after every few steps, and a second process generates text with them meanwhile.

    python examples/rollout.py
    python examples/rollout.py --steps 400 --every 5 --folder /shared/weights

The trainer keeps fp32 weights, and publishes them in bf16, as inference uses them. Of those only the values that have
changed are sent, bit for bit. The folder may be on a shared disk; between the ranks of one group, pass a `bk.Comm`.
"""

import argparse
import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch import multiprocessing as processes

import baguakit as bk
from baguakit.compare.language import BATCH, CONTEXT, GPT, drawn, loss_of, text

LAYERS, WIDTH, HEADS = 2, 128, 4


def in_bf16(model: nn.Module) -> dict[str, Tensor]:
    return {name: x.detach().bfloat16() for name, x in model.state_dict().items()}


def train(folder: Path, steps: int, every: int, lr: float) -> None:
    """Train, and publish the weights after every `every` steps."""
    torch.manual_seed(0)
    model = GPT(LAYERS, WIDTH, HEADS)
    optimizer = torch.optim.AdamW(model.parameters(), lr)
    published, windows = in_bf16(model), text(CONTEXT)[0]
    publisher = bk.sync.Publisher(published, folder)
    for step in range(1, steps + 1):
        optimizer.param_groups[0]["lr"] = lr * (1 - (step - 1) / steps) ** 4  # with smaller steps, fewer values change
        loss = loss_of(model, drawn(windows, BATCH, 0, step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % every == 0:
            for name, x in in_bf16(model).items():
                published[name].copy_(x)
            version = publisher.publish()
            values = sum(x.nbytes for x in published.values())
            sent = max(path.stat().st_size for path in folder.glob(f"{version:09d}*"))
            print(f"step {step}: loss {loss.item():.3f}, version {version}: {sent:,} of {values:,} bytes", flush=True)


@torch.no_grad()
def generate(model: nn.Module, prompt: bytes, length: int) -> str:
    """Return the prompt and the `length` most likely next bytes."""
    x = torch.tensor([list(prompt)])
    for _ in range(length):
        x = torch.cat([x, model(x[:, -CONTEXT:])[:, -1].argmax(-1, keepdim=True)], 1)
    return bytes(x[0].tolist()).decode(errors="replace")


def roll_out(folder: Path, last: int) -> None:
    """Generate with the newest weights until version `last` is there."""
    model = GPT(LAYERS, WIDTH, HEADS)
    received, seen = in_bf16(model), -1
    subscriber = bk.sync.Subscriber(received, folder)
    while seen < last:
        version = subscriber.update()
        if version > seen:
            seen = version
            model.load_state_dict(received)
            print(f"    with version {version}: {generate(model, b'def ', 24)!r}", flush=True)
        else:
            time.sleep(0.05)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--every", type=int, default=10, help="steps between two publications")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--folder", type=Path, help="where versions are published; by default a temporary folder")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        rollout = processes.get_context("spawn").Process(
            target=roll_out, args=(folder, options.steps // options.every - 1)
        )
        rollout.start()
        train(folder, options.steps, options.every, options.lr)
        rollout.join()
        if rollout.exitcode:
            raise SystemExit("the process that generates has failed")


if __name__ == "__main__":
    main()
