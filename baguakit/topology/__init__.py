"""Topologies: mixing matrices for decentralized averaging.

In one round every rank i replaces its tensor x_i by a weighted sum of x_i and the tensors x_j that it hears:

    x_i ← Σ_j W_ij x_j        W = topology.matrix(size, round),   row i = topology.weights(i, size, round)

A topology gives the matrix W for every group size n and every round t (in the table, t is modulo the period). It needs
no process group, so it can be tested and plotted in one process.

| topology              | rank i hears                    | period   | symmetric    | exact mean after                |
|-----------------------|---------------------------------|----------|--------------|---------------------------------|
| `FullyConnected`      | all ranks                       | 1        | yes          | 1 round                         |
| `Ring`                | i ± 1                           | 1        | yes          | never (n > 3)                   |
| `Star`                | rank 0; rank 0 hears all        | 1        | yes          | never (n > 2)                   |
| `Grid2D`              | its neighbours in a grid        | 1        | yes          | never (n > 2)                   |
| `Exponential`         | i − 1, i − 2, i − 4, …          | 1        | n ≤ 3        | never (n > 3)                   |
| `SymmetricExponential`| i ± 1, i ± 4, i ± 16, …         | 1        | yes          | never (n > 3)                   |
| `OnePeerExponential`  | i − 2^t                         | ⌈log₂ n⌉ | n ≤ 2        | log₂ n rounds, for n = 2^m      |
| `ShiftOne`            | a rank of the other half        | n / 2    | yes          | n / 2 rounds, for n ≤ 4         |
| `BaseK(k)`            | at most k ranks                 | T(n)     | yes          | T(n) ≤ 2 log_{k+1} n + 2 rounds |
| `OnePeerExact`        | i − 2^t if n = 2^m, else `BaseK(1)` | log₂ n or T(n) | not for 4, 8, … | one period, all n |
| `RandomMatching`      | one random rank                 | 2^64     | yes          | never (n > 2)                   |
| `FromMatrix`          | as in the given matrices        | given    | as given     | as given                        |
| `FromGraph`           | its neighbours in a given graph | 1        | yes          | 1 round if complete, else never |
| `FromDigraph`         | the ranks that send to it       | given    | as given     | only with `push_sum`            |
| `Chosen`              | the ranks that it chooses       | none     | unknown      | unknown                         |

All but `FromDigraph` and `Chosen` are doubly stochastic. Their rows sum to 1, so ranks with equal values keep them.
Their columns sum to 1, so the mean over the ranks is preserved. For `FromDigraph` only the columns sum to 1. With
`Chosen` each rank sets its own row before a round. `BaseK(1).draw(6).savefig("base.png")` saves a plot.
"""

from .base import Topology
from .chosen import Chosen
from .given import FromDigraph, FromGraph, FromMatrix
from .rounds import BaseK, OnePeerExact, OnePeerExponential, RandomMatching, ShiftOne
from .static import Exponential, FullyConnected, Grid2D, Ring, Star, SymmetricExponential

__all__ = [
    "BaseK", "Chosen", "Exponential", "FromDigraph", "FromGraph", "FromMatrix", "FullyConnected", "Grid2D",
    "OnePeerExact", "OnePeerExponential", "RandomMatching", "Ring", "ShiftOne", "Star", "SymmetricExponential",
    "Topology",
]  # fmt: skip
