"""Launches of all ranks, at once."""

from collections.abc import Callable
from typing import Any

from ..driver import Executed
from ..faults import Fault
from .orders import Order
from .places import Places
from .running import Running, Together


def together(
    gpu: Executed,
    ranks: int,
    launch: Callable[[int], Any],
    *,
    symmetric: dict[str, list[Any]] | None = None,
    signals: dict[str, list[Any]] | None = None,
    order: Order | None = None,
    resident: int | None = None,
    found: list[Fault] | None = None,
) -> Together:
    """Run what every rank launches at the same time, and check that signals order all that ranks share.

    Args:
        gpu: the driver, from `executed`.
        ranks: how many there are.
        launch: launches the kernels of a rank. They are queued, and run one after another when all ranks have theirs.
        symmetric: by name, a tensor of each rank that kernels of all may access, as an argument or by its address in
            a tensor of int64. Other arguments belong to the rank that launches with them.
        signals: likewise, tensors of words that order accesses: each access to them must be strong, of scope `.sys`.
        order: in which programs run, from `drawn` or `every`; by default each goes on until it waits.
        resident: how many programs of a rank run at a time; by default all.
        found: takes each RaceFault and SignalFault, and the ranks run on; by default the first is raised.

    Raises:
        RaceFault: two accesses to a byte, one of which writes, that no chain of releases and acquires orders.
        SignalFault: an access to a word of signals that is plain, of a narrower scope, or releases or acquires nothing.
        OwnerFault: an access to memory of another rank that is not symmetric.
        DeadlockFault: a wait that cannot end.
    """
    places = Places()
    regions = places.declare(symmetric or {}, ranks, False) + places.declare(signals or {}, ranks, True)
    streams = []
    for rank in range(ranks):
        with gpu.queued() as queue:
            launch(rank)
        streams.append(queue)
    return Running(streams, places, regions, order or Order(), resident, gpu.watchers, found).run()
