"""A store of samples in Redis servers, which several nodes can share."""

import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from hashlib import blake2b
from itertools import islice
from operator import methodcaller
from typing import Any, TypeVar

from ..arguments import package
from .stores import DATASET, Store, StoreError

T = TypeVar("T")

PREFIX = "baguakit:"  # of all keys in Redis
USER = r"(?:(?:[^@/?#%\[\]\s]|%[0-9A-Fa-f]{2})*@)?"  # special characters are percent-encoded as in URLs (# as %23)
SERVER = r"(?:[^@/?#:%\[\]\s]+|\[[0-9A-Fa-f:.]+\])(?::(?P<port>[0-9]{1,5}))?(?:/[^?#@\s]*)?"
ADDRESS = re.compile(rf"(?:rediss?://{USER}(?P<server>{SERVER})|unix://{USER}(?P<path>/[^?#@\s]+))(?:\?[^#@\s]*)?")
ANSWER = {"socket_timeout": 5.0, "socket_connect_timeout": 5.0}  # seconds to wait for a server
RETRY = 30.0  # seconds from the failure of a server to the next request to it
CLAIM = 60.0  # the most seconds that other processes wait while one process computes a sample


class RedisStore(Store):
    """A store in one or more Redis servers that you run.

    Rendezvous hashing (Thaler and Ravishankar 1998) chooses the server of each sample: adding or removing one of n
    servers moves 1/n of the samples. The servers' `maxmemory` and `maxmemory-policy` set the limit and the eviction.
    With `noeviction` a full server takes no new samples. `allkeys-random` suits several datasets. An LRU policy always
    evicts the samples that are needed next. While a server is down, its samples are computed. A server that has failed
    is asked again after 30 seconds. Processes wait for at most 60 seconds while another one computes a sample.

    Args:
        hosts: "host:port", "redis://…", "rediss://…" (TLS) or "unix://…", or a list of these; equal on all nodes. An
            address may have user, password and database, "rediss://user:password@host:6379/0", and options of the
            `redis` package, "?ssl_ca_certs=/ca.pem&socket_timeout=2". Special characters of a password are
            percent-encoded (# as %23). It is never printed.

    Raises:
        ImportError: `redis` is not installed.
        TypeError, ValueError: a host is not a Redis address or occurs twice.
    """

    def __init__(self, hosts: str | Sequence[str] = "127.0.0.1:6379") -> None:
        given = [hosts] if isinstance(hosts, str) else hosts
        if isinstance(given, bytes) or not isinstance(given, Sequence) or not all(isinstance(x, str) for x in given):
            raise TypeError(f"hosts is a Redis address or a list of them, not of type {type(hosts).__name__}")
        addresses = list(map(address, given))
        self._given, self.hosts = given, [shown for _, shown in addresses]
        if not self.hosts or len(set(self.hosts)) < len(self.hosts):
            raise ValueError(f"hosts is {self.hosts}; pass at least one Redis server, and none twice")
        self._redis = redis = package("redis", "RedisStore")
        self._away = [(0.0, "")] * len(self.hosts)  # by server: the time of the next request, and the last error
        self._clients = []
        retry = redis.retry.Retry(redis.backoff.NoBackoff(), 1)  # the server may have closed an idle connection
        for url, shown in addresses:
            try:
                client = redis.Redis.from_url(url, retry=retry, **ANSWER)
                pool = client.connection_pool
                pool.connection_class(**pool.connection_kwargs)  # checks its options, and does not connect
            except (TypeError, ValueError) as error:
                options_of = f"the options after the ? in the address of {shown}"
                raise ValueError(f"{options_of} are not for Redis ({type(error).__name__}); leave them out") from None
            self._clients.append(client)

    def __repr__(self) -> str:
        return f"RedisStore({self.hosts})"

    def __reduce__(self) -> Any:
        return type(self), (self._given,)

    def host_of(self, key: bytes) -> int:
        """Return the index of the host that holds `key`. This is the host with the largest hash(host, key)."""
        seeds = (blake2b(host.encode(), digest_size=32).digest() for host in self.hosts)
        weights = [blake2b(key, key=seed, digest_size=8).digest() for seed in seeds]
        return weights.index(max(weights))

    def _name(self, key: bytes) -> str:
        return f"{PREFIX}{key[:DATASET].hex()}:{key[DATASET:].hex()}"

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
            self._away[host] = time.monotonic() + RETRY, reason
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
            self._ask(self.host_of(key), methodcaller("set", self._name(key), value))
        except self._redis.exceptions.OutOfMemoryError:
            return False
        return True

    @contextmanager
    def claim(self, key: bytes) -> Iterator[None]:
        host, failures, held = self.host_of(key), (StoreError, self._redis.RedisError, OSError), False
        name = f"{self._name(key)}:claim"
        lock = self._clients[host].lock(name, timeout=CLAIM, blocking_timeout=CLAIM, sleep=0.005)
        with suppress(*failures):
            held = self._ask(host, lambda _: lock.acquire())
        try:
            yield
        finally:
            with suppress(*failures):  # the lock has expired, or the server has failed: it is free
                if held:
                    lock.release()

    def clear(self, namespace: bytes = b"") -> None:
        def unlink(client: Any) -> None:
            found = client.scan_iter(f"{PREFIX}{namespace.hex()}*", count=1000)
            while batch := list(islice(found, 1000)):
                client.unlink(*batch)

        for host in range(len(self.hosts)):
            self._ask(host, unlink)

    def close(self) -> None:
        for client in self._clients:
            client.close()


def address(given: str) -> tuple[str, str]:
    """Return the URL of a server for the redis package, and the server's address without user and password."""
    url = given if "://" in given else f"redis://{given}"
    found = ADDRESS.fullmatch(url)
    if found is None or not 0 < int(found["port"] or 1) < 1 << 16:
        raise ValueError(
            "hosts has an address that is not of Redis (not shown, since it may hold a password); pass host:port,"
            " redis://…, rediss://… (TLS) or unix://…, with special characters of a password percent-encoded (# as %23)"
        )
    return url, found["server"] or found["path"]
