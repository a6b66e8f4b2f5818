"""The mean of gradients in 8 bits, for g_r the gradient of rank r at the common weights x and Q the compressor:

x ← x − γ d( Q( (1/n) Σ_r Q(g_r) ) )
"""

from ...arguments import checked
from ...compressors import Compressor, MinMaxUInt8
from ...rules import Rule, during_backward
from ...stages import Adaptive, CompressedMean, ErrorFeedback


@checked
def bytegrad(
    compressor: Compressor | None = None, error_feedback: bool = False, error: float | None = None, *, delay: int = 0
) -> Rule:
    """Average gradients in 8 bits: scattered as codes, averaged in fp32, gathered as codes.

    A quarter of the bytes of `gradient_allreduce` in fp32. Gan et al. 2021, "BAGUA: Scaling up Distributed Learning
    with System Relaxations", arXiv:2107.01499.

    Args:
        compressor: the wire format; None for `MinMaxUInt8()`.
        error_feedback: add the compression error of one step to the gradients of the next; costs an fp32 copy of
            the gradients.
        error: in place of a format, the relative squared error that a compression may have, above 0 and below 1, such
            as 1e-3: each bucket takes the fewest bits that keep it (`stages.Adaptive`).
        delay: the number of steps after which gradients land, as in `during_backward`.

    Raises:
        TypeError: `compressor` is not a compressor, or a sparse one, for which there is `top_k`.
        ValueError: `error` or `delay` is out of range, or a compressor is given beside an error.
    """
    if error is not None and compressor is not None:
        raise ValueError(f"bytegrad takes a compressor or an error, not both: {compressor!r} has an error of its own")
    mean = CompressedMean(MinMaxUInt8() if compressor is None else compressor) if error is None else Adaptive(error)
    return during_backward(ErrorFeedback(mean) if error_feedback else mean, delay=delay)
