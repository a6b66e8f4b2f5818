"""Average and gather tensors of a few neighbours, which a topology or each rank determines."""

from collections.abc import Iterable, Mapping
from functools import lru_cache
from math import fsum

import torch
from torch import Tensor

from ..arguments import describe, instance, real, tensor, truth
from ..comm import Comm, check_comm
from ..kernels import operators as mixing_ops
from ..topology import Chosen, Topology
from ..topology.chosen import Choice, weights_in
from .compressed import mean_, on_flat
from .one_kernel import neighbor_mean_in_one_kernel_


@on_flat
def neighbor_mean_(
    x: Tensor,
    topology: Topology | None = None,
    comm: Comm | None = None,
    *,
    self_weight: float | None = None,
    src_weights: Mapping[int, float] | None = None,
    dst_weights: Mapping[int, float] | Iterable[int] | None = None,
    check: bool = True,
) -> Tensor:
    """Average `x` with this round's neighbours:  x_r ← Σ_j w_rj x_j  on rank r, with the mixing matrix W.

    A topology determines the neighbours and weights, or each rank passes its neighbours and weights in every call:

        neighbor_mean_(x, Ring(), comm)
        neighbor_mean_(x, comm=comm, self_weight=0.5, src_weights={3: 0.5}, dst_weights=[1])

    The second form is  x_r ← self_weight x_r + Σ_j src_weights[j] · (dst_weights of rank j)[r] · x_j. Products are
    summed in fp32 (fp64 for fp64), first this rank's own, then in the order of the ranks. If all weights of a topology
    are 1/n on n ranks, this is `mean_`. With `comm.weighted(v)`, a topology's matrix is changed, to keep Σ_r v_r x_r:

        w_rj ← w_rj min(v_r, v_j) / v_r     in symmetric matrices, as Metropolis and Hastings do;  min_i v_i in others

    and w_rr ← 1 − Σ_{j≠r} w_rj. A rank of weight 0 passes nothing on, and in others than symmetric matrices no rank.

    Args:
        x: a floating tensor of any shape, or a list of them; overwritten and returned.
        topology: the neighbours and weights, such as `topology.Ring()`.
        comm: the group; if the topology changes, at the round to use: `comm.at(round)`.
        self_weight: the weight of this rank's own x; None means 1 − Σ src_weights.
        src_weights: {rank: weight} for the ranks that this rank receives from; {} for none.
        dst_weights: {rank: factor} for the ranks that this rank sends to; x is multiplied by the factor. A list means
            factors of 1; None means all ranks that receive from this rank.
        check: if True, ranks first tell each other whom they receive from and send to, in n bytes on n ranks, and the
            host waits. If False, ranks that disagree hang, and `dst_weights` is needed. `Chosen` is always checked.

    Raises:
        ValueError: the topology changes from round to round and `comm` has no round; the topology does not fit the
            group; `comm` has weights, and ranks choose theirs; or ranks disagree on who sends to whom: all raise it.
        TypeError: a tensor is not floating, `comm` is missing, or peers are named in two ways or in none.
    """
    if comm is None:
        raise TypeError("comm is a bk.Comm, not None: neighbor_mean_ is told its group")
    check_comm(comm)
    truth("check", check)
    if comm._weights is not None and (topology is None or isinstance(topology, Chosen)):
        raise ValueError("each rank chooses the weights of this mean, and comm has others; leave out comm.weighted(…)")
    if topology is None:
        if src_weights is None:
            raise TypeError("neighbor_mean_ takes a topology or src_weights={rank: weight}; both are None")
        sources = dict(sorted(weights_in("src_weights", src_weights).items()))
        own = 1 - sum(sources.values()) if self_weight is None else real("self_weight", self_weight)
        choice = Choice(own, sources, None if dst_weights is None else weights_in("dst_weights", dst_weights))
        targets = agreed_targets(comm, x.device, sources, choice.factors, check)
    else:
        instance("topology", topology, Topology, "a topology such as Ring()")
        named = {"self_weight": self_weight, "src_weights": src_weights, "dst_weights": dst_weights}
        if given := ", ".join(f"{name}={describe(weights)}" for name, weights in named.items() if weights is not None):
            raise TypeError(f"the weights of topology {topology!r} are its own; leave out either it or {given}")
        if comm.size == 1:
            return x
        if not isinstance(topology, Chosen) and is_mean(topology, comm.size, round_of(topology, comm)):
            return mean_(x, comm)
        choice, targets = chosen_in(topology, comm, x.device)
    varies = topology is None or isinstance(topology, Chosen) or comm._weights is not None
    factors = {peer: (choice.factors or {}).get(peer, 1.0) for peer in targets}
    if neighbor_mean_in_one_kernel_(x, choice.own, choice.sources, factors, comm, varies):
        return x
    sent = {w: x if w == 1 else x * w for w in {*factors.values()}}
    received = {peer: torch.empty_like(x) for peer in choice.sources}
    comm.exchange_each({peer: sent[w] for peer, w in factors.items()}, received, x.device)
    return mixed(x, choice.own, choice.sources, received)


