"""The mean of gradients in 8 bits, for g_r the gradient of rank r at the common weights x and Q the compressor:

x ← x − γ d( Q( (1/n) Σ_r Q(g_r) ) )
"""

from ...arguments import checked
from ...compressors import Compressor, MinMaxUInt8
from ...rules import Rule, during_backward
from ...stages import CompressedMean, ErrorFeedback


@checked
def bytegrad(compressor: Compressor = MinMaxUInt8(), error_feedback: bool = False) -> Rule:
    """Average gradients in 8 bits: scattered as codes, averaged in fp32, gathered as codes.

    A quarter of the bytes of `gradient_allreduce` in fp32. Gan et al. 2021, "BAGUA: Scaling up Distributed Learning
    with System Relaxations", arXiv:2107.01499.

    Args:
        compressor: the wire format.
        error_feedback: add the compression error of one step to the gradients of the next; costs an fp32 copy of
            the gradients.

    Raises:
        TypeError: `compressor` is not a compressor, or a sparse one, for which there is `top_k`.
    """
    mean = CompressedMean(compressor)
    return during_backward(ErrorFeedback(mean) if error_feedback else mean)
