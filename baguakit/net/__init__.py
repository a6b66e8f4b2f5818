"""TCP for NCCL: a network plugin with several flows per connection, and settings of NCCL's own sockets for a link.

Clouds limit the bandwidth of one TCP flow, and one core cannot saturate a fast NIC, so NCCL needs several flows. Either
use the plugin, which sends less over slow flows (`baguanet.c` explains it, calls flows streams, and lists its
settings):

    python -m baguakit.net build                     # with this machine's C compiler; prints the variables to export

or measure the link between two machines, to choose the number of flows of NCCL's own sockets:

    python -m baguakit.net measure --server --bind ADDRESS     # on one machine, with its address on that link
    python -m baguakit.net measure --client ADDRESS            # on another; prints the variables to export

While the server runs, everybody who reaches the address can send to it; it counts the bytes and discards them. End it
after the measurement.

This package sets no environment variables. NCCL reads them when it starts: export them before.
"""

from .link import SocketSettings, measure, nccl_socket_settings, serve
from .plugin import build

__all__ = ["SocketSettings", "build", "measure", "nccl_socket_settings", "serve"]
