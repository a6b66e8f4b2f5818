"""The exact mean of all weights over ranks, and the ranks' distance from it."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from ..buckets import local, real
from ..comm import Comm
from ..runtime import reshard

CHUNK = 1 << 24  # values at a time, so that the fp32 copies stay small


@torch.no_grad()
def merge_(model: nn.Module, comm: Comm, device: torch.device) -> None:
    """Overwrite every parameter, and every dense buffer but integers, with its mean over all ranks.

    In fp32; in fp64 for fp64.
    """
    if comm.size == 1:
        return
    reshard(model)
    tensors = dict.fromkeys([*model.parameters(), *model.buffers()])
    floats = (local(x) for x in tensors if x.is_floating_point() or x.is_complex())
    floating = [real(x) for x in floats if x.layout is torch.strided]
    for chunk in chunks(floating):
        exact = torch.float64 if any(x.dtype == torch.float64 for x in chunk) else torch.float32
        flat = torch.cat([x.to(device, exact).flatten() for x in chunk])
        comm.all_reduce(flat.div_(comm.size))
        for x, mean in zip(chunk, flat.split([x.numel() for x in chunk]), strict=True):
            x.copy_(mean.view(x.shape))


@torch.no_grad()
def consensus_distance(params: Sequence[Tensor], comm: Comm) -> float:
    """Return sqrt( (1/n) Σ_r ‖x_r − x̄‖² ), summed in fp64; of a sharded model, over this rank's shards."""
    if comm.size == 1:
        return 0.0
    squares = torch.zeros((), dtype=torch.float64, device=params[0].device)
    for chunk in chunks([real(local(p)) for p in params]):
        x = torch.cat([p.flatten().double() for p in chunk])
        mean = comm.all_reduce(x / comm.size)
        squares += (x - mean).square().sum()
    return float((comm.all_reduce(squares) / comm.size).sqrt())


def chunks(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield the tensors in lists of about `CHUNK` values."""
    held: list[Tensor] = []
    for x in tensors:
        if held and sum(h.numel() for h in held) + x.numel() > CHUNK:
            yield held
            held = []
        held.append(x)
    if held:
        yield held
