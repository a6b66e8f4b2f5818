"""A user's program: it asks for types of most of the public names. `test_typed.py` gives it to mypy and pyright."""

import tempfile
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

import baguakit as bk


def chosen(name: str) -> bk.Algorithm:
    sparse = bk.stages.ErrorFeedback(bk.stages.SparseMean(bk.compressors.TopK(0.01)))
    rules: dict[str, bk.Algorithm] = {
        "bytegrad": bk.algorithms.bytegrad(bk.compressors.UInt4(), error_feedback=True),
        "hierarchical": bk.hierarchical(bk.algorithms.bytegrad()),
        "qadam": bk.algorithms.qadam(warmup_steps=10),
        "power_sgd": bk.algorithms.power_sgd(rank=4),
        "top_k": bk.algorithms.top_k(ratio=0.01),
        "decentralized": bk.algorithms.decentralized(bk.topology.OnePeerExponential(), order="atc"),
        "low_precision": bk.algorithms.low_precision_decentralized(bk.topology.Ring(), bk.compressors.Float8()),
        "choco": bk.algorithms.choco(bk.topology.Grid2D(), bk.compressors.Sign(), gamma=0.1),
        "tracking": bk.algorithms.gradient_tracking(),
        "push_sum": bk.algorithms.push_sum(bk.topology.FromDigraph([(0, 1), (1, 0)])),
        "async": bk.algorithms.async_model_average(warmup_steps=10),
        "local": bk.algorithms.local_sgd(every=8),
        "diloco": bk.algorithms.diloco(every=500, lr=0.7, momentum=0.9),
        "allreduce": bk.algorithms.gradient_allreduce(),
        "mine": bk.during_backward(sparse, stop=100)
        + bk.between_steps(bk.stages.NeighborMean(bk.topology.Ring()), start=100),
        "adam": bk.algorithms.diloco(500, torch.optim.AdamW, lr=0.7, betas=(0.9, 0.95)),
        "parts": bk.after_step(bk.stages.Mean(), every=4, where=bk.Fragment(0, 2)),
        "free": bk.free_running(bk.stages.Mean()),
    }
    return rules[name]


class Halved(bk.stages.Stage):
    """A stage of the user's own."""

    def init(self, bucket: bk.Bucket, comm: bk.Comm) -> dict[str, Any]:
        return {"before": torch.zeros_like(bucket.flat)}

    def __call__(self, x: Tensor, state: dict[str, Any], comm: bk.Comm) -> Tensor:
        bk.stages.update_if_finite_(state["before"], x, where=bk.stages.finite(x))
        return bk.primitives.mean_(x, comm) / 2


def learn(model: nn.Module) -> None:
    loss = mse_loss(model(torch.randn(8, 4)), torch.zeros(8, 2))
    loss.backward()  # type: ignore[no-untyped-call]  # pyright: ignore[reportUnknownMemberType]  torch leaves it untyped


def train(steps: int, name: str) -> float:
    model = nn.Linear(4, 2)
    optimizer = bk.optim.fuse(torch.optim.AdamW(model.parameters(), lr=0.1))
    comm = bk.Comm(flows=2)
    att: bk.Attachment
    with bk.attach(model, optimizer, chosen(name), comm=comm, bucket_bytes=1 << 20, timeout=60.0) as att:
        with att.join():
            for _ in range(steps):
                with att.no_sync():
                    learn(model)
                learn(model)
                optimizer.step()
                optimizer.zero_grad()
        report: bk.Report = att.report()
        sent: float = report.bytes_per_step + sum(row.bytes_sent for row in report.rows)
        timeline: bk.Timeline = att.timeline()
        overlap: float = timeline.overlap()
        logged: dict[str, float] = att.log(None, compression=True)
        state: dict[str, Any] = att.state_dict()
        att.load_state_dict(state)
        att.merge()
        tuner: bk.tune.Tuner = bk.tune.autotune(att)
        distance: float = att.consensus_distance()
    return sent + overlap + sum(logged.values()) + distance + tuner.over


def primitives(comm: bk.Comm, compressor: bk.compressors.Compressor) -> list[Tensor]:
    x, y = torch.randn(1000), torch.randn(1000)
    bucket = bk.Bucket([nn.Parameter(x)], multiple_of=64)
    flat: Tensor = bucket.load("data")
    bk.primitives.compressed_mean_(flat, compressor, comm)
    bucket.store("data")
    bk.primitives.neighbor_mean_(x, bk.topology.Ring(), comm.at(0))
    flight = bk.primitives.launch(bk.stages.CompressedMean(compressor), y, comm)
    arrived: bool = flight.done()
    flight.land_(y)
    norm = bk.primitives.gradient_norm([x])
    bk.primitives.sgd_step_(x, y, lr=0.1)
    packed = compressor.compress(y.view(1, -1))
    other = 1 - comm.rank
    heard: dict[int, Tensor] = comm.exchange(x, [other], [other])
    assert arrived in (True, False)
    return [compressor.decompress(packed, y.numel(), y.dtype), norm, *heard.values(), comm.all_gather(x)]


def in_ddp(model: nn.Module, comm: bk.Comm) -> bk.Handle:
    ddp = DistributedDataParallel(model)
    handle = bk.interop.ddp(ddp, bk.stages.CompressedMean(bk.compressors.Float8()), comm)
    learn(ddp)
    print(handle.report().scalars(), handle.step, handle.state_dict().keys())
    handle.detach()
    return handle


def in_fsdp(model: nn.Module, comm: bk.Comm) -> bk.interop.Handle:
    return bk.interop.fsdp(model, Halved(), comm)


def planned(model: nn.Module, comm: bk.Comm) -> str:
    network: bk.tune.Network = bk.tune.probe(comm, seconds=0.02)
    plan: bk.tune.Plan = bk.tune.plan(model, comm, network, 0.1)
    best: bk.tune.Prediction = plan.best
    return f"{plan}{best}"


def sampled(data: list[Tensor]) -> list[int]:
    sampler = bk.data.LoadBalancedSampler(data, lambda x: x.numel())
    cached = bk.data.CachedDataset(data, bk.data.MemoryStore())
    print(cached[0])
    return list(sampler)


def on_a_rank(names: list[str]) -> int:
    comm, model = bk.Comm(), nn.Linear(4, 2)
    sums = [train(2, name) for name in names]
    values = sum(x.numel() for x in primitives(comm, bk.compressors.MinMaxUInt8()))
    print(in_ddp(model, comm), planned(model, comm), sampled([torch.ones(3)] * 4), sums)
    return values


def main() -> None:
    matrix = bk.topology.BaseK(1).matrix(6, 0)
    print(matrix.sum(), bk.topology.Ring().weights(0, 8, 1)[0])
    with bk.Ranks(2) as ranks:
        values: list[int] = ranks.run(on_a_rank, ["bytegrad", "mine"], limit=60.0)
        print(values)
        try:
            some: list[float | None] = ranks.run(train, 3, "no such name", lost=[1])
            print(some)
        except bk.RankError as error:
            failures: dict[int, str] = error.failures
            print(failures)
        except bk.PeerError as error:
            print(error)
    with tempfile.TemporaryDirectory() as folder:
        drawn = [bk.topology.Ring().draw(4), bk.pictures.consensus_decay({bk.topology.Ring(): [1.0, 0.5]}, 4)]
        for i, figure in enumerate(drawn):
            figure.savefig(f"{folder}/{i}.png")  # pyright: ignore[reportUnknownMemberType]  matplotlib's
    print(bk.__version__, bk.net.build)


if __name__ == "__main__":
    main()