def chosen_in(topology: Topology, comm: Comm, device: torch.device) -> tuple[Choice, list[int]]:
    """Return the weights of this rank in the round of `comm`, and the ranks that it sends to."""
    if not isinstance(topology, Chosen):
        own, sources, targets = links_in(topology, comm)
        return Choice(own, sources, None), targets
    choice, agreed = topology.choice, topology.targets_agreed
    if agreed is None:
        agreed = agreed_targets(comm, device, choice.sources, choice.factors, check=True)
        topology.targets_agreed = agreed if topology.one_round else None
    return choice, agreed


@torch.no_grad()
def neighbor_gather(x: Tensor, topology: Topology, comm: Comm) -> dict[int, Tensor]:
    """Return this round's neighbours' tensors: {rank: its x} for ranks that this rank receives from, in rising order.

    Args:
        x: a dense tensor of any dtype, of one shape on all ranks. It is only read.
        topology: the neighbours, such as `Ring()`, or `Chosen()` with the ranks of this round; weights are ignored.
        comm: as in `neighbor_mean_`.

    Raises:
        ValueError, TypeError: as in `neighbor_mean_`, but any dtype is allowed.
    """
    check_comm(comm)
    instance("topology", topology, Topology, "a topology such as Ring()")
    x = tensor("x", x).detach().contiguous()
    if comm.size == 1:
        return {}
    choice, targets = chosen_in(topology, comm, x.device)
    return comm.exchange(x, choice.sources, targets)


def round_of(topology: Topology, comm: Comm) -> int:
    """Return the round of `comm` within the topology's period; 0 for a static topology."""
    period = topology.period(comm.size)
    return comm.round % period if period > 1 else 0


def mixed(x: Tensor, own: float, weights: dict[int, float], received: dict[int, Tensor]) -> Tensor:
    """Compute x ← own · x + Σ weight · received in one pass, accumulated in fp32 at least, and return `x`."""
    mixing_ops.mix_(x, [*received.values()], [own, *(weights[peer] for peer in received)])
    return x


def links_in(topology: Topology, comm: Comm) -> tuple[float, dict[int, float], list[int]]:
    """Return `links` in the round of `comm`, in the matrix that keeps the mean with the weights of `comm`."""
    round, weights = round_of(topology, comm), comm._weights
    own, row, targets = links(topology, comm.rank, comm.size, round)
    if weights is None:
        return own, row, targets
    v = [weight for weight, *_ in weights]
    mine = v[comm.rank]
    if is_mean(topology, comm.size, round):
        return mine, {peer: v[peer] for peer in row}, targets
    least = None if is_symmetric(topology, comm.size) else min(v)
    if mine:
        row = {peer: w * (min(mine, v[peer]) if least is None else least) / mine for peer, w in row.items()}
        own = 1 - fsum(row.values())
    return own, row, targets


@lru_cache(maxsize=1024)
def is_symmetric(topology: Topology, size: int) -> bool:
    if not topology.doubly_stochastic(size):
        raise ValueError(f"{topology!r} is not doubly stochastic for {size} ranks: it can keep no weighted mean")
    return topology.symmetric(size)


@lru_cache(maxsize=4096)
def links(topology: Topology, rank: int, size: int, round: int) -> tuple[float, dict[int, float], list[int]]:
    """Return a rank's own weight, {rank: weight} of the ranks that it receives from, and the ranks that it sends to."""
    row = dict(sorted(topology.weights(rank, size, round).items()))
    own = row.pop(rank, 0.0)
    return own, row, [peer for peer in topology.targets(rank, size, round) if peer != rank]


@lru_cache(maxsize=4096)
def is_mean(topology: Topology, size: int, round: int) -> bool:
    """Return whether a round of the topology is the exact mean over all ranks."""
    ranks = 1 if "circulant" in topology.facts else size
    rows = (topology.weights(rank, size, round) for rank in range(ranks))
    return all(len(row) == size and set(row.values()) == {1 / size} for row in rows)


# If ranks choose their own peers, they must agree on senders and receivers before anything is sent.
HEARS, SENDS, ASKS, WRONG = 1, 2, 4, 8  # flags that a rank sets for another rank; the last two for itself


def agreed_targets(
    comm: Comm, device: torch.device, sources: Iterable[int], targets: Iterable[int] | None, check: bool
) -> list[int]:
    """Return the ranks that this rank sends to, in rising order. Raise a ValueError if ranks disagree or cannot be.

    With `check` this is collective: every rank sends its sources and targets in `size` bytes, and waits for the device
    once; an error is raised on all ranks. Then `targets` may be None, for all ranks that receive from this rank.
    """
    sources, wanted = list(sources), None if targets is None else list(targets)
    wrong = ""
    for peer in (*sources, *(wanted or ())):
        if not isinstance(peer, int) or isinstance(peer, bool) or not 0 <= peer < comm.size or peer == comm.rank:
            wrong = f"the peers of rank {comm.rank} are other ranks of its group, 0 to {comm.size - 1}, not {peer!r}"
            break
    if not check:
        if wrong or wanted is None:
            asked = "check=False: nobody tells this rank who hears it; name those it sends to (dst_weights=)"
            raise ValueError(wrong or asked)
        return sorted(wanted)
    hears, sends = ([], []) if wrong else (sources, wanted or [])
    said = [HEARS * (peer in hears) | SENDS * (peer in sends) for peer in range(comm.size)]
    said[comm.rank] = ASKS * (wanted is None) | WRONG * bool(wrong)
    table = comm.all_gather(torch.tensor([said], dtype=torch.uint8, device=device)).tolist()
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
