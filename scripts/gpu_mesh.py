"""Train on a mesh of nodes over NCCL, every algorithm and every way to attach, and compare with the same over gloo.

    python scripts/gpu_mesh.py FACTS [--cpu] [--ranks 8] [--only WORD …]

Ranks are 2 nodes of half of them each, all on one GPU if there is no second. Each case trains a small network, once
over NCCL and once on CPUs over gloo, from the same weights and data, and returns the weights of every rank. Written
after each case: whether ranks that should be equal are, bit for bit, and how far weights are from those of gloo, as a
share of how far training moved them. Ends with 1 if ranks differ, or a share is above 0.05: formats round, and one code
more or less on a GPU is a 255th of a block's range in one gradient.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

STEPS = 6
LIMIT = 60.0  # seconds of a case
FAR = 0.05


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("facts", type=Path)
    parser.add_argument("--cpu", action="store_true", help="gloo beside gloo")
    parser.add_argument("--ranks", type=int, default=8, help="an even number")
    parser.add_argument("--only", nargs="*", help="take cases whose name has one of these words")
    asked = parser.parse_args(words)
    import torch

    from baguakit.ranks import Ranks

    names = [name for name in case_names() if not asked.only or any(word in name for word in asked.only)]
    found: dict[str, Any] = {}
    with Ranks(asked.ranks, cuda=not asked.cpu, timeout=60) as there, Ranks(asked.ranks, timeout=60) as here:
        for name in names:
            try:
                ours, gloo = (
                    r.run(trained, name, cuda, limit=LIMIT) for r, cuda in ((there, not asked.cpu), (here, 0))
                )
                found[name] = compared(ours, gloo)
            except Exception as error:
                found[name] = {"error": f"{type(error).__name__}: {error}"[-600:], "ok": False}
            print(json.dumps({name: found[name]}), flush=True)
            asked.facts.write_text(json.dumps({"ranks": asked.ranks, "torch": torch.__version__, "cases": found}))
    bad = [name for name, each in found.items() if not each["ok"]]
    print(f"{len(found) - len(bad)} of {len(found)} cases hold" + f"; not: {', '.join(bad)}" * bool(bad))
    return int(bool(bad))


def compared(ours: Sequence[Any], gloo: Sequence[Any]) -> dict[str, Any]:
    """Compare the weights of all ranks with each other, if they should be equal, and with those of gloo."""
    alike = all(rank["weights"] == ours[0]["weights"] for rank in ours) or not ours[0]["alike"]
    off = 0.0
    for a, b in zip(ours, gloo, strict=True):
        moved = sum((x - y) ** 2 for x, y in zip(b["weights"], b["began"], strict=True)) ** 0.5
        apart = sum((x - y) ** 2 for x, y in zip(a["weights"], b["weights"], strict=True)) ** 0.5
        off = max(off, apart / moved if moved else float(apart > 0))
    return {"ranks equal": alike, "off gloo": float(f"{off:.3g}"), "ok": alike and off <= FAR}


def algorithms() -> dict[str, Any]:
    """Return every algorithm by default, some between nodes, and gossip with one and with several peers."""
    import baguakit as bk
    from baguakit.tune.planning import every

    a, four = bk.algorithms, bk.compressors.UInt4()
    between = [a.gradient_allreduce(), a.bytegrad(), a.bytegrad(four, error_feedback=True), a.local_sgd(2), a.qadam(2)]
    gossip = [bk.after_step(bk.stages.NeighborMean(t)) for t in (bk.topology.Ring(), bk.topology.Exponential())]
    made = [*every(), *map(bk.hierarchical, between), *gossip, a.diloco(every=2)]
    free = {repr(a.async_model_average())}  # ranks are at different steps: nothing to compare
    return {repr(each): each for each in made if repr(each) not in free}


def case_names() -> list[str]:
    """Return the names of all cases."""
    return [*algorithms(), *WAYS]


def trained(name: str, cuda: Any) -> dict[str, Any]:
    """Train one case on this rank; return its weights, those at the beginning, and whether ranks should be equal."""
    import torch
    import torch.distributed as dist

    import baguakit as bk

    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    mesh = torch.distributed.device_mesh.init_device_mesh(
        device.type, (2, dist.get_world_size() // 2), mesh_dim_names=("inter", "intra")
    )
    comm = bk.Comm(mesh=mesh)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(24, 64), torch.nn.Tanh(), torch.nn.Linear(64, 3)).to(device)
    began = flat(model)
    if name in WAYS:
        model, alike = WAYS[name](model, comm), True
    else:
        algorithm = algorithms()[name]
        train(model, bk.attach(model, sgd(model), algorithm, comm=comm, bucket_bytes=4096), comm)
        alike = all(rule.what == "grad" for rule in bk.rules.rules_of(algorithm))
    return {"weights": flat(model), "began": began, "alike": alike}


def sgd(model: Any) -> Any:
    import torch

    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def flat(model: Any) -> list[float]:
    """Return all weights in fp64, those of shards gathered."""
    whole = (p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters())
    return [value for p in whole for value in p.detach().double().cpu().flatten().tolist()]


def train(
    model: Any, attached: Any, comm: Any, steps: range = range(STEPS), forward: Any = None, many: int = 1
) -> None:
    """Train on this rank's data, and detach; `many` micro-batches a step, all but the last under `no_sync`."""
    import contextlib

    import torch

    optimizer = attached._life.setup.optimizers[0] if hasattr(attached, "_life") else attached.optimizer
    p = next(model.parameters())
    for step in steps:
        optimizer.zero_grad()
        for i in range(many):
            draw = torch.Generator().manual_seed(1000 * step + 10 * comm.rank + i)
            x, y = (torch.randn(16, n, generator=draw).to(p.device, p.dtype) for n in (24, 3))
            with attached.no_sync() if i < many - 1 else contextlib.nullcontext():
                ((forward or model)(x) - y).square().mean().backward()
        optimizer.step()
    attached.detach()


