"""The check that ranks which name their own peers agree on who sends to whom, before anything is sent."""

from collections.abc import Iterable

import torch

from .comm import Comm

HEARS, SENDS, ASKS, WRONG = 1, 2, 4, 8  # flags that a rank sets for another rank; the last two for itself


def agreed_targets(
    comm: Comm, device: torch.device, sources: Iterable[int], targets: Iterable[int] | None, check: bool
) -> list[int]:
    """Return the ranks that this one sends to, in rising order, after a check that all ranks agree.

    Collective if `check`: every rank sends its sources and targets in `size` bytes, and synchronizes with the device
    once. Without a check, a disagreement hangs until the group times out.

    Args:
        sources: the ranks that this one receives from.
        targets: the ranks that it sends to; None means all that receive from it, which needs `check`.

    Raises:
        ValueError: on every rank, naming the two that disagree, or the rank whose peers are impossible.
    """
    sources, wanted = list(sources), None if targets is None else list(targets)
    wrong = _wrong([*sources, *(wanted or ())], comm)
    if not check:
        if wrong or wanted is None:
            asked = (
                "check=False: nobody tells this rank who hears it; name those it sends to (dst_weights=, dst_ranks=)"
            )
            raise ValueError(wrong or asked)
        return sorted(wanted)
    said = [0] * comm.size
    said[comm.rank] = (ASKS if wanted is None else 0) | (WRONG if wrong else 0)
    if not wrong:
        for peer in sources:
            said[peer] |= HEARS
        for peer in wanted or ():
            said[peer] |= SENDS
    row = torch.tensor([said], dtype=torch.uint8, device=device)
    table = comm.all_gather(row).tolist()
    for rank, line in enumerate(table):
        if line[rank] & WRONG:
            raise ValueError(wrong or f"rank {rank} named peers that cannot be: its own error says which")
    for sender, line in enumerate(table):
        for hearer in [] if line[sender] & ASKS else range(comm.size):
            sent, heard = bool(line[hearer] & SENDS), bool(table[hearer][sender] & HEARS)
            if sent and not heard:
                raise ValueError(f"rank {sender} sends to rank {hearer}, which does not hear it")
            if heard and not sent:
                raise ValueError(f"rank {hearer} hears rank {sender}, which does not send to it")
    return [peer for peer in range(comm.size) if table[peer][comm.rank] & HEARS]


def _wrong(peers: list[int], comm: Comm) -> str:
    for peer in peers:
        if not isinstance(peer, int) or isinstance(peer, bool) or not 0 <= peer < comm.size or peer == comm.rank:
            return f"the peers of rank {comm.rank} are other ranks of its group, 0 to {comm.size - 1}, not {peer!r}"
    return ""
