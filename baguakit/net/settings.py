"""The number of threads and sockets of NCCL's own TCP transport for a link."""

from collections.abc import Mapping
from dataclasses import dataclass

from ..arguments import integer, real
from .link import Layout, measure

MOST_THREADS, MOST_FLOWS = 16, 64  # NCCL's limits for a connection
NEAR = 0.95  # of the best rate: repeated measurements differ by about 5 %


@dataclass(frozen=True)
class SocketSettings:
    """Settings of the sockets of a connection of NCCL, which opens one connection for each channel and peer.

    Args:
        threads: the threads of a connection, 1 to 16.
        sockets_per_thread: the sockets of each thread; `threads × sockets_per_thread` is at most 64.
        rate: the measured bytes per second, greater than 0.

    Raises:
        TypeError, ValueError: a number is out of these ranges.
    """

    threads: int
    sockets_per_thread: int
    rate: float

    def __post_init__(self) -> None:
        integer("threads", self.threads, 1, MOST_THREADS)
        integer("sockets_per_thread", self.sockets_per_thread, 1, MOST_FLOWS)
        if self.flows > MOST_FLOWS:
            raise ValueError(
                f"NCCL uses 1 to {MOST_FLOWS} sockets per connection, and {self.threads} threads of "
                f"{self.sockets_per_thread} are {self.flows}"
            )
        real("rate", self.rate, above=0)

    @property
    def flows(self) -> int:
        """Return the number of TCP flows of a connection; also a good value of the plugin's BAGUANET_STREAMS."""
        return self.threads * self.sockets_per_thread

    def environment(self) -> dict[str, str]:
        """Return the environment variables to export before the program starts."""
        return {"NCCL_SOCKET_NTHREADS": str(self.threads), "NCCL_NSOCKS_PERTHREAD": str(self.sockets_per_thread)}


def nccl_socket_settings(link: str | Mapping[Layout, float]) -> SocketSettings:
    """Return the fewest flows, with the fewest threads, that reach 95 % of the best bandwidth measured on a link.

    More flows than necessary take memory, one core per busy thread, and bandwidth of other users of the link.

    Args:
        link: the bytes per second by (threads, sockets of each thread), as `measure` returns them; or the host on which
            `python -m baguakit.net measure --server --bind ADDRESS` runs, which is then measured for about 30 seconds.

    Returns:
        The settings.

    Raises:
        ValueError: there is no measurement, or NCCL does not support a layout.
        ConnectionError: the host does not answer.
    """
    rates = measure(link) if isinstance(link, str) else link
    if not isinstance(rates, Mapping):
        raise TypeError(f"link is a host, or rates by (threads, sockets of each thread), not {link!r}")
    wrong = [layout for layout in rates if not isinstance(layout, tuple) or len(layout) != 2]
    if wrong:
        raise TypeError(f"each key of link is a layout, a pair (threads, sockets of each thread), not {wrong[0]!r}")
    if not rates:
        raise ValueError(
            "link has no rate: pass {(threads, sockets of each thread): bytes a second, ...} or a host, not {}"
        )
    measured = [SocketSettings(threads, sockets, rate) for (threads, sockets), rate in rates.items()]
    enough = NEAR * max(each.rate for each in measured)
    return min((each for each in measured if each.rate >= enough), key=lambda each: (each.flows, each.threads))
