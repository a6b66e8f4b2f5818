"""Algorithms that average gradients, for g_r the gradient of rank r at the common weights x:

gradient_allreduce      x ← x − γ d( (1/n) Σ_r g_r )
bytegrad                x ← x − γ d( Q( (1/n) Σ_r Q(g_r) ) )
"""

from ..arguments import checked
from ..compressors import Compressor, MinMaxUInt8
from ..rules import Rule, during_backward
from ..stages import CompressedMean, ErrorFeedback, Mean


def gradient_allreduce() -> Rule:
    """The exact mean of the gradients, as `DistributedDataParallel` computes it.

    Sends 2 (n − 1)/n times the size of the gradients in each step.
    """
    return during_backward(Mean())


@checked
def bytegrad(compressor: Compressor = MinMaxUInt8(), error_feedback: bool = False) -> Rule:
    """Gradients averaged in 8 bits: scattered as codes, averaged in fp32, gathered as codes.

    A quarter of the bytes of `gradient_allreduce` in fp32. Gan et al. 2021, "BAGUA: Scaling up Distributed Learning
    with System Relaxations", arXiv:2107.01499.

    Args:
        compressor: how values look on the wire.
        error_feedback: add what compression lost in one step to the gradients of the next; costs an fp32 copy of
            the gradients.

    Raises:
        TypeError: `compressor` is not a compressor, or a sparse one, for which there is `top_k`.
    """
    mean = CompressedMean(compressor)
    return during_backward(ErrorFeedback(mean) if error_feedback else mean)
