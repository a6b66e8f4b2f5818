"""The mean of what each rank finds most important."""

import torch
from torch import Tensor

from ..arguments import instance
from ..comm import Comm, check_comm
from ..compressors import Compressor
from .compressed import Longer, check_residual
from .flat import on_flat


@on_flat
def sparse_mean_(x: Tensor, compressor: Compressor, comm: Comm, residual: Tensor | None = None) -> Tensor:
    """Average what a sparse compressor keeps of each rank's `x`:  x ← (1/n) Σ_r keep(x_r).

    Contributions are gathered, and added one rank after another, so that the results are bitwise equal. Sends (n − 1)
    times the packed bytes.

    Args:
        x: a floating tensor of any shape, or a list of them in one dtype; overwritten.
        compressor: such as `compressors.TopK(0.01)`.
        comm: the group. With one rank nothing happens and nothing is lost.
        residual: fp32, as long as `x`; overwritten by what this rank did not send.

    Returns:
        `x`.

    Raises:
        TypeError: a tensor is not floating, or is sparse.
        ValueError: `residual` is not contiguous, not fp32, or not as long as `x`.
    """
    check_comm(comm)
    instance("compressor", compressor, Compressor, "a compressor such as TopK(0.01)")
    if residual is not None:
        check_residual(residual, x)
    sent, plain = (comm.size - 1) * compressor.row_bytes(x.numel()), 2 * (comm.size - 1) * x.nbytes // comm.size
    comm.note(compressor, compressor, Longer(sent, plain) if sent >= plain > 0 else "")
    if comm.size == 1 or x.numel() == 0:
        if residual is not None:
            residual.zero_()
        return x
    row = x.view(1, -1)
    packed = compressor.compress(row, residual=None if residual is None else residual.view(1, -1), key=comm.key())
    everyone = comm.all_gather(packed)
    weights = torch.full((comm.size,), 1 / comm.size, dtype=torch.float32, device=x.device)
    return compressor.add_(x.zero_(), everyone, weights)
