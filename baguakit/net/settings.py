"""How many threads and sockets NCCL's own TCP transport should use on a link."""

from collections.abc import Mapping
from dataclasses import dataclass

from ..arguments import real, whole
from .link import Layout, measure

MOST_THREADS, MOST_FLOWS = 16, 64  # what NCCL allows of a connection
NEAR = 0.95  # of the best rate: what two measurements of the same may differ by


@dataclass(frozen=True)
class SocketSettings:
    """Threads of a connection of NCCL, sockets of each thread, and the rate that they reached, in bytes a second.

    `threads` is 1 to 16 and `threads × sockets_per_thread` at most 64, as NCCL has it. NCCL opens a connection for
    each channel and peer, and each has as many flows. Raises ValueError or TypeError for numbers beyond these, and for
    a rate that is not positive.
    """

    threads: int
    sockets_per_thread: int
    rate: float

    def __post_init__(self) -> None:
        whole("threads", self.threads, 1, MOST_THREADS)
        whole("sockets_per_thread", self.sockets_per_thread, 1, MOST_FLOWS)
        if self.flows > MOST_FLOWS:
            raise ValueError(
                f"NCCL takes 1 to {MOST_FLOWS} sockets a connection, and {self.threads} threads of "
                f"{self.sockets_per_thread} are {self.flows}"
            )
        real("rate", self.rate, above=0)

    @property
    def flows(self) -> int:
        """TCP flows of a connection; a good value for the plugin's BAGUANET_STREAMS as well."""
        return self.threads * self.sockets_per_thread

    def environment(self) -> dict[str, str]:
        """Return the variables to export before the program starts; NCCL reads them once."""
        return {
            "NCCL_SOCKET_NTHREADS": str(self.threads),
            "NCCL_NSOCKS_PERTHREAD": str(self.sockets_per_thread),
        }


def nccl_socket_settings(link: str | Mapping[Layout, float]) -> SocketSettings:
    """The fewest flows, and the fewest threads for them, that carry 95 % of the most that was measured on a link.

    `link` is either the rates in bytes a second by (threads, sockets of each thread), as `measure` returns them, or the
    host on which `python -m baguakit.net measure --server --bind ADDRESS` waits, which is then measured for about half
    a minute. More flows than needed cost memory and a core for every busy thread, and take bandwidth from others.

    Raises ValueError if nothing was measured or a layout is none that NCCL takes, ConnectionError if the host does not
    answer.
    """
    rates = measure(link) if isinstance(link, str) else link
    if not isinstance(rates, Mapping):
        raise TypeError(f"link is a host, or rates by (threads, sockets of each thread), not {link!r}")
    wrong = [layout for layout in rates if not isinstance(layout, tuple) or len(layout) != 2]
    if wrong:
        raise TypeError(f"a layout is a pair (threads, sockets of each thread), not {wrong[0]!r}")
    if not rates:
        raise ValueError(
            "link has no rate: pass {(threads, sockets of each thread): bytes a second, ...} or a host, not {}"
        )
    measured = [SocketSettings(threads, sockets, rate) for (threads, sockets), rate in rates.items()]
    enough = NEAR * max(each.rate for each in measured)
    return min((each for each in measured if each.rate >= enough), key=lambda each: (each.flows, each.threads))
