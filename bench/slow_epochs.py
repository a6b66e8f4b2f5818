"""A job of several ranks, two loader workers each, that reads a dataset of 10 ms a sample through the cache."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

from baguakit.data import CachedDataset, LMDBStore


class Slow(Dataset):
    """10 ms a sample."""

    def __init__(self, samples, log):
        self.samples, self.log = samples, log

    def __len__(self):
        return self.samples

    def __getitem__(self, i):
        time.sleep(0.01)
        with open(self.log, "ab", buffering=0) as file:
            file.write(f"{i}\n".encode())
        return torch.full((3, 32, 32), float(i)), i


def epochs(folder, samples, epochs, ranks=2):
    """Seconds by epoch (of the slowest rank), the samples computed, in any order, and the ranks' cache reports."""
    log, root = folder / "log", Path(__file__).parents[1]
    numbers = [str(samples), str(epochs)]
    jobs = [
        subprocess.Popen(
            [sys.executable, __file__, str(rank), str(ranks), folder / "store", log, *numbers],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(root)},
        )
        for rank in range(ranks)
    ]
    try:
        assert [job.stdout.readline() for job in jobs] == ["ready\n"] * ranks
        for _ in range(epochs):
            for job in jobs:
                _say(job)
            reports = [json.loads(job.stdout.readline()) for job in jobs]
        for job in jobs:
            _say(job)
            assert job.wait(30) == 0
    finally:
        for job in jobs:
            job.kill()
            job.wait()
            job.stdout.close()
            job.stdin.close()
    seconds = [max(report["seconds"][epoch] for report in reports) for epoch in range(epochs)]
    return seconds, [int(line) for line in log.read_text().split()], reports


def _say(job):
    job.stdin.write("\n")
    job.stdin.flush()


def main(rank, ranks, path, log, samples, epochs):
    """One rank: prints its seconds and its cache's counts after each epoch; epochs begin at a line from the driver."""
    torch.set_num_threads(1)
    with LMDBStore(path) as store:
        cached = CachedDataset(Slow(samples, log), store)
        sampler = DistributedSampler(cached, ranks, rank)
        order = []
        loader = DataLoader(cached, 16, sampler=order, num_workers=2, persistent_workers=True)
        list(loader)  # nothing to read yet: starts the workers
        print("ready", flush=True)
        sys.stdin.readline()
        seconds = []
        for epoch in range(epochs):
            sampler.set_epoch(epoch)
            order[:] = sampler
            begun = time.perf_counter()
            for x, i in loader:
                assert (x == i.reshape(-1, 1, 1, 1)).all()
            seconds.append(time.perf_counter() - begun)
            print(json.dumps({"seconds": seconds, **vars(cached.report())}), flush=True)
            sys.stdin.readline()
        del loader


if __name__ == "__main__":
    main(*map(int, sys.argv[1:3]), *sys.argv[3:5], *map(int, sys.argv[5:7]))
    os._exit(0)
