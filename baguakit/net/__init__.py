"""A network plugin that lets NCCL use several TCP flows per connection.

Clouds limit the bandwidth of one TCP flow, and one core cannot saturate a fast NIC, so NCCL needs several flows. The
plugin sends less over slow flows. The comment at the top of `baguanet.c` explains the plugin and its settings; there,
flows are called streams.

    baguakit net build                     # with this machine's C compiler; prints the variables to export

NCCL's own sockets can use several flows, too: `baguakit probe` between the machines prints the variables to export.

This package sets no environment variables. Export the printed variables before NCCL starts, because it reads them then.
"""

from ..expressions import show_public
from .plugin import build

__all__ = ["build"]

show_public(__name__)
