"""The cache equals the dataset, whatever happens to the store."""

import copy
import pickle
import threading
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from baguakit.data import CachedDataset, LMDBStore, MemoryStore, Pickle, StoreError


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
    """What is computed of `dataset`, in this process."""

    def __init__(self, dataset):
        self.dataset, self.computed = dataset, []

    def cache_identity(self):
        return "tally"

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, i):
        self.computed.append(i)
        return self.dataset[i]


@given(st.lists(st.none() | st.integers() | st.text(), min_size=1, max_size=20), st.data())
def test_it_is_the_dataset_and_computes_each_sample_once(values, data):
    tally = Tally(values)
    cached = CachedDataset(tally, MemoryStore())
    for i in data.draw(st.lists(st.integers(-len(values), len(values) - 1), max_size=60)):
        assert cached[i] == values[i]
    assert len(tally.computed) == len({i % len(values) for i in tally.computed})
    report = cached.report()
    assert report.misses == len(tally.computed) and len(cached) == len(values)


def test_a_cached_none_is_a_hit():
    tally = Tally([None, None])
    cached = CachedDataset(tally, MemoryStore())
    assert [cached[0], cached[0], cached[1], cached[0]] == [None] * 4 and tally.computed == [0, 1]


@pytest.mark.parametrize("index", [1, -2, np.int64(1), torch.tensor(1), True])
def test_one_sample_has_one_key(index):
    tally = Tally([10, 11, 12])
    cached = CachedDataset(tally, MemoryStore())
    assert cached[1] == cached[index] == 11 and len(tally.computed) == 1


def test_samples_by_name_and_their_errors():
    words = {"a": 1, "b": None}
    cached = CachedDataset(words, MemoryStore())
    assert [cached["a"], cached["a"], cached["b"]] == [1, 1, None]
    with pytest.raises(KeyError):
        cached["c"]
    with pytest.raises(TypeError, match=r"by integer or str, not by tuple \(1, 2\)"):
        cached[1, 2]
    with pytest.raises(IndexError):
        CachedDataset([1], MemoryStore())[1]
    assert list(CachedDataset([1, 2, 3], MemoryStore())) == [1, 2, 3]


def test_changing_a_sample_changes_nothing():
    cached = CachedDataset([{"x": torch.zeros(2)}], MemoryStore(), codec=None)
    cached[0]
    cached[0]["x"] += 1
    assert cached[0]["x"].tolist() == [0, 0]


# Two datasets


def pairs():
    a = Numbers([1, 2, 3])
    return [
        (a, {}, Numbers([1, 2, 4]), {}),
        (a, {}, Numbers([1, 2, 3, 4]), {}),
        (a, {}, [1, 2, 3], {}),
        (a, {}, Subset(a, [2, 1, 0]), {}),
        (a, {"version": 1}, a, {"version": 2}),
        (a, {"version": 1}, a, {"version": "1"}),
        (a, {"name": "x"}, a, {"name": "y"}),
        (a, {}, a, {"codec": Pickle()}),
        (TensorDataset(torch.zeros(3)), {}, TensorDataset(torch.zeros(3).double()), {}),
        (TensorDataset(torch.arange(3)), {}, TensorDataset(torch.arange(3).flip(0)), {}),
    ]


@pytest.mark.parametrize("case", range(10))
def test_two_datasets_do_not_collide_and_equal_ones_share(case):
    a, a_options, b, b_options = pairs()[case]
    store = MemoryStore()
    first, second = CachedDataset(a, store, **a_options), CachedDataset(b, store, **b_options)
    for cached in (first, second, first, second):
        assert [repr(cached[i]) for i in range(3)] == [repr(cached.dataset[i]) for i in range(3)]
    assert store.stats().entries == 6
    again = CachedDataset(pairs()[case][0], store, **a_options)
    assert [repr(x) for x in again] == [repr(x) for x in map(a.__getitem__, range(3))] and again.report().misses == 0
    second.clear()
    assert store.stats().entries == 3


def test_equal_tensors_at_other_addresses_are_the_same_dataset():
    names = {CachedDataset(TensorDataset(torch.arange(5.0)[k:].clone()), MemoryStore()).namespace for k in (1, 1, 1)}
    assert len(names) == 1


def test_a_cache_of_a_cache_is_known_by_what_it_caches():
    def inner():
        return CachedDataset([1, 2], MemoryStore())

    used = inner()
    used[0]
    assert CachedDataset(used, MemoryStore()).namespace == CachedDataset(inner(), MemoryStore()).namespace


def test_what_cannot_be_told_apart_needs_a_name():
    locked = Numbers([threading.Lock()])
    with pytest.raises(ValueError, match=r"this Numbers cannot be told from other datasets.*pass name="):
        CachedDataset(locked, MemoryStore())
    CachedDataset(locked, MemoryStore(), name="locked")


def made(factor, offset=0):
    class Local(Numbers):
        """Not to be imported: known by its code and what it closes over."""

        def __init__(self, values):
            super().__init__(values)
            self.transform = lambda x: x * factor + 1

        @property
        def twice(self):
            return 2 * offset

        def __getitem__(self, i):
            return self.transform(self.values[i]) + self.twice

    return Local([1, 2, 3])


