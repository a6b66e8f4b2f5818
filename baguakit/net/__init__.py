"""Let NCCL use several TCP flows per connection, by a network plugin or by settings of NCCL's own sockets.

Clouds limit the bandwidth of one TCP flow, and one core cannot saturate a fast NIC, so NCCL needs several flows. Either
use the plugin, which sends less over slow flows (the comment at the top of `baguanet.c` explains the plugin and its
settings; there, flows are called streams):

    baguakit net build                     # with this machine's C compiler; prints the variables to export

or measure the link between two machines, to find the number of flows for NCCL's own sockets:

    baguakit net measure --server --bind ADDRESS     # on one machine, with its address on that link
    baguakit net measure --client ADDRESS            # on another; prints the variables to export

While the server runs, anyone who reaches its address can send data to it. The server counts and discards the data. Stop
the server after the measurement.

This package sets no environment variables. Export the printed variables before NCCL starts, because it reads them then.
"""

from ..expressions import show_public
from .link import SocketSettings, measure, nccl_socket_settings, serve
from .plugin import build

__all__ = ["SocketSettings", "build", "measure", "nccl_socket_settings", "serve"]

show_public(__name__)
