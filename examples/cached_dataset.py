"""A slow dataset read by loader workers: computed once, by any of them, and read from one file of the node by all.

Run it twice: the second run finds the samples of the first. Ranks share them, too:

    python examples/cached_dataset.py
    torchrun --standalone --nproc_per_node=2 examples/cached_dataset.py
"""

import os
import tempfile
import time

import torch
from torch.utils.data import DataLoader, Dataset

import baguakit as bk


class Slow(Dataset):
    """Images that take 10 ms to decode."""

    def __len__(self):
        return 400

    def __getitem__(self, i):
        time.sleep(0.01)
        return torch.full((3, 64, 64), i % 256, dtype=torch.uint8), i


if __name__ == "__main__":
    folder = os.path.join(tempfile.gettempdir(), f"baguakit-{bk.__version__}-example")
    with bk.data.LMDBStore(folder, capacity_bytes=1 << 30) as store:
        data = bk.data.CachedDataset(Slow(), store, version=1)  # another version reads none of this one's samples
        loader = DataLoader(data, batch_size=16, num_workers=2)
        for epoch in range(3):
            begun = time.perf_counter()
            for image, _ in loader:
                image.float().add_(torch.randn(image.shape))  # augment here, behind the cache
            print(f"epoch {epoch}: {time.perf_counter() - begun:.2f} s; {data.report()}")
