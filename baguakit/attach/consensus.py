"""Exact means over ranks: of all weights, with the ranks' distance from it, and of gradients that no bucket holds."""

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..buckets import local, real
from ..comm import Comm
from ..primitives import mean_
from .setup.sharding import reshard

CHUNK = 1 << 24  # values at a time, so that the fp32 copies stay small


@torch.no_grad()
def merge_(model: nn.Module, comm: Comm, device: torch.device) -> None:
    """Overwrite every parameter and buffer but integers with its mean over all ranks, in fp32 (fp64 for fp64)."""
    if comm.size == 1:
        return
    reshard(model)
    tensors = dict.fromkeys([*model.parameters(), *model.buffers()])
    floating = [real(local(x)) for x in tensors if x.is_floating_point() or x.is_complex()]
    for chunk in chunks(floating):
        exact = torch.float64 if any(x.dtype == torch.float64 for x in chunk) else torch.float32
        flat = torch.cat([x.to(device, exact).flatten() for x in chunk])
        comm.all_reduce(flat.div_(comm.size))
        for x, mean in zip(chunk, flat.split([x.numel() for x in chunk]), strict=True):
            x.copy_(mean.view(x.shape))


@torch.no_grad()
def mean_gradients_(params: Sequence[Tensor], comm: Comm) -> None:
    """Average exactly the gradients that some rank has of these parameters; a missing one counts as zero."""
    mine = torch.tensor([p.grad is not None for p in params], dtype=torch.uint8, device=params[0].device)
    used = comm.all_reduce(mine, dist.ReduceOp.MAX).tolist() if comm.size > 1 else []
    for p, somewhere in zip(params, used, strict=False):
        if somewhere and p.grad is None:
            p.grad = torch.zeros_like(p)
    mean_([p.grad for p in params if p.grad is not None], comm)


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
