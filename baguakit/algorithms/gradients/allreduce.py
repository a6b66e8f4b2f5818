"""The exact mean of gradients, for g_r the gradient of rank r at the common weights x:

x ← x − γ d( (1/n) Σ_r g_r )
"""

from ...rules import Rule, during_backward
from ...stages import Mean


def gradient_allreduce() -> Rule:
    """Average gradients exactly, as `DistributedDataParallel` computes it.

    Sends 2 (n − 1)/n times the size of the gradients in each step.
    """
    return during_backward(Mean())
