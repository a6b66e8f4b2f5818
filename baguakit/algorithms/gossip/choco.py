"""CHOCO-SGD: gossip through compressed differences, with a step size and with one pair of replicas for each round.

For r_i the replica of rank i, Q the compressor, W the mixing matrix and x_i the weights after a local step:

    q_i ← Q(x_i − r_i);   r_i ← r_i + q_i;   x_i ← x_i + γ ((W r)_i − r_i)

Only q_i is sent; `replicas.py` says what a rank keeps. The replicas are up to date before they are mixed, so W may
change from round to round: the ranks that hear a rank in one round of the period have not heard what it sent in the
others, and each round has r_i and s_i of its own. One peer a round is then one message of compressed values, for any
number of ranks, and 2 ⌈log₂ n⌉ copies of the weights.

Koloskova, Stich and Jaggi 2019, "Decentralized Stochastic Optimization and Gossip Algorithms with Compressed
Communication", arXiv:1902.00340.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ...arguments import checked, real
from ...comm import Comm
from ...compressors import Compressor, MinMaxUInt8
from ...lanes import New
from ...rules import Every, Rule, after_step
from ...topology import Ring, Topology
from .replicas import Gossip, Replicas

LONGEST = 64  # rounds of a period: for longer ones a rank would keep more than 128 copies of its weights


@dataclass(frozen=True, repr=False)
class Choco(Gossip):
    """CHOCO:  q ← Q(x − r);  r ← r + q;  x ← x + γ (W r − r), with r of their own in each round of W's period."""

    gamma: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        real("gamma", self.gamma, most=1, above=0)

    def check(self, comm: Comm) -> None:
        t, n = self.topology, comm.size
        if t.period(n) > LONGEST:
            raise ValueError(
                f"{self!r} remembers two copies of the weights for each round of a period, and {t!r} has more than "
                f"{LONGEST} for {n} ranks: use OnePeerExact()"
            )
        if not t.doubly_stochastic(n):
            raise ValueError(
                f"{self!r} would move the mean: the matrices of {t!r} are not doubly stochastic for {n} ranks; "
                "use OnePeerExact() or Ring()"
            )

    def _change(self, x: Tensor, here: Replicas, new: New) -> Tensor:
        return torch.sub(x, here.r, out=new(here.r))

    def _mix_(self, x: Tensor, here: Replicas, q: Tensor, received: dict[int, Tensor], new: New) -> None:
        self._follow(here, q, received, new)
        x.add_(here.pull(new).to(x.dtype), alpha=self.gamma)


@checked
def choco(
    topology: Topology = Ring(), compressor: Compressor = MinMaxUInt8(), gamma: float = 0.5, every: Every = 1
) -> Rule:
    """Train by decentralized SGD with any compressor (CHOCO): gossip does not change the mean over ranks.

    The fewest bytes of all that gossip: `choco(OnePeerExact(), gamma=1.0)` sends one message a step, a byte for each
    weight, where `bytegrad` sends 2 (n − 1)/n.

    Args:
        topology: doubly stochastic; it may change from round to round. Keeps two copies of the weights for
            each round of its period.
        compressor: any; the coarser, the smaller gamma must be.
        gamma: the step size γ towards the neighbours; 1 without compression is ATC. With TopK(0.05) begin at 0.3; if
            `consensus_distance()` keeps growing, it is too large.
        every: exchange only after every so many steps; a number, or a function as in `bk.after_step`.

    Raises:
        TypeError: `topology` is not a topology, or `compressor` not a compressor.
        ValueError: `gamma` is not in (0, 1], or `every` less than 1; from `attach`, the topology's matrices are not
            doubly stochastic, or its period is longer than 64 rounds.
    """
    return after_step(Choco(topology, compressor, gamma=gamma), every=every)
