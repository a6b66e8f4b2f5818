"""DCD-SGD: gossip through compressed differences from replicas as old as the round before.

For r_i the replica of rank i, Q the compressor, W the mixing matrix and x_i the weights after a local step:

    q_i ← Q(x_i − r_i + (W r)_i − r_i);   r_i ← r_i + q_i;   x_i ← r_i

Only q_i is sent; `replicas.py` says what a rank keeps.

Tang et al. 2018, "Communication Compression for Decentralized Training" (DCD-PSGD), arXiv:1803.06443.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ...arguments import checked
from ...comm import Comm
from ...compressors import Compressor, MinMaxUInt8
from ...lanes import New
from ...rules import Every, Rule, after_step
from ...topology import Ring, Topology
from .replicas import Gossip, Replicas


@dataclass(frozen=True, repr=False)
class DifferenceCompression(Gossip):
    """DCD:  q ← Q(x − r + W r − r);  r ← r + q;  x ← r."""

    def check(self, comm: Comm) -> None:
        t, n = self.topology, comm.size
        if not (t.static(n) and t.symmetric(n) and t.doubly_stochastic(n)):
            raise ValueError(
                f"{self!r} mixes replicas as old as the round before, for which the graph must be static and "
                f"symmetric; {t!r} is not for {n} ranks: use Ring() or FullyConnected(), or choco() with gamma=1"
            )

    def _change(self, x: Tensor, here: Replicas, new: New) -> Tensor:
        return here.pull(new).add_(x).sub_(here.r)

    def _mix_(self, x: Tensor, here: Replicas, q: Tensor, received: dict[int, Tensor], new: New) -> None:
        torch.add(here.r, q, out=x)
        self._follow(here, q, received, new)


@checked
def low_precision_decentralized(
    topology: Topology = Ring(), compressor: Compressor = MinMaxUInt8(), every: Every = 1
) -> Rule:
    """Train by decentralized SGD that sends compressed differences (DCD): a quarter of the bytes of `decentralized`.

    Args:
        topology: static, symmetric and doubly stochastic. Sends a message to each neighbour; `choco` also takes one
            that changes, and then sends to one peer a round.
        compressor: exact enough that its error shrinks with the values, such as MinMaxUInt8.
        every: exchange only after every so many steps; a number, or a function as in `bk.after_step`.

    Raises:
        TypeError: `topology` is not a topology, or `compressor` not a compressor.
        ValueError: `every` is less than 1; from `attach`, the topology changes or is not symmetric.
    """
    return after_step(DifferenceCompression(topology, compressor), every=every)
