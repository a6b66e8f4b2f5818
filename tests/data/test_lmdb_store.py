"""The store in a file: killed, cut short, on another boot, on a foreign directory, in forked and spawned processes."""

import fcntl
import multiprocessing as mp
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from counted import entries
from tiers import slow_after

from baguakit.data import CachedDataset, LMDBStore, StoreError, lmdb_store
from baguakit.data.cached import position

lmdb = pytest.importorskip("lmdb")

A = b"a" * 16


@pytest.fixture
def path(tmp_path):
    return tmp_path / "store"


def unsynced(path):
    return list(path.glob("unsynced-*"))


WRITER = """
import sys
from baguakit.data import LMDBStore
store = LMDBStore(sys.argv[1])
i = 0
while True:
    with store.claim(b"a" * 16 + i.to_bytes(4, "big")):
        store.put(b"a" * 16 + i.to_bytes(4, "big"), bytes([i % 251]) * (5000 + i % 5000))
    i += 1
    if i == 50:
        print("writing", flush=True)
"""


def writer(path):
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, cwd=ROOT)
    assert process.stdout.readline() == b"writing\n"
    return process


ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("delays", slow_after(1, [[0.013], [0.0, 0.013, 0.031]]))
def test_a_writer_killed_in_the_middle_leaves_a_readable_store(path, delays):
    """Writers, each killed at another moment, with a reader open throughout."""
    with LMDBStore(path) as store:
        for delay in delays:
            process = writer(path)
            time.sleep(delay)
            process.send_signal(signal.SIGKILL)
            process.wait()
            process.stdout.close()
            count = entries(store)
            assert count >= 50
            for i in range(count):
                value = store.get(A + i.to_bytes(4, "big"))
                assert value == bytes([i % 251]) * (5000 + i % 5000)
        with store.claim(A + (0).to_bytes(4, "big")):  # free, whoever died holding it
            assert store.put(A + b"after", b"x") and store.get(A + b"after") == b"x"


def hold(path, key, ready):
    with LMDBStore(path).claim(key):
        ready.send(1)
        time.sleep(60)


@pytest.mark.parametrize("method", slow_after(1, ["fork", "spawn"]))
def test_a_claim_excludes_other_processes_until_its_holder_dies(path, method):
    context = mp.get_context(method)
    with LMDBStore(path) as store:
        store.put(A, b"opened before the fork")
        ours, theirs = context.Pipe()
        process = context.Process(target=hold, args=(path, A, theirs), daemon=True)
        process.start()
        ours.recv()
        with pytest.raises(BlockingIOError):
            fcntl.lockf(store._environment().locks, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, lmdb_store.claim_byte(A))
        with store.claim(A + b"another"):
            pass
        process.kill()
        with store.claim(A):
            pass
        process.join()


def child(store, pipe):
    pipe.send((store.get(A), store.put(A + b"child", b"from the child")))


@pytest.mark.parametrize("method", slow_after(1, ["fork", "spawn"]))
def test_an_open_store_goes_to_children(path, method):
    context = mp.get_context(method)
    with LMDBStore(path) as store:
        store.put(A, b"x")
        for _ in range(2):
            ours, theirs = context.Pipe()
            process = context.Process(target=child, args=(store, theirs))
            process.start()
            assert ours.recv() == (b"x", True)
            process.join()
            assert process.exitcode == 0
            assert store.get(A + b"child") == b"from the child"
            assert store.put(A + b"parent", b"y")


def test_two_stores_of_a_process_share_what_is_open(path):
    first, second = LMDBStore(path), LMDBStore(path)
    first.put(A, b"x")
    assert second.get(A) == b"x"
    first.close()
    assert second.get(A) == b"x" and first.get(A) == b"x"
    second.close()
    assert path not in lmdb_store._environments


def test_closed_it_survives_a_crash_and_open_it_starts_anew(path, monkeypatch):
    with LMDBStore(path) as store:
        store.put(A, b"x")
        (mark,) = unsynced(path)
    assert not unsynced(path)
    monkeypatch.setattr(lmdb_store, "boot_id", lambda: "another")
    with LMDBStore(path) as store:
        assert store.get(A) == b"x"
    mark.touch()
    with LMDBStore(path) as store, pytest.warns(RuntimeWarning, match="emptied: the machine crashed"):
        assert store.get(A) is None
    assert not unsynced(path)


@pytest.mark.slow
def test_closing_says_that_all_is_on_disk_until_another_process_writes(path):
    process = writer(path)
    with LMDBStore(path) as store:
        store.get(A)
    while not unsynced(path):  # until the writer's next sample
        time.sleep(0.001)
    process.kill()
    process.wait()
    process.stdout.close()
    with LMDBStore(path):
        pass
    assert not unsynced(path)


