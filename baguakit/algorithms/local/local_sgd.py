"""Local SGD: train alone for some steps, then average the weights.

    x_r ← x_r − γ d(g_r(x_r))                     in every step
    x_r ← (1/n) Σ_j x_j                           after every H-th

Stich 2018, "Local SGD Converges Fast and Communicates Little", arXiv:1805.09767; post-local SGD: Lin et al. 2018,
"Don't Use Large Mini-Batches, Use Local SGD", arXiv:1808.07217. Rounds that grow as the learning rate γ falls,
`every=lambda step: max(H, int((α / γ(step)) ** 2))`: Gu et al. 2024, "A Quadratic Synchronization Rule for Distributed
Deep Learning", arXiv:2310.14423.
"""

from ...arguments import checked, integer
from ...rules import Algorithm, Every, after_step, during_backward
from ...stages import Mean


@checked
def local_sgd(every: Every = 8, start: int = 0) -> Algorithm:
    """Average the weights after every `every` steps; sends 2 (n − 1)/n times their size, divided by `every`, a step.

    Args:
        every: H, the number of local steps between averages; or a function as in `bk.after_step`.
        start: until this step average gradients instead (post-local SGD).

    Raises:
        ValueError: `every` is less than 1, or `start` negative.
    """
    average = after_step(Mean(), every=every, start=integer("start", start, 0))
    return (during_backward(Mean(), stop=start), average) if start else average
