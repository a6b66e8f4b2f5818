"""Training that survives a killed rank: all start again, from the newest checkpoint that every rank has written.

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    torchrun --standalone --nproc_per_node=4 --max-restarts=9 examples/elastic.py --folder checkpoints

Kill a rank (`kill -9`), or all and start them again, as many or others. With `--nnodes=1:4 --rdzv_backend=c10d
--rdzv_endpoint=HOST:PORT` in place of `--standalone`, on up to four machines, those that are left go on; HOST is the
address to which the first one's own name resolves. The variable gives each attempt a store of its own: in torchrun's,
ranks may find the addresses of those that have died.

A checkpoint is a folder `000040` with a file `0-of-4.pt` of each rank: what a rank remembers (residuals, momenta,
weights under gossip) is its own. A file is there whole or not at all; a checkpoint counts once all its files are there.
"""

import argparse
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import baguakit as bk

KEPT = 2  # checkpoints; one would do, if disks never failed


def save(folder: Path, step: int, state: dict[str, Any]) -> None:
    """Write this rank's part of the checkpoint of `step`; then rank 0 removes those that have become old."""
    path = folder / f"{step:06}" / f"{dist.get_rank()}-of-{dist.get_world_size()}.pt"
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    with open(temporary, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())  # the bytes are on the disk before the name is
    os.replace(temporary, path)
    for place in (path.parent, folder):  # and then the name
        descriptor = os.open(place, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    if dist.get_rank() == 0:
        for old, _ in list(complete(folder))[KEPT:]:
            shutil.rmtree(folder / f"{old:06}")


def complete(folder: Path) -> Iterator[tuple[int, int]]:
    """(step, number of ranks) of every checkpoint that has all its files, the newest first."""
    for place in sorted(folder.glob("[0-9]*"), key=lambda place: -int(place.name)):
        files = {path.name for path in place.glob("*.pt")}
        for ranks in {int(name.split("-of-")[1].removesuffix(".pt")) for name in files}:
            if files >= {f"{rank}-of-{ranks}.pt" for rank in range(ranks)}:
                yield int(place.name), ranks


def newest(folder: Path) -> tuple[int, int]:
    """The newest complete checkpoint, or (0, 0); rank 0 chooses for all, and removes what was left unfinished."""
    found = [(0, 0)]
    if dist.get_rank() == 0:
        whole = dict(complete(folder))
        found = [*whole.items(), *found][:1]
        for place in folder.glob("[0-9]*"):
            if int(place.name) not in whole:  # lest its files be taken for those of another attempt
                shutil.rmtree(place)
    dist.broadcast_object_list(found)
    return found[0]


def batches(rank: int, ranks: int, begin: int, end: int) -> Iterator[tuple[int, Tensor, Tensor]]:
    """(step, images, labels): the same at the same step, whenever it is asked for; rank r has the digits r, r + n, …"""
    digits = load_digits()
    images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    mine = (labels % ranks == rank).nonzero().flatten()
    for step in range(begin, end):
        random = torch.Generator().manual_seed(step * ranks + rank)
        chosen = mine[torch.randint(len(mine), (32,), generator=random)]
        yield step, images[chosen], labels[chosen]


def train(folder: Path, steps: int, every: int) -> None:
    """Train from where the newest checkpoint is to `steps`, with a checkpoint after `every` steps."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    begin, saved_by = newest(folder)
    with bk.attach(model, optimizer, bk.algorithms.bytegrad(error_feedback=True), timeout=60) as att:
        parts = {"model": model, "optimizer": optimizer, "att": att}  # resumed in this order
        if saved_by:
            state = torch.load(folder / f"{begin:06}" / f"{rank % saved_by}-of-{saved_by}.pt", weights_only=True)
            for name, part in parts.items():
                part.load_state_dict(state[name])
        if rank == 0:
            print(f"{ranks} ranks begin at step {begin}, saved by {saved_by}", flush=True)
        for step, images, labels in batches(rank, ranks, begin, steps):
            optimizer.zero_grad()
            loss = cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            if rank == 0:
                print(f"step {step} loss {loss.item()!r}", flush=True)
            if (step + 1) % every == 0:
                save(folder, step + 1, {name: part.state_dict() for name, part in parts.items()})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train, and go on where a killed run had been.")
    parser.add_argument("--folder", type=Path, required=True, help="of the checkpoints, which all ranks can reach")
    parser.add_argument("--steps", type=int, default=400, help="optimizer steps in all (%(default)s)")
    parser.add_argument("--every", type=int, default=20, help="steps between checkpoints (%(default)s)")
    options = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start it with torchrun --standalone --nproc_per_node=4 examples/elastic.py --folder checkpoints")
    dist.init_process_group("gloo")
    train(options.folder, options.steps, options.every)
    dist.destroy_process_group()
