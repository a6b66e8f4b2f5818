"""Live ranks: processes on this machine that run functions of a notebook, a script or a test over gloo.

    ranks = bk.Ranks(4)

    def mean_of_ranks():
        x = torch.tensor([float(bk.Comm().rank)])
        return bk.primitives.mean_(x, bk.Comm())

    ranks.run(mean_of_ranks)        # [tensor([1.5000]), tensor([1.5000]), tensor([1.5000]), tensor([1.5000])]

`live` has the class `Ranks`. `serving` has the code of the ranks, and of the process that forks them.
"""

from ..expressions import show_public
from .live import RankError, Ranks

__all__ = ["RankError", "Ranks"]

show_public(__name__)
