"""The store in Redis servers: passwords, TLS, several hosts, full, killed in the middle of a run."""

import sys
import time
import traceback
from collections import Counter
from urllib.parse import quote

import pytest
from redis_server import Server

from baguakit.data import CachedDataset, RedisStore, StoreError, redis_store

A = b"a" * 16


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with Server(tmp_path_factory.mktemp("redis")) as server:
        yield server


def test_a_password_is_needed_accepted_and_never_shown(server):
    for address in (server.url, f"redis://default:secret%20%26%20long@{server.address}/1"):
        store = RedisStore(address)
        assert store.put(A, b"x") and store.get(A) == b"x"
        assert "secret" not in repr(store) and server.address in repr(store)
    for user in ("", ":wrong@"):
        with pytest.raises(StoreError, match=f"Redis at {server.address} failed: Authentication") as failure:
            RedisStore(user + server.address).get(A)
        assert "wrong" not in str(failure.value).replace("WRONGPASS", "").replace("wrong number", "")


def test_tls_is_spoken_and_strangers_are_not_trusted(tmp_path):
    with Server(tmp_path, tls=True) as server:
        store = RedisStore(f"{server.url}?ssl_ca_certs={server.ca_file}")
        assert store.put(A, b"x") and store.get(A) == b"x"
        with pytest.raises(StoreError, match="certificate"):
            RedisStore(server.url).get(A)
        with pytest.raises(StoreError):
            RedisStore(server.url.replace("rediss", "redis") + "?socket_timeout=0.5").get(A)


def test_options_of_tls_reach_the_package():
    store = RedisStore("rediss://far/2?ssl_ca_certs=/ca.pem&ssl_certfile=/own.pem&ssl_keyfile=/own.key")
    options = store._clients[0].connection_pool.connection_kwargs
    assert options.items() >= {"db": 2, "ssl_ca_certs": "/ca.pem", "ssl_certfile": "/own.pem"}.items()


def test_addresses_are_refused_in_words():
    with pytest.raises(ValueError, match="hosts has an address that is not of Redis") as failure:
        RedisStore("http://user:secret@far:1")
    assert "secret" not in str(failure.value)
    for hosts in ([], ["a:1", "redis://a:1"]):
        with pytest.raises(ValueError, match="at least one Redis server, and none twice"):
            RedisStore(hosts)


SECRET = "hush"


@pytest.mark.parametrize("special", [*"#?/@:%[] \\&+\"'", "%2", "1#", "1?", "1/", "\t"])
@pytest.mark.parametrize(
    "form", ["redis://user:{}@far:6379", "rediss://:{}@far", "user:{}@far:6379/1", "unix://:{}@/a"]
)
def test_no_error_shows_a_password_whatever_its_characters(form, special):
    for secret in (f"{special}{SECRET}", f"{SECRET}{special}", f"{SECRET}{special}{SECRET}"):
        try:
            store = RedisStore(form.format(secret))
        except ValueError as error:
            text = "".join(traceback.format_exception(error))
            assert "hosts has an address that is not of Redis (not shown, since it may hold a password)" in str(error)
        else:
            text = repr(store) + str(store.hosts)
            assert store._clients[0].connection_pool.connection_kwargs["password"] == secret
        assert SECRET not in text.replace(form, "")
    encoded = RedisStore(form.format(quote(f"{SECRET}{special}", safe="")))
    assert encoded._clients[0].connection_pool.connection_kwargs["password"] == f"{SECRET}{special}"
    assert SECRET not in repr(encoded)


@pytest.mark.parametrize(
    "hosts, text",
    [
        ("", "an address that is not of Redis"),
        ("redis://", "an address that is not of Redis"),
        ("unix://far", "an address that is not of Redis"),
        (["far:1", ":2"], "an address that is not of Redis"),
        ("far:65536", "an address that is not of Redis"),
        ("1234567:1234567@far:1:1", "an address that is not of Redis"),
        (["far:1", None], "hosts is a Redis address or a list of them, not of type list"),
        (6379, "hosts is a Redis address or a list of them, not of type int"),
        (b"far:1", "hosts is a Redis address or a list of them, not of type bytes"),
        ("redis://far:1?color=red", r"the \? in the address of far:1 are not for Redis"),
    ],
)
def test_hosts_are_refused_in_one_sentence(hosts, text):
    with pytest.raises((TypeError, ValueError), match=text) as failure:
        RedisStore(hosts)
    assert "1234567" not in str(failure.value)


