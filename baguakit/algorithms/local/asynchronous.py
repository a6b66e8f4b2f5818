"""Asynchronous model averaging: ranks train at their own pace, and their weights are averaged in the background.

    x_r ← x_r − γ d(g_r(x_r))                              in every step, without waiting
    x_r ← x_r + (1/|A|) Σ_{j in A} x̂_j − x̂_r              whenever a flight arrives

x̂_j are the weights that rank j launched and A the ranks that still train. The progress made during the flight is kept.
Gan et al. 2021, "BAGUA", arXiv:2107.01499, section 3; as AsyncModelAverage there.
"""

from ...arguments import checked, integer
from ...rules import Algorithm, during_backward, free_running
from ...stages import Mean


@checked
def async_model_average(warmup_steps: int = 0, interval: float = 0.0) -> Algorithm:
    """Average the weights as often as the network allows; stragglers slow nobody down.

    Each flight sends 2 (n − 1)/n times the size of the weights. Ranks may make different numbers of steps: one that
    leaves answers with weight 0 until all have left. Weights differ between ranks; `att.merge()` averages them. A
    flight under way when a checkpoint is taken is not part of it.

    Args:
        warmup_steps: average gradients in the first so many steps, so that ranks start from equal weights.
        interval: seconds to let pass between the landing of a flight and the launch of the next.

    Raises:
        ValueError: `warmup_steps` is not a whole number, or `interval` is negative.
    """
    flight = free_running(Mean(), interval=interval, start=integer("warmup_steps", warmup_steps, 0))
    return (during_backward(Mean(), stop=warmup_steps), flight) if warmup_steps else flight
