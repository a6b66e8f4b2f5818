"""A store of samples in Redis servers, which several nodes can share."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from hashlib import blake2b
from itertools import islice
from operator import methodcaller
from types import NoneType
from typing import Any, TypeVar

from ..arguments import integer, real, text, truth
from .stores import DATASET, Store, StoreError, StoreStats, package

T = TypeVar("T")

GLOB, LITERAL = r"([*?\[\]^\\])", r"\\\1"  # the special characters of Redis patterns, and their escape
TLS_NAMES = {"ca_file": "ssl_ca_certs", "cert_file": "ssl_certfile", "key_file": "ssl_keyfile"}
KINDS = "host:port, redis://…, rediss://… (TLS) or unix://…"
# Special characters of user and password are percent-encoded as in URLs (# as %23).
ADDRESS = re.compile(
    r"(?P<scheme>[a-z]+)://((?:[^@/?#%\[\]\s]|%[0-9A-Fa-f]{2})*@)?"
    r"(?P<host>[^@/?#:%\[\]\s]+|\[[0-9A-Fa-f:.]+\])?(:(?P<port>[0-9]+))?(?P<path>/[^?#@\s]*)?(\?[^#@\s]*)?"
)
LONGEST = 1e8  # seconds, about three years: longer times may overflow clocks


class RedisStore(Store):
    """A store in one or more Redis servers that you run.

    Rendezvous hashing (Thaler and Ravishankar 1998) chooses the server of each sample: adding or removing one of n
    servers moves 1/n of the samples. The servers' `maxmemory` and `maxmemory-policy` set the limit and the eviction.
    With `noeviction` a full server takes no new samples. `allkeys-random` suits several datasets. An LRU policy always
    evicts the samples that are needed next. While a server is down, its samples are computed.

    Args:
        hosts: "host:port", "redis://…", "rediss://…" (TLS) or "unix://…", or a list of these; equal on all nodes.
        username, password, db: as in Redis; the password is never printed. In an address, special characters of a
            password are percent-encoded (# as %23).
        tls, ca_file, cert_file, key_file: use TLS; the authority to trust; the client's certificate and its key.
        timeout, retry_seconds: the seconds to wait for a server, and from its failure to the next request to it.
        expire_seconds: the seconds after which a server deletes a sample; None for never.
        claim_seconds: the most seconds that other processes wait while one process computes a sample.
        prefix: the beginning of all keys in Redis.

    Raises:
        ImportError: `redis` is not installed.
        TypeError, ValueError: a host is not a Redis address or occurs twice, or a setting is impossible.
    """

    def __init__(
        self,
        hosts: str | Sequence[str] = "127.0.0.1:6379",
        *,
        username: str | None = None,
        password: str | None = None,
        db: int = 0,
        tls: bool = False,
        ca_file: str | None = None,
        cert_file: str | None = None,
        key_file: str | None = None,
        timeout: float = 5.0,
        retry_seconds: float = 30.0,
        expire_seconds: int | None = None,
        claim_seconds: float = 60.0,
        prefix: str = "baguakit",
    ) -> None:
        files = {"ca_file": ca_file, "cert_file": cert_file, "key_file": key_file}
        self._tls_options = {TLS_NAMES[name]: text(name, value) for name, value in files.items() if value is not None}
        tls = truth("tls", tls) or ca_file is not None or cert_file is not None
        many = isinstance(hosts, Sequence) and not isinstance(hosts, (str, bytes))
        if not many and not isinstance(hosts, str):
            raise TypeError(f"hosts is a Redis address or a list of them, not of type {type(hosts).__name__}")
        named = [(f"hosts[{i}]", host) for i, host in enumerate(hosts)] if many else [("hosts", hosts)]
        addresses = [address(name, host, tls) for name, host in named]
        self._urls, self.hosts = [url for url, _ in addresses], [shown for _, shown in addresses]
        if not self.hosts or len(set(self.hosts)) < len(self.hosts):
            raise ValueError(f"hosts is {self.hosts}; pass at least one Redis server, and none twice")
        user = None if username is None else text("username", username)
        # No message shows the password.
        if not isinstance(password, (str, NoneType)):
            raise TypeError(f"password is a string or None, not of type {type(password).__name__}")
        if any("\ud800" <= letter <= "\udfff" for letter in password or ""):
            raise ValueError("password has characters that UTF-8 cannot write")
        options = {"username": user, "password": password, "db": integer("db", db, 0, (1 << 31) - 1)}
        self._options = {name: value for name, value in options.items() if value is not None}
        self.timeout = real("timeout", timeout, above=0, most=LONGEST)
        self.retry_seconds = real("retry_seconds", retry_seconds, least=0, most=LONGEST)
        most = int(LONGEST)
        self.expire_seconds = None if expire_seconds is None else integer("expire_seconds", expire_seconds, 1, most)
        self.claim_seconds = real("claim_seconds", claim_seconds, least=1e-3, most=LONGEST)
        self.prefix = text("prefix", prefix)
        self._connect()

    def _connect(self) -> None:
        self._redis = redis = package("redis", "RedisStore")
        self._away = [(0.0, "")] * len(self._urls)  # by server: the time of the next request, and the last error
        self._clients = []
        retry = redis.retry.Retry(redis.backoff.NoBackoff(), 1)  # the server may have closed an idle connection
        options = {"socket_timeout": self.timeout, "socket_connect_timeout": self.timeout, **self._options}
        for url, shown in zip(self._urls, self.hosts, strict=True):
            tls = self._tls_options if url.startswith("rediss:") else {}
            try:
                client = redis.Redis.from_url(url, retry=retry, **options, **tls)
                pool = client.connection_pool
                pool.connection_class(**pool.connection_kwargs)  # checks its options, and does not connect
            except (TypeError, ValueError) as error:
                options_of = f"the options after the ? in the address of {shown}"
                raise ValueError(f"{options_of} are not for Redis ({type(error).__name__}); leave them out") from None
            self._clients.append(client)

    def __repr__(self) -> str:
        return f"RedisStore({self.hosts}, prefix={self.prefix!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k not in ("_redis", "_clients", "_away")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._connect()

    def host_of(self, key: bytes) -> int:
        """Return the index of the host that holds `key`. This is the host with the largest hash(host, key)."""
        seeds = (blake2b(host.encode(), digest_size=32).digest() for host in self.hosts)
        weights = [blake2b(key, key=seed, digest_size=8).digest() for seed in seeds]
        return weights.index(max(weights))

    def _name(self, key: bytes) -> str:
        return f"{self.prefix}:{key[:DATASET].hex()}:{key[DATASET:].hex()}"

    def _ask(self, host: int, request: Callable[[Any], T]) -> T:
        """Return a server's reply. Raise StoreError if it fails; if it failed recently, raise without a request."""
        until, reason = self._away[host]
        if time.monotonic() < until:
            raise StoreError(reason)
        try:
            return request(self._clients[host])
        except self._redis.exceptions.OutOfMemoryError:  # the server has not failed: `put` returns False
            raise
        except (self._redis.RedisError, OSError) as error:
            reason = f"Redis at {self.hosts[host]} failed: {type(error).__name__}: {error}"
            self._away[host] = time.monotonic() + self.retry_seconds, reason
            raise StoreError(reason) from error

    def get(self, key: bytes) -> bytes | None:
        return self.get_many([key])[0]

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Return the result of `get` for each key, in order, with one round trip per server."""
        hosts, found = {key: self.host_of(key) for key in keys}, dict[bytes, bytes | None]()
        for host in set(hosts.values()):
            there = [key for key in hosts if hosts[key] == host]
            values = self._ask(host, methodcaller("mget", [self._name(key) for key in there]))
            found.update(zip(there, values, strict=True))
        return [found[key] for key in keys]

    def put(self, key: bytes, value: bytes) -> bool:
        try:
            self._ask(self.host_of(key), lambda c: c.set(self._name(key), value, ex=self.expire_seconds))
        except self._redis.exceptions.OutOfMemoryError:
            return False
        return True

    @contextmanager
    def claim(self, key: bytes) -> Iterator[None]:
        host, failures, held = self.host_of(key), (StoreError, self._redis.RedisError, OSError), False
        times = {"timeout": self.claim_seconds, "blocking_timeout": self.claim_seconds, "sleep": 0.005}
        lock = self._clients[host].lock(f"{self._name(key)}:claim", **times)
        with suppress(*failures):
            held = self._ask(host, lambda _: lock.acquire())
        try:
            yield
        finally:
            with suppress(*failures):  # the lock has expired, or the server has failed: it is free
                if held:
                    lock.release()

    def stats(self) -> StoreStats:
        """Return the entries, bytes and limits, summed over all servers. Data of other users of the servers counts."""
        each = range(len(self.hosts))
        entries = sum(self._ask(host, methodcaller("dbsize")) for host in each)
        memory = [self._ask(host, methodcaller("info", "memory")) for host in each]
        limits = [m["maxmemory"] for m in memory]
        return StoreStats(entries, sum(m["used_memory"] for m in memory), sum(limits) if all(limits) else None)

    def clear(self, namespace: bytes = b"") -> None:
        pattern = f"{re.sub(GLOB, LITERAL, self.prefix)}:{namespace.hex()}*"

        def unlink(client: Any) -> None:
            found = client.scan_iter(pattern, count=1000)
            while batch := list(islice(found, 1000)):
                client.unlink(*batch)

        for host in range(len(self.hosts)):
            self._ask(host, unlink)

    def close(self) -> None:
        for client in self._clients:
            client.close()


def address(name: str, given: Any, tls: bool) -> tuple[str, str]:
    """Return the URL of a server for the redis package, and the server's address without user and password.

    Error messages do not show the password.
    """
    if not isinstance(given, str):
        raise TypeError(f"{name} is a Redis address, {KINDS}, not of type {type(given).__name__}")
    url = given if "://" in given else f"{'rediss' if tls else 'redis'}://{given}"
    found = ADDRESS.fullmatch(url)
    if found is None or not (found["path"] if found["scheme"] == "unix" else found["host"]):
        raise ValueError(
            f"{name} is not a Redis address (not shown, since it may hold a password); pass {KINDS}, and the password"
            " as password=, or in the address with its special characters percent-encoded (# as %23)"
        )
    port = "" if found["port"] is None else f":{found['port']}"
    shown = f"{found['host'] or ''}{port}{found['path'] or ''}"
    if found["scheme"] not in ("redis", "rediss", "unix"):
        raise ValueError(f"{shown} is not a Redis address; pass {KINDS}")
    if tls and found["scheme"] == "redis":
        raise ValueError(f"{shown} is an address without TLS, but TLS is required; write rediss://")
    if found["port"] is not None:
        integer(f"the port of {shown}", int(found["port"]), 1, 65535)
    return url, shown