def test_local_classes_and_lambdas_are_known_by_their_code():
    def name(dataset):
        return CachedDataset(dataset, MemoryStore()).namespace

    assert name(made(2)) == name(made(2))
    assert len({name(made(2)), name(made(3)), name(made(2, 1)), name(Numbers([1, 2, 3]))}) == 4
    assert name(Numbers([lambda x: x + 1])) != name(Numbers([lambda x: x + 2])) != name(Numbers([lambda x: x - 1]))


# Refusals


class Stream(IterableDataset):
    def __iter__(self):
        return iter([1])


def test_what_cannot_be_cached_is_refused_in_words(tmp_path):
    with pytest.raises(TypeError, match="Stream has no samples by index"):
        CachedDataset(Stream(), MemoryStore())
    with pytest.raises(TypeError, match=r"store is a str; give LMDBStore\(path\)"):
        CachedDataset([1], str(tmp_path))
    cached = CachedDataset([threading.Event], MemoryStore(), name="events")
    with pytest.raises(
        TypeError, match=r"sample 0 of list cannot be cached: the sample is a builtins.type.*codec=Pickle"
    ):
        cached[0]


def test_an_error_of_the_dataset_is_its_own_and_is_not_kept():
    class Flaky(Numbers):
        def __getitem__(self, i):
            self.values[i] += 1
            if self.values[i] == 1:
                raise OSError("try again")
            return self.values[i]

    cached = CachedDataset(Flaky([0]), MemoryStore())
    with pytest.raises(OSError, match="try again"):
        cached[0]
    assert cached[0] == 2 and cached[0] == 2


# A store in trouble


class Broken(MemoryStore):
    """Fails as often as it is told to."""

    def __init__(self, fails):
        super().__init__()
        self.fails = fails

    def _maybe(self):
        if next(self.fails, False):
            raise StoreError("the store is broken")

    def get(self, key):
        self._maybe()
        return super().get(key)

    def put(self, key, value):
        self._maybe()
        return super().put(key, value)


@given(st.lists(st.booleans(), max_size=40), st.lists(st.integers(0, 4), max_size=30))
def test_a_broken_store_costs_time_never_a_sample(fails, reads):
    cached = CachedDataset([i * i for i in range(5)], Broken(iter(fails)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert [cached[i] for i in reads] == [i * i for i in reads]
        assert cached.__getitems__(reads) == [i * i for i in reads]
    assert len(caught) == (cached.report().errors > 0)


def test_a_full_store_recomputes_with_one_warning():
    tally = Tally([bytes([i]) * 1000 for i in range(10)])
    cached = CachedDataset(tally, MemoryStore(capacity_bytes=5000))
    with pytest.warns(RuntimeWarning, match="is full; what it does not hold is computed in every epoch") as warned:
        for _ in range(3):
            assert list(cached) == tally.dataset
    assert len(warned) == 1
    report = cached.report()
    kept = cached.store.stats().entries
    assert 3 <= kept <= 4 and report.hits == 2 * kept and report.misses == 30 - 2 * kept
    assert report.hit_rate == report.hits / 30 and report.not_stored == 3 * (10 - kept)
    assert f"{report.hit_rate:.1%} of 30 samples" in str(report)
    assert report.bytes_written == cached.store.stats().bytes and report.bytes_read == 2 * report.bytes_written


# In loaders


def test_threads_compute_each_sample_once():
    log = []

    class Slow(Numbers):
        def __getitem__(self, i):
            log.append(i)
            threading.Event().wait(0.002)
            return i

    cached = CachedDataset(Slow([0] * 20), MemoryStore())
    threads = [threading.Thread(target=lambda: [cached[i] for i in range(20)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(log) == list(range(20))


@pytest.mark.parametrize(
    "method, persistent", [("fork", False), ("fork", True), pytest.param("spawn", True, marks=pytest.mark.slow)]
)
def test_loader_workers_share_what_they_compute(tmp_path, method, persistent):
    pytest.importorskip("lmdb")
    log = tmp_path / "log"
    with LMDBStore(tmp_path / "store") as store:
        data = Numbers([(torch.full((3,), float(i)), str(i)) for i in range(24)], str(log))
        cached = CachedDataset(data, store)
        options = {"num_workers": 2, "persistent_workers": persistent, "multiprocessing_context": method}
        loader = DataLoader(cached, batch_size=4, shuffle=True, **options)
        for _ in range(3):
            seen = {}
            for x, names in loader:
                seen |= {name: x[k].tolist() for k, name in enumerate(names)}
            assert seen == {str(i): [float(i)] * 3 for i in range(24)}
        assert log.stat().st_size == 24
        report = cached.report()  # of all workers
        assert (report.misses, report.hits, report.errors) == (24, 48, 0)
        assert cached[3][1] == "3" and log.stat().st_size == 24  # and this process reads it, too


def test_a_memory_store_says_that_workers_do_not_share_it():
    cached = CachedDataset(Numbers([1, 2, 3]), MemoryStore())
    loader = DataLoader(cached, num_workers=1, multiprocessing_context="fork")
    with pytest.raises(RuntimeWarning, match=r"each loader worker fills its own; LMDBStore\(path\) is shared"):
        list(loader)


def test_copies_and_pickles_keep_the_name_and_share_the_store(tmp_path):
    pytest.importorskip("lmdb")
    cached = CachedDataset([1, 2], LMDBStore(tmp_path / "store"))
    cached[0]
    for other in (copy.copy(cached), pickle.loads(pickle.dumps(cached))):
        assert other[0] == 1 and other.namespace == cached.namespace
    with cached:
        assert cached[0] == 1
