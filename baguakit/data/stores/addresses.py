"""Addresses of Redis servers. An address may hold a password: an invalid one is never printed."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from ...arguments import integer

KINDS = "host:port, redis://…, rediss://… (TLS) or unix://…"
# A user and password are percent-encoded as in URLs: their # ? / @ and % are %23 and so on.
ADDRESS = re.compile(
    r"(?P<scheme>[a-z]+)://((?:[^@/?#%\[\]\s]|%[0-9A-Fa-f]{2})*@)?"
    r"(?P<host>[^@/?#:%\[\]\s]+|\[[0-9A-Fa-f:.]+\])?(:(?P<port>[0-9]+))?(?P<path>/[^?#@\s]*)?(\?[^#@\s]*)?"
)


@dataclass(frozen=True)
class Address:
    """The address of a server: `url` for the redis package, and `shown` without user and password."""

    url: str
    shown: str

    def __repr__(self) -> str:
        return self.shown


def address(name: str, given: Any, tls: bool) -> Address:
    """Return the address of a server; raise TypeError or ValueError, without the password, if it is invalid."""
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
    return Address(url, shown)
