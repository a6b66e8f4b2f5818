"""TCP for NCCL: a network plugin of several flows a connection, and settings for NCCL's own sockets that suit a link.

Clouds limit what one TCP flow may carry, and one core cannot fill a fast NIC, so NCCL wants several flows. Either give
it the plugin, which lets a slow flow take less (`baguanet.c` says how, calls them streams, and lists its settings):

    python -m baguakit.net build                     # with this machine's C compiler; prints what to export

or measure the link between two machines, and let NCCL's own sockets have as many flows as it is worth:

    python -m baguakit.net measure --server --bind ADDRESS     # on one machine, with its address on that link
    python -m baguakit.net measure --client ADDRESS            # on another; prints what to export

While it runs, whoever reaches that address can send to it, and is counted and forgotten: end it after measuring.

Nothing here writes environment variables: they are read by NCCL when it starts, and are the user's to export.
"""

from .link import measure, serve
from .plugin import build
from .settings import SocketSettings, nccl_socket_settings

__all__ = ["SocketSettings", "build", "measure", "nccl_socket_settings", "serve"]
