"""The address at which this host is reached."""

import os
import socket
import struct
import sys
from contextlib import suppress

SIOCGIFADDR = 0xC0206921 if sys.platform == "darwin" else 0x8915  # the IPv4 address of an interface


def own_address() -> str:
    """Return the address that gloo uses: that of GLOO_SOCKET_IFNAME, else of the host's name, else 127.0.0.1."""
    for name in filter(None, os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")):
        import fcntl

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
            found = fcntl.ioctl(asked.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        return socket.inet_ntoa(found[20:24])
    with suppress(OSError):  # the name of this host is not known
        for _, kind, _, _, place in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM):
            with suppress(OSError), socket.socket(family_of(str(place[0])), kind) as tried:
                tried.bind(place)
                return str(place[0])
    return "127.0.0.1"


def family_of(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
