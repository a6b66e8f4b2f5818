"""The group of a round, which changes with the rounds, and how to join it."""

import functools
import re
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..arguments import checked, integer, real, text
from ..comm import Comm
from .membership import Membership, warn_if_unused
from .rendezvous import Settings
from .rounds import run

PORT = 29400  # as of `torchrun`
ENDPOINT = re.compile(r"(?:\[(?P<v6>[0-9A-Fa-f:.]+(?:%\w+)?)\]|(?P<host>[\w.-]+))(?::(?P<port>[0-9]{1,5}))?")


@dataclass(frozen=True, eq=False, repr=False)
class ElasticComm(Comm):
    """A group of ranks that come and go: `group`, `rank` and `size` are of the present round.

    A collective on it raises a `PeerError` when the round ends, so that `recoverable` can go on. `all_reduce_later` and
    the other messages that are waited for later wait for a rank that is lost until torch's timeout of ten minutes.
    """

    membership: Any = None  # type: ignore[misc]

    def follow(self, group: Any) -> None:
        """Go over to the process group of another round."""
        vars(self).update(group=group, rank=int(group.rank()), size=int(group.size()))


def _ends_with_the_round(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def during(self: ElasticComm, *args: Any, **options: Any) -> Any:
        return self.membership.during(functools.partial(method, self, *args, **options), self.group)

    return during


_MESSAGES = "all_reduce reduce_scatter all_gather broadcast gather_objects broadcast_object exchange_each"
for _name in _MESSAGES.split():
    setattr(ElasticComm, _name, _ends_with_the_round(getattr(Comm, _name)))


@checked
def join(
    endpoint: str,
    least: int = 1,
    most: int = 64,
    *,
    every: int = 1,
    name: str = "baguakit",
    keep_alive: float = 1.0,
    last_call: float = 1.0,
    patience: float = 600.0,
) -> Comm:
    """Join a group whose ranks come and go, and return it when enough ranks are there.

        comm = bk.elastic.join("host:29400", least=2)
        with bk.attach(model, optimizer, bk.algorithms.bytegrad(), comm=comm) as att:
            while att.step < 10_000:
                with att.recoverable():
                    ...

    Started by hand, by ssh or by a scheduler, as many processes as there are ranks, each with the same arguments; no
    `torchrun`, and no `init_process_group`. `comm.rank` and `comm.size` follow the group. Load data and build the model
    before this call: the others wait for what is done between it and `bk.attach`. The store runs by
    `python -m baguakit.store`, best on a machine that does not train. Whoever reaches the store can run code in every
    rank: bind it to a private network or a VPN.

    In the main thread, SIGTERM then leaves the group after the step under way, as `att.leave()` does.

    Args:
        endpoint: "host:port" of the store; the port may be left out: 29400.
        least: the least number of ranks that trains; fewer wait for more, and write a line now and then.
        most: ranks at most, up to 64; others wait until one is lost.
        every: ranks are let in after a step whose number is a multiple of this, such as that of `diloco`.
        name: tells trainings apart that share a store.
        keep_alive: seconds between two signs of life of a rank, and in which it answers when a round ends.
        last_call: seconds for which a group that begins, if it has the least, waits for more ranks.
        patience: seconds for which this call, and a rank whose group is too small or out of reach, wait before they
            give up; without a step for so long, ranks that cannot reach all others are left out.

    Raises:
        ValueError: an argument is impossible, or `least`, `most`, `every` or `keep_alive` differs between ranks.
        TimeoutError: no group has formed within the patience, or the store cannot be reached.
    """
    settings = Settings(
        *endpoint_of(endpoint),
        text("name", name),
        integer("least", least, 1),
        integer("most", most, least, 64),
        real("keep_alive", keep_alive, 0.05, 600),
        real("last_call", last_call, 0.05, 600),
        real("patience", patience, 1),
        integer("every", every, 1),
    )
    membership = Membership(settings)
    membership.meet()
    comm = ElasticComm(membership.group, membership=membership)
    membership.follow = comm.follow
    warn_if_unused(lambda: membership.used)
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        # On a thread: the signal may have interrupted a call of the store.
        signal.signal(signal.SIGTERM, lambda *_: run(membership.leave, "leave"))
    return comm


def endpoint_of(endpoint: str, least: int = 1) -> tuple[str, int]:
    """Return the host and the port of "host:port", "[::1]:port" or "host".

    Raises:
        ValueError: it is none of these, or its port is not one from `least` to 65535.
    """
    found = ENDPOINT.fullmatch(endpoint)
    if found is None or not least <= int(found["port"] or PORT) <= 65535:
        raise ValueError(
            f'endpoint is "host:port" of the store, such as "10.0.0.1:{PORT}" or "[::1]:{PORT}", with a port from '
            f"{least} to 65535, not {endpoint!r}"
        )
    return found["v6"] or found["host"], int(found["port"] or PORT)
