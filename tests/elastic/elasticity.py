"""examples/elastic.py as a module, and runs of it, each rank a process."""

import importlib.util
import os
import re
import sys
import tempfile
import time
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import torch
from crew import context, crew

PROGRAM = Path(__file__).parents[2] / "examples" / "elastic.py"
EVERY = 10  # steps between checkpoints
FOR_EVER = 10**6  # steps


@cache
def digits():
    """Return the images and labels, to send to ranks: each would take a second to import scikit-learn."""
    from sklearn.datasets import load_digits

    found = load_digits()
    return found.data, found.target


def elastic(images=None, labels=None):
    """Return the example as a module; on a rank, with these images and labels in the place of scikit-learn's."""
    if images is not None:
        datasets = SimpleNamespace(load_digits=lambda: SimpleNamespace(data=images, target=labels))
        sys.modules.update({"sklearn": SimpleNamespace(datasets=datasets), "sklearn.datasets": datasets})
    spec = importlib.util.spec_from_file_location("elastic", PROGRAM)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def train(words, data, output):
    """Be a rank, as the program is that these words start."""
    torch.set_num_threads(1)
    sys.stdout = sys.stderr = open(output, "w", buffering=1)  # noqa: SIM115
    program = elastic(*data)
    batch = program.batch

    def noted(images, labels, step, rank, ranks):
        print(f"makes step {step}")  # the program prints only what rank 0 has made
        return batch(images, labels, step, rank, ranks)

    program.batch = noted
    program.train(program.arguments(words))


class Rank:
    """A process that runs the example.

    Args:
        store: a crew, which ends this process with all others.
        folder: of the checkpoints.
        steps: in all.
        more: arguments of the program.
    """

    def __init__(self, store, folder, steps, *more):
        handle, output = tempfile.mkstemp(dir=folder.parent)
        os.close(handle)
        self.output = Path(output)
        words = ["--endpoint", store.address, "--folder", str(folder), "--steps", str(steps)]
        words += ["--every", str(EVERY), *map(str, more)]
        self.process = context.Process(target=train, args=(words, digits(), output), daemon=True)
        self.process.start()
        store.processes.append(self)

    @property
    def lines(self):
        """The whole lines that were printed so far."""
        return self.output.read_text().rpartition("\n")[0].splitlines()

    @property
    def steps(self):
        """(step, loss, ranks) of the steps that were printed so far."""
        found = [re.match(r"step (\d+) loss (\S+) ranks (\d+)$", line) for line in self.lines]
        return [(int(m[1]), float(m[2]), int(m[3])) for m in found if m]

    @property
    def begun(self):
        """The steps that it has begun to make, in order, those of other ranks than 0 too."""
        return [int(line.removeprefix("makes step ")) for line in self.lines if line.startswith("makes step ")]

    def kill(self):
        """End it at once."""
        self.process.kill()
        self.process.join()

    def leave(self):
        """Let it leave, and return its exit status."""
        self.process.terminate()
        self.process.join()
        return self.process.exitcode


def wait_for(happened, ranks, seconds=90):
    """Wait until `happened()` is true, and return what it is; show what ranks have printed if it does not become so."""
    deadline = time.monotonic() + seconds
    while not (found := happened()):
        assert time.monotonic() < deadline, [rank.lines[-20:] for rank in ranks]
        time.sleep(0.02)
    return found


def leader_of(ranks, size):
    """Wait until one of these ranks has made a step in a group of this size as its rank 0, and return it."""
    return wait_for(lambda: next((r for r in ranks if r.steps and r.steps[-1][2] == size), None), ranks)


def run(n, folder, steps, *more):
    """Train with n ranks that begin together, and return the lines of rank 0."""
    with crew("") as store:
        ranks = [Rank(store, folder, steps, "--least", n, *more) for _ in range(n)]
        for rank in ranks:
            rank.process.join()
            assert rank.process.exitcode == 0, rank.lines[-20:]
        return next(rank.lines for rank in ranks if rank.steps)


def begins(lines):
    """Return the lines that say from where a group begins."""
    return [line for line in lines if " begin at step " in line]


def losses(lines):
    """Return all losses that were printed of every step."""
    found = {}
    for line in lines:
        if match := re.match(r"step (\d+) loss (\S+) ranks", line):
            found.setdefault(int(match[1]), set()).add(match[2])
    return found


def alone(sizes):
    """Return the losses of rank 0 over steps in groups of these sizes, all trained by this process."""
    program, (images, labels) = elastic(), digits()
    images, labels = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    threads, found = torch.get_num_threads(), []
    torch.set_num_threads(1)  # as the ranks: sums over more are not the same bits
    for step, size in enumerate(sizes):
        each = []
        for rank in range(size):
            x, y = program.batch(images, labels, step, rank, size)
            loss = torch.nn.functional.cross_entropy(model(x), y)
            each.append((loss, torch.autograd.grad(loss, list(model.parameters()))))
        for p, *gradients in zip(model.parameters(), *(g for _, g in each), strict=True):
            p.grad = torch.stack(gradients).sum(0) / size
        optimizer.step()
        found.append(each[0][0].item())
    torch.set_num_threads(threads)
    return found
