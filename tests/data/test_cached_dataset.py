"""The cache equals the dataset, two datasets never collide in it, and what it cannot keep it refuses in words."""

import threading

import numpy as np
import pytest
import torch
from counted import Numbers, Tally, entries
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import IterableDataset, Subset, TensorDataset

from baguakit.data import CachedDataset, MemoryStore, Pickle


@given(st.lists(st.none() | st.integers() | st.text(), min_size=1, max_size=20), st.data())
def test_it_is_the_dataset_and_computes_each_sample_once(values, data):
    tally = Tally(values)
    cached = CachedDataset(tally, MemoryStore())
    for i in data.draw(st.lists(st.integers(-len(values), len(values) - 1), max_size=60)):
        assert cached[i] == values[i]
    assert len(tally.computed) == len({i % len(values) for i in tally.computed})
    report = cached.report()
    assert report.misses == len(tally.computed) and len(cached) == len(values)


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
    with pytest.raises(TypeError, match=r"is an integer or str, not the tuple \(1, 2\)"):
        cached[1, 2]
    with pytest.raises(IndexError):
        CachedDataset([1], MemoryStore())[1]
    assert list(CachedDataset([1, 2, 3], MemoryStore())) == [1, 2, 3]


def test_changing_a_sample_changes_nothing():
    cached = CachedDataset([{"x": torch.zeros(2)}], MemoryStore())
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
    assert entries(store) == 6
    again = CachedDataset(pairs()[case][0], store, **a_options)
    assert [repr(x) for x in again] == [repr(x) for x in map(a.__getitem__, range(3))] and again.report().misses == 0
    second.clear()
    assert entries(store) == 3


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
    with pytest.raises(ValueError, match=r"the content of this Numbers cannot be hashed.*pass name="):
        CachedDataset(locked, MemoryStore())
    CachedDataset(locked, MemoryStore(), name="locked")
    with pytest.raises(ValueError, match=r"the content of this Numbers cannot be hashed.*lambda.*pass name="):
        CachedDataset(Numbers([lambda x: x + 1]), MemoryStore())


# Refusals


class Stream(IterableDataset):
    def __iter__(self):
        return iter([1])


def test_what_cannot_be_cached_is_refused_in_words(tmp_path):
    with pytest.raises(TypeError, match="Stream has no samples by index"):
        CachedDataset(Stream(), MemoryStore())
    with pytest.raises(TypeError, match=r"store is LMDBStore\(path\), .*, not a str"):
        CachedDataset([1], str(tmp_path))
    for options, text in [
        ({"name": ""}, "name is a string that is not empty"),
        ({"name": 3}, "name is a string, not 3"),
        ({"version": 1.5}, "version is a string or a whole number, not 1.5"),
        ({"version": True}, "version is a string or a whole number, not True"),
        ({"codec": "plain"}, r"codec is Plain\(\) or Pickle\(\), not 'plain'"),
        ({"codec": Pickle}, r"codec is Plain\(\) or Pickle\(\), not <class"),
    ]:
        with pytest.raises((TypeError, ValueError), match=text):
            CachedDataset([1], MemoryStore(), **options)
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

    cached = CachedDataset(Flaky([0]), MemoryStore(), name="flaky")
    with pytest.raises(OSError, match="try again"):
        cached[0]
    assert cached[0] == 2 and cached[0] == 2
