"""Train with DDP on GPUs whose links are slow (PCIe without NVLink): gradients travel in 8 bits.

    torchrun --standalone --nproc_per_node=8 examples/ddp_8bit.py --folder checkpoints

DDP, bf16 autocast, gradient accumulation, clipping, a learning-rate schedule, checkpoints, resuming, and a report of
the bytes sent. Start it again with the same folder, and it continues from its newest checkpoint: the weights of a
resumed run equal those of an uninterrupted one bit for bit, on the same number of ranks. `--plain` leaves DDP's own
all-reduce, to compare.

Each rank has a GPU and NCCL where there are enough, otherwise the CPU and gloo. The model is a small transformer, and
the data are sequences that count: put yours in their place.
"""

import argparse
import contextlib
import hashlib
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import baguakit as bk

TOKENS, LENGTH, BATCH = 64, 16, 4


class Transformer(nn.Module):
    """A causal transformer of two layers; `width` sets its size."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.1, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, TOKENS)

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores (batch, length, TOKENS) of the next tokens."""
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        scores: Tensor = self.head(self.body(self.embed(x), mask, is_causal=True))
        return scores


def batch(step: int, part: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return inputs and targets: the same whenever they are asked for, and others on each rank."""
    random = torch.Generator().manual_seed((step * 1000 + part) * 1000 + dist.get_rank())
    start, stride = (
        torch.randint(TOKENS, (BATCH, 1), generator=random),
        torch.randint(1, 4, (BATCH, 1), generator=random),
    )
    text = ((start + stride * torch.arange(LENGTH + 1)) % TOKENS).to(device)
    return text[:, :-1], text[:, 1:]


def loss_of(model: nn.Module, step: int, part: int, device: torch.device) -> Tensor:
    """Return the loss of one micro-batch, computed in bf16 where autocast finds it safe."""
    x, y = batch(step, part, device)
    with torch.autocast(device.type, torch.bfloat16):
        return cross_entropy(model(x).flatten(0, 1), y.flatten())


def generator(device: torch.device) -> torch.Generator:
    """Return the generator from which dropout draws on this device."""
    return torch.cuda.default_generators[device.index] if device.type == "cuda" else torch.default_generator


def settle_buckets(model: DistributedDataParallel, device: torch.device) -> None:
    """Make one backward whose gradients are thrown away.

    DDP cuts its buckets anew after its first backward, by the order in which gradients arrived. Formats in blocks round
    by those cuts, so that a resumed run equals an uninterrupted one only if both train in the final buckets.
    """
    loss_of(model, 0, 0, device).backward()
    model.zero_grad()


def newest(folder: Path) -> Path | None:
    """Return the newest checkpoint; rank 0 chooses for all."""
    found = [max((path for path in folder.glob("[0-9]*") if path.suffix != ".tmp"), default=None)]
    dist.broadcast_object_list(found)
    return found[0]


def save(folder: Path, step: int, shared: dict[str, Any], own: dict[str, Any]) -> None:
    """Write a checkpoint: what is equal on all ranks once, and what is a rank's own in a file for each.

    It appears under its name when all of it has been written.
    """
    unfinished = folder / f"{step:08}.tmp"
    unfinished.mkdir(parents=True, exist_ok=True)
    if dist.get_rank() == 0:
        torch.save(shared, unfinished / "shared.pt")
    torch.save(own, unfinished / f"rank{dist.get_rank()}.pt")
    dist.barrier()
    if dist.get_rank() == 0:
        unfinished.rename(folder / f"{step:08}")
    dist.barrier()


def train(options: argparse.Namespace, device: torch.device) -> tuple[nn.Module, bk.interop.Handle | None]:
    """Train to `options.steps`, from the newest checkpoint on if there is one."""
    torch.manual_seed(0)
    module = Transformer(options.width).to(device)
    torch.manual_seed(1 + dist.get_rank())  # dropout is another on each rank
    model = DistributedDataParallel(module, device_ids=[device.index] if device.type == "cuda" else None)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
    settle_buckets(model, device)
    mean = bk.stages.CompressedMean(bk.compressors.Float8())
    handle = None if options.plain else bk.interop.ddp(model, bk.stages.ErrorFeedback(mean))

    begin, found = 0, newest(options.folder)
    if found is not None:  # in this order: model, optimizer, handle
        shared = torch.load(found / "shared.pt", map_location=device, weights_only=True)
        module.load_state_dict(shared["model"])
        optimizer.load_state_dict(shared["optimizer"])
        schedule.load_state_dict(shared["schedule"])
        own = torch.load(found / f"rank{dist.get_rank()}.pt", weights_only=True)
        generator(device).set_state(own["random"])
        if handle is not None:
            handle.load_state_dict(own["handle"])
        begin = shared["step"]

    for step in range(begin, options.steps):
        began = time.perf_counter()
        for part in range(options.accumulate):
            last = part == options.accumulate - 1
            with contextlib.nullcontext() if last else model.no_sync():  # only the last one is averaged
                loss = loss_of(model, step, part, device) / options.accumulate
                loss.backward()
        norm = nn.utils.clip_grad_norm_(module.parameters(), 1.0)  # of the averaged gradients
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and (step + 1) % options.every == 0:
            seconds = time.perf_counter() - began
            print(
                f"step {step + 1}: loss {loss.item():.4f}, norm {norm.item():.3f}, {seconds * 1e3:.1f} ms", flush=True
            )
        if (step + 1) % options.every == 0:
            shared = {"step": step + 1, "model": module.state_dict(), "optimizer": optimizer.state_dict()}
            shared["schedule"] = schedule.state_dict()
            own = {"random": generator(device).get_state()}
            save(options.folder, step + 1, shared, own if handle is None else own | {"handle": handle.state_dict()})
    return module, handle


def tell(module: nn.Module, handle: bk.interop.Handle | None) -> None:
    """Print what was sent, beside what DDP would have sent, and a digest of the weights."""
    n, values = dist.get_world_size(), sum(p.numel() for p in module.parameters())
    plain = 2 * (n - 1) / n * 4 * values
    if handle is not None:
        report = handle.report()
        print(report)
        print(f"{report.bytes_per_step / plain:.3f} of the {plain / 1e6:.2f} MB that DDP's all-reduce sends in a step")
    weights = b"".join(p.detach().cpu().numpy().tobytes() for p in module.parameters())
    print(f"weights {hashlib.sha256(weights).hexdigest()[:16]}", flush=True)


def arguments() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description="DDP with gradients in 8 bits.")
    parser.add_argument("--folder", type=Path, required=True, help="of the checkpoints, which all ranks can reach")
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps in all (%(default)s)")
    parser.add_argument("--every", type=int, default=20, help="steps between checkpoints (%(default)s)")
    parser.add_argument("--accumulate", type=int, default=2, help="micro-batches of a step (%(default)s)")
    parser.add_argument("--width", type=int, default=128, help="of the transformer (%(default)s)")
    parser.add_argument("--plain", action="store_true", help="DDP's own all-reduce")
    options = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start it with torchrun --standalone --nproc_per_node=8 examples/ddp_8bit.py --folder checkpoints")
    return options


def main() -> None:
    """Meet the other ranks, train, and report."""
    options = arguments()
    device = torch.device("cpu")
    if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    module, handle = train(options, device)
    if dist.get_rank() == 0:
        tell(module, handle)
    if handle is not None:
        handle.detach()
    dist.barrier()  # nobody leaves while another still needs it
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
