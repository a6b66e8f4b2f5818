"""Who averages with whom, and how much each one weighs: rows of a mixing matrix.

In one round every rank replaces its tensor by a weighted mean of what it hears,

    x_i  <-  Σ_j W_ij x_j        W = topology.matrix(size, round),   row i = topology.weights(i, size, round)

and a topology is nothing but that matrix, for every group size and every round: pure integers and weights, so it can
be read, tested and drawn with no process started.

| topology             | rank i hears from               | period    | symmetric | exact mean after                 |
|----------------------|---------------------------------|-----------|-----------|----------------------------------|
| `FullyConnected`     | everyone                        | 1         | yes       | 1 round                          |
| `Ring`               | i ± 1                           | 1         | yes       | never (n > 3)                    |
| `Exponential`        | i − 1, i − 2, i − 4, …          | 1         | n ≤ 3     | never (n > 3)                    |
| `OnePeerExponential` | i − 2^t                         | ⌈log₂ n⌉  | n ≤ 2     | log₂ n rounds, for n = 2^k       |
| `Hypercube`          | i XOR 2^t                       | log₂ n    | yes       | log₂ n rounds (needs n = 2^k)    |
| `ShiftOne`           | one of the other half, shifting | n / 2     | yes       | n / 2 rounds, for n ≤ 4          |

All of them are doubly stochastic: rows sum to 1, so equal ranks stay equal, and columns sum to 1, so the mean over
the ranks stays where it is.
"""

from .base import Topology
from .periodic import Hypercube, OnePeerExponential, ShiftOne
from .static import Exponential, FullyConnected, Ring

__all__ = [
    "Exponential",
    "FullyConnected",
    "Hypercube",
    "OnePeerExponential",
    "Ring",
    "ShiftOne",
    "Topology",
]
