"""Sparse gradients: each rank sends the entries that matter most, and keeps the rest for later.

    y_r ← g_r + e_r;     x ← x − γ d( (1/n) Σ_r top(y_r) );     e_r ← y_r − top(y_r)

Stich, Cordonnier and Jaggi 2018, "Sparsified SGD with Memory", arXiv:1809.07599; Lin et al. 2017, "Deep Gradient
Compression: Reducing the Communication Bandwidth for Distributed Training", arXiv:1712.01887.
"""

from ...arguments import checked
from ...compressors import TopK
from ...rules import Rule, during_backward
from ...stages import ErrorFeedback, SparseMean


@checked
def top_k(ratio: float = 0.01) -> Rule:
    """Average the `ratio` of the gradient's entries that are largest on each rank, with error feedback.

    Sends 8 (n − 1) bytes for each entry kept, which grows with the number of ranks; costs an fp32 copy of the
    gradients. Deterministic: contributions are added one rank after another.

    Args:
        ratio: the share of entries that a rank sends, of each bucket.

    Raises:
        ValueError: `ratio` is not in (0, 1].
    """
    return during_backward(ErrorFeedback(SparseMean(TopK(ratio))))
