"""Live ranks on this machine: processes that speak gloo to each other, kept for a notebook, a script or a test.

    ranks = bk.Ranks(4)

    def mean_of_ranks():
        x = torch.tensor([float(bk.Comm().rank)])
        return bk.primitives.mean_(x, bk.Comm())

    ranks.run(mean_of_ranks)        # [tensor([1.5000]), tensor([1.5000]), tensor([1.5000]), tensor([1.5000])]

Of its files, `live` is what the caller holds, `crew` the processes and a call of theirs, `launcher` the process that
makes them, `serving` the life of a rank, `lines` what the two sides speak over, and `showing` what the caller sees.
"""

from .live import RankError, Ranks
from .serving import progress

__all__ = ["RankError", "Ranks", "progress"]
