"""Groups of one's own: the same ranks again, used by nothing else, and further ones for the flows of their messages."""

from datetime import timedelta
from typing import Any

import torch

from .flows import Flows
from .groups import INTER, own_group

Parts = tuple[Any, Any] | None
"""The intra and inter groups of this rank, where the nodes are known."""


def own_groups(
    group: Any, parts: Parts, name: str, timeout: timedelta, device: torch.device, store: Any = None
) -> tuple[Any, Parts]:
    """New groups of the same ranks, that meet in `store`, or the group's, under an agreed name. All members call it."""
    store = group.get_group_store() if store is None else store
    own = own_group(group, store, f"{name}/flat", timeout, device)
    if parts is None:
        return own, None
    intra, inter = parts
    return own, (
        own_group(intra, store, f"{name}/intra{inter.rank()}", timeout, device),
        own_group(inter, store, f"{name}/inter{intra.rank()}", timeout, device),
    )


def flows_of(
    group: Any, parts: Parts, count: int, name: str, timeout: timedelta, store: Any = None
) -> dict[str, Flows]:
    """`count` flows between all ranks, or, where the nodes are known, between nodes: by part. None for a count of 1.

    The first flow is the group that is there. All members call it.
    """
    if count == 1:
        return {}
    part, first, place = ("flat", group, "") if parts is None else (INTER, parts[1], f"/inter{parts[0].rank()}")
    store, cpu = group.get_group_store() if store is None else store, torch.device("cpu")
    further = [own_group(first, store, f"{name}/flow{i}{place}", timeout, cpu) for i in range(1, count)]
    return {part: Flows([first, *further])}