@pytest.mark.parametrize("damage", ["cut", "garbage", "header"])
def test_with_a_damaged_file_the_dataset_goes_on_without(path, damage):
    with LMDBStore(path) as store:
        for i in range(100):
            store.put(A + bytes([i]), bytes(10_000))
    data = path / "data.mdb"
    content = data.read_bytes()
    data.write_bytes({"cut": content[: len(content) // 2], "garbage": b"x" * 20_000, "header": content[:100]}[damage])
    store = LMDBStore(path)
    with pytest.warns(RuntimeWarning, match="if it is damaged, empty this directory; samples are"):
        assert CachedDataset([5], store, name="x")[0] == 5
    for each in path.iterdir():
        each.unlink()
    with store:
        assert store.put(A, b"x") and store.get(A) == b"x"


def test_a_flipped_byte_is_a_sample_recomputed(path):
    data = list(range(1000))
    with LMDBStore(path) as store:
        cached = CachedDataset([data], store, name="numbers")
        assert cached[0] == data
        key = cached.namespace + position(0, None)
        value = bytearray(store.get(key))
        value[-1] ^= 1
        store.put(key, bytes(value))
        with pytest.warns(RuntimeWarning, match="holds a damaged sample"):
            assert cached[0] == data
        assert cached[0] == data and cached.report().corrupt == 1  # seen twice, without and with the claim
        assert cached.report().misses == 2 and cached.report().hits == 1


def test_places_are_refused_in_words(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is a file"):
        LMDBStore(tmp_path / "file")
    lmdb.open(str(tmp_path / "other")).close()
    with pytest.raises(ValueError, match="holds an LMDB file that is not a store of samples"):
        LMDBStore(tmp_path / "other")
    monkeypatch.setattr(lmdb_store, "file_system", lambda path: "nfs4")
    with pytest.raises(ValueError, match="is on nfs4"):
        LMDBStore(tmp_path / "far")


def test_where_it_cannot_write_the_dataset_goes_on_without(tmp_path):
    (tmp_path / "blocked").mkdir()
    store = LMDBStore(tmp_path / "blocked" / "store")
    (tmp_path / "blocked" / "store").write_text("in the way")
    with pytest.raises(StoreError, match="cannot be opened"):
        store.get(A)
    with pytest.warns(RuntimeWarning, match="computed without the cache"):
        cached = CachedDataset([5, 6], store, name="x")
        assert [cached[0], cached[1], cached[0]] == [5, 6, 5]
    assert cached.report().errors == 9 and cached.report().misses == 3  # each is asked for, asked for again and put


def test_a_full_disk_is_a_full_store():
    """A file system of four mebibytes, where one can be mounted."""
    folder = Path("/tmp") / f"baguakit-full-{os.getpid()}"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", folder], capture_output=True).returncode:
        folder.rmdir()
        pytest.skip("mounting needs root")
    try:
        with LMDBStore(folder / "store") as store:
            kept = sum(store.put(A + bytes([i]), bytes(20_000)) for i in range(250))
            assert 60 < kept < 160 and all(store.get(A + bytes([i])) == bytes(20_000) for i in range(kept))
    finally:
        subprocess.run(["umount", "-l", folder], check=True)
        folder.rmdir()


def test_without_the_package_one_sentence_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "lmdb", None)
    with pytest.raises(ImportError, match=r"LMDBStore needs the lmdb package: pip install lmdb"):
        LMDBStore(tmp_path)


def test_the_space_of_cleared_samples_is_used_again(path):
    capacity = 4 << 20
    with LMDBStore(path, capacity) as store:
        for round in range(20):
            dataset = bytes([round]) * 16
            for i in range(100):
                store.put(dataset + bytes([i]), os.urandom(40_000))
            assert 60 < entries(store) <= 100
            store.clear(dataset)
            assert entries(store) == 0
    assert (path / "data.mdb").stat().st_size <= capacity * 9 // 8 + (16 << 20)


def test_the_package_is_imported_without_file_locks(tmp_path):
    """As on Windows."""
    code = "import sys; sys.modules['fcntl'] = None; import baguakit as bk; bk.data.LMDBStore(sys.argv[1])"
    ended = subprocess.run([sys.executable, "-c", code, tmp_path], cwd=ROOT, capture_output=True, text=True)
    assert "ValueError: LMDBStore needs the file locks of POSIX systems; use MemoryStore" in ended.stderr