def test_a_new_host_takes_its_share_and_moves_no_other_sample():
    four = RedisStore([f"host{i}:6379" for i in range(4)])
    five = RedisStore([f"host{i}:6379" for i in [4, 2, 0, 3, 1]])  # in another order
    keys = [A + i.to_bytes(8, "big") for i in range(5000)]
    before = [four.hosts[four.host_of(key)] for key in keys]
    after = [five.hosts[five.host_of(key)] for key in keys]
    moved = [new for old, new in zip(before, after, strict=True) if old != new]
    assert set(moved) == {"host4:6379"} and abs(len(moved) / 5000 - 1 / 5) < 0.02
    assert all(abs(share / 5000 - 1 / 5) < 0.02 for share in Counter(after).values())


def test_a_full_server_keeps_what_it_has(tmp_path):
    with Server(tmp_path, maxmemory="5mb", maxmemory_policy="noeviction") as server:
        store = RedisStore(server.url)
        cached = CachedDataset([bytes([i]) * 100_000 for i in range(100)], store)
        with pytest.warns(RuntimeWarning, match="is full") as warned:
            assert [cached[i] for i in range(100)] == cached.dataset
        assert len(warned) == 1 and 20 < cached.report().not_stored < 90
        assert [cached[i] for i in range(100)] == cached.dataset
        assert cached.report().hits == 100 - cached.report().not_stored // 2


def test_killed_in_the_middle_it_costs_time_and_comes_back(tmp_path, monkeypatch):
    monkeypatch.setattr(redis_store, "RETRY", 0.5)
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    with Server(tmp_path / "one") as one, Server(tmp_path / "two") as two:
        store = RedisStore([one.url, two.url])
        cached = CachedDataset([i * i for i in range(60)], store)
        for batch in ([cached[i] for i in range(60)], cached.__getitems__(range(60))):
            assert batch == cached.dataset
        assert cached.report().misses == cached.report().hits == 60
        one.kill()
        with pytest.warns(RuntimeWarning, match=f"Redis at {one.address} failed") as warned:
            assert [cached[i] for i in range(60)] == cached.dataset
            assert cached.__getitems__(range(60)) == cached.dataset
        assert len(warned) == 1 and cached.report().errors > 0
        lost = cached.report().misses - 60
        assert 2 * 15 < lost < 2 * 45  # one host's share, twice; the other's are hits
        one.start()
        time.sleep(0.6)
        before = cached.report()
        for _ in range(2):
            assert [cached[i] for i in range(60)] == cached.dataset
        assert cached.report().misses - before.misses == lost // 2
        assert cached.report().errors == before.errors


def test_clear_leaves_other_datasets_and_other_keys(server):
    store, other = RedisStore(server.url), b"b" * 16
    store._clients[0].set("theirs", "x")
    for key in (A + b"1", other + b"1"):
        store.put(key, b"x")
    store.clear(A)
    assert [store.get(key + b"1") for key in (A, other)] == [None, b"x"]
    store.clear()
    assert store.get(other + b"1") is None and store._clients[0].get("theirs") == b"x"


def test_a_claim_of_a_dead_process_expires(server, monkeypatch):
    monkeypatch.setattr(redis_store, "CLAIM", 0.3)
    store = RedisStore(server.url)
    store.claim(A).__enter__()  # and never left
    begun = time.monotonic()
    with store.claim(A):
        assert time.monotonic() - begun < 1.0


def test_without_the_package_one_sentence_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(ImportError, match=r"RedisStore needs the redis package: pip install redis"):
        RedisStore()
