"""Behaviour that all stores share."""

import copy
import pickle
import threading

import numpy as np
import pytest
import torch
from counted import entries
from redis_server import Server

from baguakit.data import LMDBStore, MemoryStore, RedisStore

A, B = b"a" * 16, b"b" * 16


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    with Server(tmp_path_factory.mktemp("one")) as one, Server(tmp_path_factory.mktemp("two")) as two:
        yield [one, two]


@pytest.fixture(params=["memory", "lmdb", "redis", "two redis"])
def store(request, tmp_path):
    if request.param == "memory":
        yield MemoryStore()
    elif request.param == "lmdb":
        pytest.importorskip("lmdb")
        with LMDBStore(tmp_path / "store") as store:
            yield store
    else:
        servers = request.getfixturevalue("servers")[: 1 + ("two" in request.param)]
        with RedisStore([s.url for s in servers]) as store:
            store.clear()
            yield store


def test_it_gives_back_what_was_put(store):
    assert store.get(A + b"1") is None
    values = {A + bytes([i]): bytes([i]) * (1000 * i) for i in range(20)}
    for key, value in values.items():
        assert store.put(key, value)
    assert {key: store.get(key) for key in values} == values
    assert store.get_many([*values, B + b"x"]) == [*values.values(), None]
    assert entries(store) == 20
    assert store.put(A + b"\1", b"new") and store.get(A + b"\1") == b"new"


def test_one_dataset_is_cleared_without_the_other(store):
    for i in range(30):
        store.put(A + bytes([i]), b"a")
        store.put(B + bytes([i]), b"b")
    store.clear(A)
    assert entries(store) == 30
    assert store.get(A + b"\0") is None and store.get(B + b"\0") == b"b"
    store.clear()
    assert entries(store) == 0


def test_it_travels_to_other_processes_as_its_settings(store):
    store.put(A, b"x")
    for other in (copy.copy(store), pickle.loads(pickle.dumps(store))):
        assert repr(other) == repr(store)
        assert other.get(A) == (b"x" if store.shared else None)
    assert "secret" not in repr(store)


def test_it_opens_again_after_closing(store):
    store.put(A, b"x")
    store.close()
    store.close()
    assert store.get(A) == b"x"


def test_one_thread_at_a_time_holds_a_claim(store):
    inside, most, turns = [], [], []

    def work():
        for _ in range(5):
            with store.claim(A):
                inside.append(1)
                most.append(len(inside))
                inside.pop()
                turns.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(most) == 1 and len(turns) == 20


def test_claims_of_two_keys_do_not_wait_for_each_other(store):
    with store.claim(A), store.claim(B):
        pass


def test_a_claim_is_free_after_an_error(store):
    with pytest.raises(KeyError), store.claim(A):
        raise KeyError
    with store.claim(A):
        pass


@pytest.mark.parametrize("make", [lambda path, n: MemoryStore(n), LMDBStore], ids=["memory", "lmdb"])
def test_a_full_store_keeps_what_it_has_until_it_is_cleared(make, tmp_path):
    if make is LMDBStore:
        pytest.importorskip("lmdb")
    store = make(tmp_path / "store", 1 << 20)
    value = bytes(10_000)
    kept = [i for i in range(200) if store.put(A + bytes([i]), value)]
    assert 50 < len(kept) < 110 and kept == list(range(len(kept)))
    assert not store.put(B, value) and store.get(A + b"\0") == value
    store.clear(A)
    assert store.put(B, value)
    assert store.get(A + b"\0") is None and store.get(B) == value
    assert entries(store) == 1
    assert not store.put(B + b"x", bytes(2 << 20))  # never fits
    assert store.get(B) == value


def test_limits_are_refused_in_words():
    for capacity in (0, -1, float("nan"), float("inf"), 1.5, True, "1e9", torch.tensor(8)):
        with pytest.raises((TypeError, ValueError), match="capacity_bytes is a whole number, 1 or more, not "):
            MemoryStore(capacity)
    assert MemoryStore(np.int64(8)).capacity_bytes == 8


def test_limits_of_a_file_are_refused_in_words(tmp_path):
    pytest.importorskip("lmdb")
    for capacity in (0, 1000, float("nan"), float("inf"), 1e9, True, "1e9", None, 1 << 62):
        with pytest.raises((TypeError, ValueError), match="capacity_bytes is a whole number, 1048576 to "):
            LMDBStore(tmp_path, capacity)
    for path, sentence in {"": "path is a string that is not empty", None: "path is a directory, not None"}.items():
        with pytest.raises((TypeError, ValueError), match=sentence):
            LMDBStore(path)
