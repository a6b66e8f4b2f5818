"""Sparse gradients: each rank sends the entries that matter most, and keeps the rest for later.

    y_r ← g_r + β e_r;     x ← x − γ d( (1/n) Σ_r top(y_r) );     e_r ← y_r − top(y_r)

for top the largest of each chunk of values, compressed once more if `values` is given.

Stich, Cordonnier and Jaggi 2018, "Sparsified SGD with Memory", arXiv:1809.07599; Lin et al. 2017, "Deep Gradient
Compression: Reducing the Communication Bandwidth for Distributed Training", arXiv:1712.01887; with chunks, `values` and
`decay`, Sarfi et al. 2025, "Communication Efficient LLM Pre-training with SparseLoCo", arXiv:2508.15706.
"""

from ...arguments import checked
from ...compressors import TopK
from ...compressors.base import Compressor
from ...rules import Rule, during_backward
from ...stages import ErrorFeedback, SparseMean


@checked
def top_k(ratio: float = 0.01, chunk: int = 4096, values: Compressor | None = None, decay: float = 1.0) -> Rule:
    """Average the `ratio` of the gradient's entries that are largest on each rank, with error feedback.

    Sends (n − 1) (b + log₂(chunk) / 8) bytes for each entry kept, which grows with the number of ranks: b = 4 bytes for
    its value in fp32, or those of `values`, and 12 bits for its place by default. Costs an fp32 copy of the gradients.
    Deterministic: contributions are added one rank after another.

    Args:
        ratio: the share of entries that a rank sends, of each chunk of a bucket.
        chunk: how many entries a chunk has: a power of two, 64 to 4096.
        values: how the entries sent are compressed, such as `UInt2()`; None: in fp32.
        decay: β, from 0 to 1, of the error: less than 1 forgets entries that were never sent.

    Raises:
        TypeError: `values` is no compressor.
        ValueError: `ratio` is not in (0, 1], `chunk` or `decay` is anything else, or `values` is sparse itself.
    """
    return during_backward(ErrorFeedback(SparseMean(TopK(ratio, chunk, values)), decay))
