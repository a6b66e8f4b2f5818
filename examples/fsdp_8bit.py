"""Train with FSDP2 on GPUs whose links are slow (PCIe without NVLink): gradients travel in 8 bits.

    torchrun --standalone --nproc_per_node=8 examples/fsdp_8bit.py --folder checkpoints

`fully_shard`, bf16 parameters, gradient accumulation, clipping, checkpoints, resuming, and a report of the bytes sent.
Start it again with the same folder, and it continues from its newest checkpoint: the weights of a resumed run equal
those of an uninterrupted one bit for bit, on the same number of ranks.

Of a model of N values each of n ranks sends in a step, as it stands here:

    gradients   (n − 1)/n · 1.01 N bytes      FSDP's reduce-scatter in fp32: (n − 1)/n · 4 N
    weights     (n − 1)/n · 2 N               in bf16, gathered once a step and kept until its last backward
                half of that                  with --weights: in 8 bits; ranks then compute with rounded weights
                twice a micro-batch           with --reshard, which saves memory

Each rank has a GPU and NCCL where there are enough, otherwise the CPU and gloo. The model is a small transformer, and
the data are sequences that count: put yours in their place.
"""

import argparse
import hashlib
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.functional import cross_entropy

import baguakit as bk

TOKENS, LENGTH, BATCH = 64, 16, 4


class Transformer(nn.Module):
    """A causal transformer of two layers; `width` sets its size."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, width)
        options = {"dropout": 0.1, "batch_first": True, "norm_first": True}
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(width, 4, 4 * width, **options) for _ in range(2))
        self.head = nn.Linear(width, TOKENS)

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores (batch, length, TOKENS) of the next tokens, in fp32."""
        hidden = self.embed(x)
        mask = torch.full((LENGTH, LENGTH), float("-inf"), device=x.device, dtype=hidden.dtype).triu(1)
        for layer in self.layers:
            hidden = layer(hidden, mask, is_causal=True)
        scores: Tensor = self.head(hidden).float()
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


def sharded(options: argparse.Namespace, device: torch.device) -> FSDPModule:
    """Return the model, sharded over all ranks layer by layer.

    Its weights are fp32 and are gathered in bf16. Gradients are reduced in fp32: on the wire they have 8 bits anyway.
    """
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    torch.manual_seed(0)
    model = Transformer(options.width).to(device)
    torch.manual_seed(1 + dist.get_rank())  # dropout is another on each rank
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=options.reshard)
    return fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=options.reshard)


def generator(device: torch.device) -> torch.Generator:
    """Return the generator from which dropout draws on this device."""
    return torch.cuda.default_generators[device.index] if device.type == "cuda" else torch.default_generator


def newest(folder: Path) -> Path | None:
    """Return the newest checkpoint; rank 0 chooses for all."""
    found = [max((path for path in folder.glob("[0-9]*") if path.suffix != ".tmp"), default=None)]
    dist.broadcast_object_list(found)
    return found[0]


def save(
    folder: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, handle: bk.interop.Handle
) -> None:
    """Write a checkpoint: shards by torch.distributed.checkpoint, and what is a rank's own in a file for each.

    It appears under its name when all of it has been written.
    """
    unfinished = folder / f"{step:08}.tmp"
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments, "step": step}, checkpoint_id=unfinished)
    own = {"handle": handle.state_dict(), "random": generator(next(model.parameters()).device).get_state()}
    torch.save(own, unfinished / f"rank{dist.get_rank()}.pt")
    dist.barrier()
    if dist.get_rank() == 0:
        unfinished.rename(folder / f"{step:08}")
    dist.barrier()


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, handle: bk.interop.Handle) -> int:
    """Read a checkpoint; return its step."""
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments, "step": 0}
    dcp.load(state, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    own = torch.load(path / f"rank{dist.get_rank()}.pt", weights_only=True)
    handle.load_state_dict(own["handle"])
    generator(next(model.parameters()).device).set_state(own["random"])
    return int(state["step"])


def train(options: argparse.Namespace, device: torch.device) -> tuple[nn.Module, bk.interop.Handle]:
    """Train to `options.steps`, from the newest checkpoint on if there is one."""
    model = sharded(options, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    stage = bk.stages.ErrorFeedback(bk.stages.CompressedMean(bk.compressors.Float8()))
    handle = bk.interop.fsdp(model, stage, weights=bk.compressors.Float8() if options.weights else None)
    found = newest(options.folder)
    begin = 0 if found is None else load(found, model, optimizer, handle)

    for step in range(begin, options.steps):
        began = time.perf_counter()
        for part in range(options.accumulate):
            last = part == options.accumulate - 1
            model.set_requires_gradient_sync(last)  # only the last one is averaged
            model.set_reshard_after_backward(last or options.reshard)  # the others use the weights that are there
            x, y = batch(step, part, device)
            loss = cross_entropy(model(x).flatten(0, 1), y.flatten()) / options.accumulate
            loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()  # of the averaged gradients
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and (step + 1) % options.every == 0:
            seconds = time.perf_counter() - began
            print(
                f"step {step + 1}: loss {loss.item():.4f}, norm {norm.item():.3f}, {seconds * 1e3:.1f} ms", flush=True
            )
        if (step + 1) % options.every == 0:
            save(options.folder, step + 1, model, optimizer, handle)
    return model, handle


def tell(model: nn.Module, handle: bk.interop.Handle) -> None:
    """Print the gradients' bytes beside those of FSDP's reduce-scatter, and a digest of the weights. Collective."""
    weights = b"".join(p.full_tensor().detach().cpu().numpy().tobytes() for p in model.parameters())
    if dist.get_rank() == 0:
        n, values = dist.get_world_size(), sum(p.numel() for p in model.parameters())
        plain, report = (n - 1) / n * 4 * values, handle.report()
        print(report)
        sent = sum(row.bytes_sent for row in report.rows if row.number == 0) / report.steps  # 1 is the weights
        print(f"{sent / plain:.3f} of the {plain / 1e6:.2f} MB that FSDP's fp32 reduce-scatter sends")
        print(f"weights {hashlib.sha256(weights).hexdigest()[:16]}", flush=True)


def arguments() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description="FSDP2 with gradients in 8 bits.")
    parser.add_argument("--folder", type=Path, required=True, help="of the checkpoints, which all ranks can reach")
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps in all (%(default)s)")
    parser.add_argument("--every", type=int, default=20, help="steps between checkpoints (%(default)s)")
    parser.add_argument("--accumulate", type=int, default=2, help="micro-batches of a step (%(default)s)")
    parser.add_argument("--width", type=int, default=128, help="of the transformer (%(default)s)")
    parser.add_argument("--weights", action="store_true", help="gather the weights in 8 bits, too")
    parser.add_argument("--reshard", action="store_true", help="gather the weights a second time, in backward")
    options = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error(
            "start it with torchrun --standalone --nproc_per_node=8 examples/fsdp_8bit.py --folder checkpoints"
        )
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
    model, handle = train(options, device)
    tell(model, handle)
    handle.detach()
    dist.barrier()  # nobody leaves while another still needs it
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
