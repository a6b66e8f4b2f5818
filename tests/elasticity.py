"""examples/elastic.py as a module, and runs of it on live ranks."""

import contextlib
import importlib.util
import io
import os
import re
import signal
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

from pool import ranks

import baguakit as bk

PROGRAM = Path(__file__).parents[1] / "examples" / "elastic.py"
EVERY = 10  # steps between checkpoints


@cache
def digits():
    """Return the images and labels, to send to ranks: each would take a second to import scikit-learn."""
    from sklearn.datasets import load_digits

    return load_digits()


def elastic(images=None, labels=None):
    """Return the example as a module; on a rank, with these images and labels in the place of scikit-learn's."""
    if images is not None:
        datasets = SimpleNamespace(load_digits=lambda: SimpleNamespace(data=images, target=labels))
        sys.modules.update({"sklearn": SimpleNamespace(datasets=datasets), "sklearn.datasets": datasets})
    spec = importlib.util.spec_from_file_location("elastic", PROGRAM)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def trained(folder, steps, victim_at, images, labels):
    """Train on this rank, and return what it prints; rank 1 is killed at step `victim_at`, if that is a number."""
    program, said = elastic(images, labels), io.StringIO()
    batches = program.batches

    def until_killed(rank, ranks, begin, end):
        for step, *batch in batches(rank, ranks, begin, end):
            if (rank, step) == (1, victim_at):
                os.kill(os.getpid(), signal.SIGKILL)
            yield step, *batch

    program.batches, attach = until_killed, bk.attach
    with contextlib.redirect_stdout(said), patch.object(bk, "attach", lambda *a, **k: attach(*a, **k | {"timeout": 3})):
        try:
            program.train(Path(folder), steps, EVERY)
        except RuntimeError as error:
            if victim_at is None or "rank 1 is dead" not in str(error):
                raise
    return said.getvalue()


def undisturbed(n, steps, folder):
    """Return the lines that rank 0 prints in a run that nobody kills."""
    return ranks(n, trained, folder, steps, None, digits().data, digits().target)[0].splitlines()


def losses(lines):
    """Return all losses that were printed of every step."""
    found = {}
    for line in lines:
        if match := re.match(r"step (\d+) loss (\S+)$", line):
            found.setdefault(int(match[1]), set()).add(match[2])
    return found


def same_losses(lines, steps, folder):
    """Raise unless every step was seen with one loss, that of a run that nobody disturbed."""
    found, expected = losses(lines), losses(undisturbed(2, steps, folder))
    assert found == expected and len(found) == steps and all(len(each) == 1 for each in found.values())
