"""Gossip through compressed differences: each rank keeps a replica of its weights that its neighbours know as well.

For r_i the replica of rank i, Q the compressor, W a static symmetric matrix and x_i the weights after a local step:

    DCD      q_i ← Q(x_i − r_i + (W r)_i − r_i);   r_i ← r_i + q_i;   x_i ← r_i
    CHOCO    q_i ← Q(x_i − r_i);                   r_i ← r_i + q_i;   x_i ← x_i + γ ((W r)_i − r_i)

Only q_i is sent. A rank holds its own r_i and the sum s_i = Σ_{j ≠ i} w_ij r_j, to which w_ij q_j is added as it comes:
two copies of the model whatever the number of neighbours.

DCD-PSGD: Tang et al. 2018, arXiv:1803.06443. CHOCO-SGD: Koloskova et al. 2019, arXiv:1902.00340.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..buckets import Bucket
from ..comm import Comm
from ..compressors import Compressor, MinMaxUInt8
from ..lanes import New, temporaries
from ..primitives import neighbor_mean_
from ..primitives.neighbors import links
from ..rules import Rule, after_step
from ..stages import Stage, State, finite
from ..topology import Ring, Topology


@dataclass(frozen=True, repr=False)
class Gossip(Stage):
    """What DCD and CHOCO share: replicas, kept up to date by compressed changes."""

    topology: Topology
    compressor: Compressor = MinMaxUInt8()
    elementwise: ClassVar = {"replica": "anew", "neighbors": "anew"}  # Σ over other ranks would be another sum
    follows: ClassVar[tuple[str, ...]] = ("replica", "neighbors")

    def __post_init__(self) -> None:
        if not isinstance(self.topology, Topology) or not isinstance(self.compressor, Compressor):
            raise TypeError(
                f"{type(self).__name__} takes a topology and a compressor, such as Ring() and MinMaxUInt8()"
            )

    def check(self, comm: Comm) -> None:
        self.topology.check(comm.size)
        t, n = self.topology, comm.size
        if not (t.static(n) and t.symmetric(n) and t.doubly_stochastic(n)):
            raise ValueError(
                f"{self!r} keeps replicas of neighbours, for which the graph must be static and symmetric; "
                f"{t!r} is not for {n} ranks: use Ring() or FullyConnected()"
            )

    def multiple_of(self, comm: Comm) -> int:
        return 64

    def init(self, bucket: Bucket, comm: Comm) -> State:
        """The replicas of the neighbours are what they hold now: they tell it here, uncompressed."""
        replica = bucket.flat.to(torch.promote_types(bucket.flat.dtype, torch.float32), copy=True)
        mixed = neighbor_mean_(replica.clone(), self.topology, comm)
        own = self.topology.weights(comm.rank, comm.size, 0)[comm.rank]
        return {"replica": replica, "neighbors": mixed - own * replica}

    def mix(self, state: State, comm: Comm, new: New) -> Tensor:
        """(W r)_i."""
        own = self.topology.weights(comm.rank, comm.size, 0)[comm.rank]
        return torch.add(state["neighbors"], state["replica"], alpha=own, out=new(state["replica"]))

    def send(self, change: Tensor, comm: Comm) -> tuple[Tensor, dict[int, Tensor]]:
        """Send Q(change), and let `change` be what that decompresses to; return it, and what the neighbours sent."""
        weights, targets = links(self.topology, comm.rank, comm.size, 0)
        packed = self.compressor.compress(change.view(1, -1), key=comm.key())
        received = comm.exchange(packed, [peer for peer in weights if peer != comm.rank], targets)
        return self.compressor.decompress(packed, change.numel(), out=change.view(1, -1))[0], received

    def follow(self, state: State, q: Tensor, received: dict[int, Tensor], comm: Comm, new: New) -> None:
        """Let every replica change by what its rank sent: this one by q, the neighbours by what was received.

        A change that is not finite is added to no replica, neither here nor where it arrives: all judge by its bytes.
        """
        weights, _ = links(self.topology, comm.rank, comm.size, 0)
        room = new(q).view(1, -1)
        for peer, packed in received.items():
            theirs = self.compressor.decompress(packed, q.numel(), out=room)[0]
            state["neighbors"].add_(kept(theirs), alpha=weights[peer])
        state["replica"].add_(kept(q))


def kept(q: Tensor) -> Tensor:
    """q where all of it is finite, else nothing."""
    whole = finite(q)
    if whole.is_cpu:  # to ask waits for nothing
        return q if whole else torch.zeros_like(q)
    return torch.where(whole, q, 0.0)


@dataclass(frozen=True, repr=False)
class DifferenceCompression(Gossip):
    """DCD:  q ← Q(x − r + W r − r);  r ← r + q;  x ← r."""

    def __call__(self, x: Tensor, state: State, comm: Comm) -> Tensor:
        if comm.size == 1:
            return x
        r = state["replica"]
        with temporaries() as new:
            change = torch.sub(x, r, out=new(r)).add_(self.mix(state, comm, new)).sub_(r)
            q, received = self.send(change, comm)
            torch.add(r, q, out=x)
            self.follow(state, q, received, comm, new)
        return x


@dataclass(frozen=True, repr=False)
class Choco(Gossip):
    """CHOCO:  q ← Q(x − r);  r ← r + q;  x ← x + γ (W r − r)."""

    gamma: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.gamma <= 1:
            raise ValueError(f"gamma, the share of the way to go to the neighbours, is in (0, 1], not {self.gamma!r}")

    def __call__(self, x: Tensor, state: State, comm: Comm) -> Tensor:
        if comm.size == 1:
            return x
        r = state["replica"]
        with temporaries() as new:
            q, received = self.send(torch.sub(x, r, out=new(r)), comm)
            self.follow(state, q, received, comm, new)
            return x.add_(self.mix(state, comm, new).sub_(r).to(x.dtype), alpha=self.gamma)


def low_precision_decentralized(
    topology: Topology = Ring(), compressor: Compressor = MinMaxUInt8(), every: int = 1
) -> Rule:
    """Decentralized SGD that sends compressed differences (DCD): a quarter of the bytes of `decentralized` in fp32.

    Args:
        topology: static, symmetric and doubly stochastic. Sends a message to each neighbour.
        compressor: exact enough that its error shrinks with what it compresses, such as MinMaxUInt8.
        every: exchange only after every so many steps.

    Raises:
        TypeError: `topology` is not a topology, or `compressor` not a compressor.
        ValueError: `every` is less than 1; from `attach`, the topology changes or is not symmetric.
    """
    return after_step(DifferenceCompression(topology, compressor), every=every)


def choco(
    topology: Topology = Ring(), compressor: Compressor = MinMaxUInt8(), gamma: float = 0.5, every: int = 1
) -> Rule:
    """Decentralized SGD with any compressor (CHOCO): what gossip moves, the mean over ranks does not notice.

    Args:
        topology: static, symmetric and doubly stochastic.
        compressor: however coarse; the coarser, the smaller must gamma be.
        gamma: the share of the way to the neighbours that a rank goes in each step; 1 with no compression is ATC. With
            TopK(0.05) begin at 0.3; a `consensus_distance()` that keeps growing says that it is too large.
        every: exchange only after every so many steps.

    Raises:
        TypeError: `topology` is not a topology, or `compressor` not a compressor.
        ValueError: `gamma` is not in (0, 1], or `every` less than 1; from `attach`, the topology changes or is not
            symmetric.
    """
    return after_step(Choco(topology, compressor, gamma=gamma), every=every)
