"""Ranks with windows are killed at drawn points: the others go on, and never see half a message.

Processes are forked, so that hundreds of them begin quickly. All values of a message are equal.
"""

import os
import random
import signal
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from forks import end, forked, kill

import baguakit as bk
from baguakit.compressors import MinMaxUInt8
from baguakit.topology import FullyConnected

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
SIZE, LIMIT = 5, timedelta(seconds=60)


def whole(x) -> bool:
    return float(x.max() - x.min()) <= 1e-3 * float(x.abs().max())  # a compressor's blocks differ by roundings


def write_until_alone(folder, rank, seed, compressor):
    """Put, accumulate, get and lock with random others until no other lives; every buffer must always be whole."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), SIZE)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=SIZE, timeout=LIMIT)
    bk.Comm().gather_objects(rank)  # which connects the ranks of the group
    files = len(os.listdir("/proc/self/fd"))
    draw, x = random.Random(f"{seed}/{rank}"), torch.zeros(30_000)
    window = bk.Window(x, FullyConnected(), bk.Comm(), compressor, zero=True)
    (folder / f"ready{rank}").touch()
    others = [r for r in range(SIZE) if r != rank]
    while len(window.lost) < SIZE - 1:
        to, wait = draw.choice(others), draw.random() < 0.3
        x.fill_(float(draw.randrange(1, 100)))
        call = draw.choice(("put", "put", "accumulate", "get", "mutex", "update"))
        if call == "get":
            window.get({to: 1.0}, wait=wait)
        elif call == "mutex":
            with window.mutex([to]):
                window.put(dst_weights=[to], wait=wait)
        elif call == "update":
            window.update(reset=draw.random() < 0.5)
        else:
            getattr(window, call)(dst_weights=[to], wait=wait)
        for r, buffer in [(rank, x), *((r, window.fetch(r)) for r in others)]:
            if not whole(buffer):
                (folder / "torn").touch()
                raise AssertionError(f"the values of {r} on {rank} are from {buffer.min()} to {buffer.max()}")
    window.close()
    ours = [each.name for each in threading.enumerate() if each.name == "baguakit window"]
    assert not ours, "its threads have ended"
    assert len(os.listdir("/proc/self/fd")) <= files
    return True


@pytest.mark.parametrize("compressor", [None, MinMaxUInt8()], ids=["exact", "MinMaxUInt8"])
@pytest.mark.parametrize("seed", range(25))
def test_ranks_are_killed_one_after_another(tmp_path, seed, compressor):
    """4 of 5 ranks are killed, at drawn points: 200 kills in all. The last one is left alone, with nothing open."""
    draw = random.Random(seed)
    children = [forked(write_until_alone, tmp_path, rank, seed, compressor) for rank in range(SIZE)]
    try:
        while len(list(tmp_path.glob("ready*"))) < SIZE:
            time.sleep(0.01)
        for victim in draw.sample(range(1, SIZE), SIZE - 1):
            time.sleep(draw.random() * 0.1)
            kill(children[victim])
        assert end(children[0]) == 0
        assert not (tmp_path / "torn").exists()
    finally:
        for child in children:
            try:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
            except (ProcessLookupError, ChildProcessError):
                pass
