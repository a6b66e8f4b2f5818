"""Who averages with whom, and how much each one weighs: rows of a mixing matrix.

In one round every rank replaces its tensor by a weighted mean of what it hears,

    x_i ← Σ_j W_ij x_j        W = topology.matrix(size, round),   row i = topology.weights(i, size, round)

and a topology is nothing but that matrix, for every group size and every round: pure integers and weights, so it can
be read, tested and drawn with no process started.

| topology              | rank i hears from               | period   | symmetric    | exact mean after                |
|-----------------------|---------------------------------|----------|--------------|---------------------------------|
| `FullyConnected`      | everyone                        | 1        | yes          | 1 round                         |
| `Ring`                | i ± 1                           | 1        | yes          | never (n > 3)                   |
| `Star`                | rank 0; rank 0 from everyone    | 1        | yes          | never (n > 2)                   |
| `Grid2D`              | its neighbours in a grid        | 1        | yes          | never (n > 2)                   |
| `Exponential`         | i − 1, i − 2, i − 4, …          | 1        | n ≤ 3        | never (n > 3)                   |
| `SymmetricExponential`| i ± 1, i ± 4, i ± 16, …         | 1        | yes          | never (n > 3)                   |
| `OnePeerExponential`  | i − 2^t                         | ⌈log₂ n⌉ | n ≤ 2        | log₂ n rounds, for n = 2^k      |
| `Hypercube`           | i XOR 2^t                       | log₂ n   | yes          | log₂ n rounds (needs n = 2^k)   |
| `ShiftOne`            | one of the other half, shifting | n / 2    | yes          | n / 2 rounds, for n ≤ 4         |
| `BaseK(k)`            | at most k, by a plan            | T(n)     | yes          | T(n) ≤ 2 log_{k+1} n + 2 rounds |
| `OnePeerExact`        | i − 2^t for n = 2^k,            | log₂ n,  | not for      | as many rounds, for every n     |
|                       | else as in `BaseK(1)`           | else T(n)| 4, 8, 16 …   |                                 |
| `RandomMatching`      | one, drawn anew in each round   | none     | yes          | no promise (n > 2)              |
| `FromMatrix`          | whom the matrices say           | theirs   | if they are  | theirs                          |
| `FromGraph`           | its neighbours in a graph       | 1        | yes          | never, unless all are neighbours|
| `FromDigraph`         | who sends to it in a digraph    | theirs   | if it is     | by `push_sum` only              |
| `Chosen`              | whom it has just chosen         | none     | no promise   | no promise                      |

All but the last two are doubly stochastic: rows sum to 1, so equal ranks stay equal, and columns sum to 1, so the mean
over the ranks stays where it is. The columns of `FromDigraph` sum to 1 and its rows need not: the sum stays where it
is. With `Chosen` each rank sets its own row before a round, and knows no other.
Each can be asked for its `period`, whether it is `static`, `symmetric`, `doubly_stochastic` and `column_stochastic`,
its `spectral_gap` and `rounds_to_exactness` for a number of ranks, and draws itself:
`BaseK(1).draw(6).savefig("base.png")`.
"""

from .base import Topology
from .chosen import Chosen
from .directed import FromDigraph
from .finite_time import BaseK, OnePeerExact
from .given import FromMatrix
from .graph import FromGraph
from .metropolis import Grid2D
from .periodic import Hypercube, OnePeerExponential, RandomMatching, ShiftOne
from .static import Exponential, FullyConnected, Ring, Star, SymmetricExponential

__all__ = [
    "BaseK",
    "Chosen",
    "Exponential",
    "FromDigraph",
    "FromGraph",
    "FromMatrix",
    "FullyConnected",
    "Grid2D",
    "Hypercube",
    "OnePeerExact",
    "OnePeerExponential",
    "RandomMatching",
    "Ring",
    "ShiftOne",
    "Star",
    "SymmetricExponential",
    "Topology",
]
