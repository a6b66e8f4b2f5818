"""Datasets that count what is computed of them, for tests of the cache."""

from torch.utils.data import Dataset

from baguakit.data import LMDBStore, MemoryStore


def entries(store):
    """Return how many samples a store holds, of all datasets."""
    if isinstance(store, MemoryStore):
        return len(store._samples)
    if isinstance(store, LMDBStore):
        with store._environment().transaction() as transaction:
            return transaction.stat()["entries"]
    return sum(client.dbsize() for client in store._clients)


class Numbers(Dataset):
    """Sample i is `values[i]`; `calls` counts in a file, one byte a call, so that processes count together."""

    def __init__(self, values, log=None):
        self.values, self.log = values, log

    def __len__(self):
        return len(self.values)

    def __getitem__(self, i):
        if self.log is not None:
            with open(self.log, "ab") as file:
                file.write(b".")
        return self.values[i]


class Tally(Dataset):
    """A dataset that records which samples this process computes."""

    def __init__(self, dataset):
        self.dataset, self.computed = dataset, []

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, i):
        self.computed.append(i)
        return self.dataset[i]
