"""The exact mean of gradients, for g_r the gradient of rank r at the common weights x:

x ← x − γ d( (1/n) Σ_r g_r )
"""

from ...arguments import checked
from ...rules import Rule, during_backward
from ...stages import Mean


@checked
def gradient_allreduce(*, delay: int = 0) -> Rule:
    """Average gradients exactly, as `DistributedDataParallel` computes it.

    Sends 2 (n − 1)/n times the size of the gradients in each step.

    Args:
        delay: the number of steps after which gradients land, as in `during_backward`.

    Raises:
        TypeError, ValueError: `delay` is no whole number, or less than 0.
    """
    return during_backward(Mean(), delay=delay)
