"""Time steps of a GPT of 124 million values whose ranks share a GPU and send at the rate of a network.

    python scripts/gpu_real.py FACTS [--cpu] [--seconds 280] [--rates 1gbit 10gbit 100mbit] [--values small] [--staged]

Four ranks train in bf16 autocast on the bytes of Python's own library, each sending over NCCL's sockets, which are
paced (see `baguakit.compare.pacing`). A cell is one contender at one rate: a first step, and three that are timed. None
trains to a loss. A cell is written when it ends, and none is begun that its bytes say would not end in time. DiLoCo
exchanges every second step, and both kinds of steps are timed: "every 500" is their sum in those shares.

With `--staged` they send by gloo, through the memory of the host, and "2 x 2" by NCCL within two nodes of two ranks;
NCCL's sockets are paced, too, as the ranks share a GPU. First, means on the device are compared with those on the CPU.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RANKS, TIMED = 4, 3
FULL = {"width": 768, "layers": 12, "heads": 12, "vocabulary": 50257, "context": 1024, "batch": 2}
SMALL = {"width": 32, "layers": 2, "heads": 2, "vocabulary": 256, "context": 16, "batch": 2}
# Contenders, and the bytes that a rank of each sends in a step, as a share of an all-reduce in fp32: only to know which
# will not end in time.
SHARES = {
    "PowerSGD hook": 0.05,
    "DiLoCo 4 bits": 0.07,
    "bytegrad 4 bits": 0.13,
    "bytegrad": 0.25,
    "bf16 hook": 0.5,
    "DDP": 1.0,
}
STAGED = {"bytegrad 4 bits": 0.13, "bytegrad 2 x 2": 0.75, "bytegrad": 0.25, "DDP": 1.0}


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("facts", type=Path)
    parser.add_argument("--cpu", action="store_true", help="over gloo")
    parser.add_argument("--seconds", type=float, default=280.0, help="that all cells may take")
    parser.add_argument("--rates", nargs="*", default=["1gbit", "10gbit", "100mbit"])
    parser.add_argument("--values", choices=("full", "small"), default="full")
    parser.add_argument("--staged", action="store_true", help="by gloo, through the memory of the host")
    asked = parser.parse_args(words)
    from baguakit.compare.pacing import bits_per_second
    from baguakit.ranks import Ranks

    until = time.monotonic() + asked.seconds
    shape = FULL if asked.values == "full" else SMALL
    found: dict[str, Any] = {"shape": shape, "ranks": RANKS, "cells": [], "left out": []}
    with Ranks(RANKS, cuda=not asked.cpu, timeout=300) as ranks:
        found["values"] = ranks.run(prepared, not asked.cpu, shape, asked.staged, limit=200)[0]
        if asked.staged:
            found["equal"] = ranks.run(equal, limit=100)
        shares = STAGED if asked.staged else SHARES
        for rate in asked.rates:
            # The one that sends least comes first. The bf16 hook needs NCCL.
            for name in [each for each in shares if not asked.cpu or each != "bf16 hook"]:
                sent = 1.5 * 4 * found["values"] * shares[name] / bits_per_second(rate) * 8
                if time.monotonic() + (1 + TIMED) * sent + 10 > until:
                    found["left out"].append([rate, name])
                    continue
                seconds = ranks.run(timed, name, bits_per_second(rate) / 8, limit=max(60.0, 20 * sent))[0]
                found["cells"].append({"rate": rate, "contender": name, **seconds})
                print(json.dumps(found["cells"][-1]), flush=True)
                asked.facts.write_text(json.dumps(found))
    asked.facts.write_text(json.dumps(found))
    return int(not all(found.get("equal", [])))


def prepared(cuda: bool, shape: dict[str, int], staged: bool) -> int:
    """Make what this rank trains, and return its number of values."""
    import inspect
    import os

    import torch
    import torch.distributed as dist

    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    torch.manual_seed(0)
    model = gpt(**shape).to(device)
    text = "".join(path.read_text(errors="ignore") for path in sorted(Path(inspect.getfile(os)).parent.glob("*.py")))
    data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()
    draw = torch.Generator().manual_seed(dist.get_rank())
    group = dist.new_group(backend="gloo") if staged else None
    KEPT.update(model=model, data=data, draw=draw, device=device, shape=shape, group=group)
    return sum(p.numel() for p in model.parameters())


KEPT: dict[str, Any] = {}


def equal() -> bool:
    """Return whether means over gloo have the same bytes for tensors on the device and on the CPU."""
    import torch

    import baguakit as bk

    comm, results = bk.Comm(KEPT["group"]), []
    for compressor in (bk.compressors.MinMaxUInt8(), bk.compressors.UInt4(), bk.compressors.Float8()):
        for n in (1000, (1 << 22) + 5):
            x = torch.randn(n, generator=torch.Generator().manual_seed(comm.rank))
            there = bk.primitives.compressed_mean_(x.to(KEPT["device"]), compressor, comm)
            results.append(torch.equal(there.cpu(), bk.primitives.compressed_mean_(x, compressor, comm)))
    return all(results)


def gpt(width: int, layers: int, heads: int, vocabulary: int, context: int, batch: int) -> Any:
    """Return GPT-2's architecture: its head shares the weights of the embedding."""
    from torch import nn

    class GPT(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
            block = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
            self.blocks = nn.TransformerEncoder(block, layers, nn.LayerNorm(width), enable_nested_tensor=False)
            self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(context))

        def forward(self, x: Any) -> Any:
            h = self.tokens(x) + self.places.weight
            return self.blocks(h, self.mask, is_causal=True) @ self.tokens.weight.T

    return GPT()


