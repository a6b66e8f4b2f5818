"""Run the store through which the ranks of `bk.elastic.join` find each other: `python -m baguakit.store`.

Run the store on a machine that all ranks reach. Prefer a machine that does not train, because training ends if the
store ends. The store listens on one address. Anyone who reaches this address can run code in every rank, since torch
unpickles the contents of the store. So bind the store to an address in a private network or VPN, never to the internet.
"""

import argparse
import ipaddress
import socket
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from ..comm.addresses import family_of
from ..elastic.rendezvous import PORT, endpoint_of


def main(words: Sequence[str] | None = None) -> int:
    """Serve until interrupted; return 0, or 1 if the address cannot be bound."""
    parser = argparse.ArgumentParser(prog="python -m baguakit.store", description=str(__doc__).split("\n\n")[1])
    parser.add_argument("--bind", required=True, metavar="ADDRESS", help=f"address[:port] to listen on; port {PORT}")
    parser.add_argument("--everywhere", action="store_true", help="let ADDRESS be 0.0.0.0 or ::, all interfaces")
    options = parser.parse_args(words)
    try:
        host, port = endpoint_of(options.bind, least=0)
        server = socket.create_server((host, port), family=family_of(host), backlog=1024)
    except ValueError as error:
        parser.error(str(error))
    except OSError as error:
        print(f"the store cannot listen on {options.bind}: {error}", file=sys.stderr)
        return 1
    there = server.getsockname()[:2]  # not the text: 0, 0x0 and a name in /etc/hosts mean all interfaces, too
    found = ipaddress.ip_address(there[0].partition("%")[0])
    everywhere = found.is_unspecified or (found.version == 6 and found.ipv4_mapped == ipaddress.IPv4Address(0))
    if everywhere and not options.everywhere:
        server.close()
        parser.error(f"{host} is every interface of this machine; name one, or add --everywhere")
    given: Any = dist
    store = given.TCPStore(*there, is_master=True, wait_for_workers=False, master_listen_fd=server.detach())
    print(f"The store listens at {options.bind if port else ':'.join(map(str, there))}.", flush=True)
    with suppress(KeyboardInterrupt):
        threading.Event().wait()
    del store
    return 0


if __name__ == "__main__":
    sys.exit(main())
