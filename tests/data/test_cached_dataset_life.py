"""The cache in use equals the dataset: with a store that fails or is full, in threads, workers, copies and pickles."""

import copy
import itertools
import pickle
import warnings

import pytest
import torch
from counted import Numbers, Tally, entries
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from baguakit.data import CachedDataset, LMDBStore, MemoryStore, StoreError
from baguakit.data.cached import position

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


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("trouble", ["errors", "corrupt"])
def test_a_damaged_sample_counts_once_and_each_failed_call_does(trouble, together):
    store = Broken(itertools.repeat(True)) if trouble == "errors" else MemoryStore()
    cached = CachedDataset([7, 8, 9], store, name="x")
    if trouble == "corrupt":
        for i in range(3):
            store.put(cached.namespace + position(i, None), b"no sample")
    with pytest.warns(RuntimeWarning, match=r"is broken|damaged") as warned:
        found = cached.__getitems__([0, 2]) if together else [cached[0], cached[2]]
    report = cached.report()
    assert found == [7, 9] and len(warned) == 1 and report.misses == 2
    assert {"errors": report.errors, "corrupt": report.corrupt} == {
        "errors": (trouble == "errors") * (5 if together else 6),
        "corrupt": 2 * (trouble == "corrupt"),
    }


def test_a_full_store_recomputes_with_one_warning():
    tally = Tally([bytes([i]) * 1000 for i in range(10)])
    cached = CachedDataset(tally, MemoryStore(capacity_bytes=5000))
    with pytest.warns(RuntimeWarning, match="is full; samples beyond are computed in every epoch") as warned:
        for _ in range(3):
            assert list(cached) == tally.dataset
    assert len(warned) == 1
    report = cached.report()
    kept = entries(cached.store)
    assert 3 <= kept <= 4 and report.hits == 2 * kept and report.misses == 30 - 2 * kept
    assert report.hit_rate == report.hits / 30 and report.not_stored == 3 * (10 - kept)
    assert f"{report.hit_rate:.1%} of 30 samples" in str(report)
    assert report.bytes_written == cached.store._used and report.bytes_read == 2 * report.bytes_written


# In loaders


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