def timed(name: str, rate: float) -> dict[str, Any]:
    """Time steps of a contender at a rate, from the slowest rank."""
    import torch
    import torch.distributed as dist
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
    from torch.distributed.device_mesh import init_device_mesh

    import baguakit as bk
    from baguakit.compare.pacing import Pacer

    model, device, shape = KEPT["model"], KEPT["device"], KEPT["shape"]
    optimizer, forward, held = torch.optim.AdamW(model.parameters(), 3e-4), model, None
    group = KEPT["group"]
    a, four = bk.algorithms, bk.compressors.UInt4()
    ours = {
        "bytegrad": lambda: a.bytegrad(),
        "bytegrad 4 bits": lambda: a.bytegrad(four, error_feedback=True),
        "DiLoCo 4 bits": lambda: a.diloco(every=2, inner=bk.stages.ErrorFeedback(bk.stages.CompressedMean(four))),
    }
    if name == "bytegrad 2 x 2":
        mesh = init_device_mesh(device.type, (RANKS // 2, 2), mesh_dim_names=("inter", "intra"))
        comm = bk.Comm(mesh=mesh, between="gloo")
        held = bk.attach(model, optimizer, bk.hierarchical(a.bytegrad()), comm=comm, timeout=300)
    elif name in ours:
        held = bk.attach(model, optimizer, ours[name](), comm=bk.Comm(group), timeout=300)
    else:
        forward = torch.nn.parallel.DistributedDataParallel(model, process_group=group)
        if name == "bf16 hook":
            forward.register_comm_hook(None, default_hooks.bf16_compress_hook)
        if name == "PowerSGD hook":
            state = powerSGD_hook.PowerSGDState(None, 4, start_powerSGD_iter=2)
            forward.register_comm_hook(state, powerSGD_hook.powerSGD_hook)

    def step() -> float:
        places = torch.randint(len(KEPT["data"]) - shape["context"] - 1, (shape["batch"],), generator=KEPT["draw"])
        rows = torch.stack([KEPT["data"][i : i + shape["context"] + 1] for i in places.tolist()]).to(device)
        if device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier()
        began = time.perf_counter()
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16):
            logits = forward(rows[:, :-1])
        torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten()).backward()
        optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        longest = torch.tensor(time.perf_counter() - began, device=device)
        dist.all_reduce(longest, dist.ReduceOp.MAX)
        return float(longest)

    warm = 3 if name == "PowerSGD hook" else 1 + (name == "DiLoCo 4 bits")
    for _ in range(warm - 1):  # at full speed: connections, compilers, and what a contender does only at first
        step()
    with Pacer(rate):
        step()
        seconds = [step() for _ in range(TIMED + (name == "DiLoCo 4 bits"))]
    if held is not None:
        held.detach()
    found: dict[str, Any] = {"seconds": [round(each, 4) for each in seconds]}
    if name == "DiLoCo 4 bits":
        local, exchange = sorted(min(seconds[i::2]) for i in (0, 1))
        found |= {"local": local, "exchange": exchange, "every 500": round(local + (exchange - local) / 500, 4)}
    return found


if __name__ == "__main__":
    import gpu_real  # without cloudpickle, ranks find a function by the name of its module

    sys.exit(gpu_real.main(sys.argv[1:]))
