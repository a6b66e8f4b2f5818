"""One-sided windows: a rank writes into the memory of its neighbours, or reads theirs, and nobody waits.

For x_r the values of rank r, b_rj the buffer on rank r for a rank j that it hears, and W the matrix of the topology:

    put           b_jr ← d_j x_r           accumulate    b_jr ← b_jr + d_j x_r;   x_r ← s x_r
    get           b_rj ← w_j x_j           update        x_r ← w_rr x_r + Σ_j w_rj b_rj

Each rank has a number p_r, 1 at first, to which each call does the same. Accumulated with weights that sum to 1, and
updated with weights of 1, Σ_r x_r and Σ_r p_r stay as they were, and x_r / p_r tends to the mean (push-sum).

`window` has the class. `memory` has the buffers, `messages` what ranks say, and `links` the connections and threads.
"""

from .window import Window

__all__ = ["Window"]
