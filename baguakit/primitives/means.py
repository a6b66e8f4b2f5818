"""The exact mean."""

from torch import Tensor

from ..comm import Comm, check_comm
from .flat import on_flat


@on_flat
def mean_(x: Tensor, comm: Comm) -> Tensor:
    """Average `x` over all ranks:  x ← (1/n) Σ_r x_r.

    torch's all-reduce in the dtype of `x`, after a multiplication by 1/n, as in `DistributedDataParallel`.

    Args:
        x: a floating tensor of any shape, or a list of them; overwritten.
        comm: the group. With one rank nothing happens.

    Returns:
        `x`.

    Raises:
        TypeError: a tensor is not floating, or is sparse.
    """
    check_comm(comm)
    if comm.size > 1:
        comm.all_reduce(x.mul_(1 / comm.size))
    return x
