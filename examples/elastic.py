"""Training that goes on when ranks are lost, lets new ones in, and resumes from a checkpoint once all have been lost.

On three machines that reach each other and one folder, the store on the first, which has the address 10.0.0.1:

    python -m baguakit.store --bind 10.0.0.1

and on each of them, as often as it is to have ranks:

    python examples/elastic.py --endpoint 10.0.0.1:29400 --folder checkpoints

On one machine, the same with an address that nobody else reaches, the second line in as many terminals as you like:

    python -m baguakit.store --bind 127.0.0.1
    python examples/elastic.py --endpoint 127.0.0.1:29400 --folder checkpoints

Kill a rank (`kill -9`): the others go on. Start another: it takes the weights of one that is there. SIGTERM lets a rank
leave after its step. Kill all, and start as many or others: they go on from the newest complete checkpoint. With
`--least 4` they begin when four are there.

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
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import baguakit as bk

KEPT = 2  # checkpoints; one would do, if disks never failed


def save(folder: Path, step: int, rank: int, ranks: int, state: dict[str, Any]) -> None:
    """Write this rank's part of the checkpoint of `step`; then rank 0 removes what is older than those kept."""
    path = folder / f"{step:06}" / f"{rank}-of-{ranks}.pt"
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
    kept = [at for at, _ in complete(folder)][:KEPT]
    for old in folder.glob("[0-9]*") if rank == 0 and len(kept) == KEPT else ():
        if int(old.name) < kept[-1]:
            shutil.rmtree(old)


def complete(folder: Path) -> Iterator[tuple[int, int]]:
    """(step, number of ranks) of every checkpoint that has all its files, the newest first."""
    for place in sorted(folder.glob("[0-9]*"), key=lambda place: -int(place.name)):
        files = {path.name for path in place.glob("*.pt")}
        for ranks in {int(name.split("-of-")[1].removesuffix(".pt")) for name in files}:
            if files >= {f"{rank}-of-{ranks}.pt" for rank in range(ranks)}:
                yield int(place.name), ranks


def newest(folder: Path) -> tuple[int, int]:
    """Return the newest complete checkpoint, or (0, 0), and remove what was left unfinished."""
    whole = dict(complete(folder))
    for place in folder.glob("[0-9]*"):
        if int(place.name) not in whole:  # lest its files be taken for those of another attempt
            shutil.rmtree(place)
    return next(iter(whole.items()), (0, 0))


def begin(comm: bk.Comm, trains: bool, folder: Path, parts: dict[str, Any]) -> None:
    """Load what rank 0 finds newest, on all ranks, unless one of them trains: all have its state then. Collective.

    A rank trains once it knows that all have loaded. If one is lost before, the others begin once more, together.
    """
    if any(comm.gather_objects(trains)):
        return
    step, saved_by = comm.gather_objects(newest(folder) if comm.rank == 0 else None)[0]
    if saved_by:
        state = torch.load(folder / f"{step:06}" / f"{comm.rank % saved_by}-of-{saved_by}.pt", weights_only=True)
        for name, part in parts.items():
            part.load_state_dict(state[name])
    if comm.rank == 0:
        print(f"{comm.size} ranks begin at step {step}, saved by {saved_by}", flush=True)
    comm.gather_objects(None)


def batch(images: Tensor, labels: Tensor, step: int, rank: int, ranks: int) -> tuple[Tensor, Tensor]:
    """Return the batch of a rank at a step, always the same; rank r of n has the images r, r + n, …"""
    random = torch.Generator().manual_seed(step * ranks + rank)
    chosen = torch.randint(len(images[rank::ranks]), (32,), generator=random) * ranks + rank
    return images[chosen], labels[chosen]


def train(options: argparse.Namespace) -> None:
    """Train to `steps` with all that come, from where those that are there have come to."""
    digits = load_digits()
    data = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    comm = bk.elastic.join(options.endpoint, options.least)
    with bk.attach(model, optimizer, options.algorithm, comm=comm, timeout=60) as att:
        parts = {"model": model, "optimizer": optimizer, "att": att}  # resumed in this order
        news: list[Any] = [f"joined as rank {comm.rank} of {comm.size}"]  # and changes of the group
        att.on_regroup(news.append)
        trains = False
        while att.step < options.steps:
            with att.recoverable():
                if news:  # on all ranks, if on one
                    print(*news, sep="\n", flush=True)
                    news.clear()
                    begin(comm, trains, options.folder, parts)
                    trains = True
                step = att.step
                images, labels = batch(*data, step, comm.rank, comm.size)
                optimizer.zero_grad()
                loss = cross_entropy(model(images), labels)
                loss.backward()
                optimizer.step()
                if comm.rank == 0:
                    print(f"step {step} loss {loss.item()!r} ranks {comm.size}", flush=True)
                if att.step % options.every == 0:
                    state = {name: part.state_dict() for name, part in parts.items()}
                    save(options.folder, att.step, comm.rank, comm.size, state)


def algorithm(expression: str) -> tuple[bk.Rule, ...]:
    """Return the rules that an expression makes of the names of baguakit."""
    rooms = (bk, bk.algorithms, bk.stages, bk.compressors, bk.topology)
    return bk.rules.rules_of(eval(expression, {name: getattr(room, name) for room in rooms for name in room.__all__}))


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description="Train with ranks that come and go.")
    add = parser.add_argument
    add("--endpoint", required=True, help="host:port of the store, which python -m baguakit.store runs")
    add("--folder", type=Path, required=True, help="of the checkpoints, which all ranks can reach")
    add("--algorithm", type=algorithm, default="bytegrad(error_feedback=True)", help="an expression (%(default)s)")
    add("--least", type=int, default=1, help="ranks without which nobody trains (%(default)s)")
    add("--steps", type=int, default=400, help="optimizer steps in all (%(default)s)")
    add("--every", type=int, default=20, help="steps between checkpoints (%(default)s)")
    return parser.parse_args(words)


if __name__ == "__main__":
    train(arguments())