class Hooked:
    """A handle of interop, with the optimizer that trains and the wrapper's `no_sync`."""

    def __init__(self, handle: Any, optimizer: Any, no_sync: Any) -> None:
        self.detach, self.optimizer, self.no_sync = handle.detach, optimizer, no_sync


def in_bf16(model: Any, comm: Any) -> Any:
    import torch

    import baguakit as bk

    model.to(torch.bfloat16)
    train(model, bk.attach(model, sgd(model), bk.algorithms.bytegrad(), comm=comm), comm)
    return model


def in_ddp(model: Any, comm: Any) -> Any:
    import torch

    import baguakit as bk

    ddp = torch.nn.parallel.DistributedDataParallel(model)
    stage = bk.stages.Hierarchical(bk.stages.CompressedMean())
    train(ddp, Hooked(bk.interop.ddp(ddp, stage, comm), sgd(ddp), ddp.no_sync), comm, many=2)
    return model


def in_fsdp(model: Any, comm: Any) -> Any:
    import contextlib

    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    import baguakit as bk

    kind = next(model.parameters()).device.type
    fully_shard(model, mesh=torch.distributed.device_mesh.init_device_mesh(kind, (dist.get_world_size(),)))
    handle = bk.interop.fsdp(model, bk.stages.CompressedMean(bk.compressors.Float8()))
    train(model, Hooked(handle, sgd(model), contextlib.nullcontext), comm)
    return model


def accumulated(model: Any, comm: Any) -> Any:
    import baguakit as bk

    train(model, bk.attach(model, sgd(model), bk.algorithms.bytegrad(), comm=comm), comm, many=3)
    return model


def joined(model: Any, comm: Any) -> Any:
    """Ranks have 3 or 5 batches."""
    import torch

    import baguakit as bk

    optimizer, p = sgd(model), next(model.parameters())
    with bk.attach(model, optimizer, bk.algorithms.bytegrad(), comm=comm) as att, att.join():
        for step in range(3 + 2 * (comm.rank % 2)):
            draw = torch.Generator().manual_seed(1000 * step + comm.rank)
            optimizer.zero_grad()
            model(torch.randn(16, 24, generator=draw).to(p.device)).square().mean().backward()
            optimizer.step()
    return model


def resumed(model: Any, comm: Any) -> Any:
    """Two attachments, the state of the first loaded into the second."""
    import copy

    import baguakit as bk

    saved: list[Any] = []
    for steps in (range(3), range(3, STEPS)):
        optimizer = sgd(model)
        att = bk.attach(
            model, optimizer, bk.algorithms.bytegrad(bk.compressors.UInt4(), error_feedback=True), comm=comm
        )
        if saved:
            optimizer.load_state_dict(saved[0])
            att.load_state_dict(saved[1])
        kept, att.detach = att.detach, lambda: None  # the state is read first
        train(model, att, comm, steps)
        saved = copy.deepcopy([optimizer.state_dict(), att.state_dict()])
        kept()
    return model


def compiled(model: Any, comm: Any) -> Any:
    import torch

    import baguakit as bk

    forward = torch.compile(model, backend="inductor" if next(model.parameters()).is_cuda else "aot_eager")
    train(model, bk.attach(model, sgd(model), bk.algorithms.bytegrad(), comm=comm), comm, forward=forward)
    return model


def unequal(model: Any, comm: Any) -> Any:
    """Rows of unequal number, some none, to and from all ranks: gradients come from what has been sent."""
    import torch

    import baguakit as bk

    x = next(model.parameters()).detach()
    n, r = comm.size, comm.rank
    sends = [(r + p) % 3 for p in range(n)]
    comes = [(p + r) % 3 for p in range(n)]
    rows = x.repeat(n, 1)[: sum(sends)].contiguous()
    back = bk.primitives.compressed_all_to_all(rows, bk.compressors.MinMaxUInt8(), comm, comes, sends)
    sums = comm.all_reduce(torch.cat([back.sum(0, keepdim=True), x[:1]]))
    with torch.no_grad():
        x[0] = sums.mean(0) / n
    return model


WAYS: dict[str, Callable[[Any, Any], Any]] = {
    "bf16 parameters": in_bf16,
    "DDP hook, no_sync": in_ddp,
    "FSDP2 hook": in_fsdp,
    "no_sync": accumulated,
    "join": joined,
    "resume": resumed,
    "torch.compile": compiled,
    "unequal all-to-all": unequal,
}

if __name__ == "__main__":
    import gpu_mesh  # without cloudpickle, ranks find a function by the name of its module

    sys.exit(gpu_mesh.main(sys.argv[1:]))
