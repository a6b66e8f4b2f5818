"""Every algorithm × precision × accumulation × compilation learns the digits, of which each rank holds only some.

One cell of each algorithm runs in `make test`, all of them in `make test-all`.
"""

import contextlib
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from pool import ranks
from torch import nn

pytest.importorskip("sklearn")

STEPS, ROWS = 120, 48  # optimizer steps, and rows of a step on each rank
OVERFLOW = 7  # the step at which rank 1 overflows in fp16
LIMIT = 60  # seconds that a cell may take on its ranks


@dataclass(frozen=True)
class Way:
    """How an algorithm is trained with.

    Attributes:
        make: what gives the algorithm, from the package.
        lr, momentum: of the optimizer, a plain SGD.
        reaches: the share of the test images that the mean of the networks reads.
        ranks: how many; rank r has the digits d with d mod ranks = r.
        pace: seconds that a step takes at least, and ranks keep within ten steps of one another: flights that nobody
            waits for must have time to come, however busy the machine is.
        nodes: whether they are divided into nodes of two.
    """

    make: Callable[[Any], Any]
    lr: float = 0.3
    momentum: float = 0.9
    reaches: float = 0.93
    ranks: int = 2
    pace: float = 0.0
    nodes: bool = False


WAYS = {
    "gradient_allreduce": Way(lambda bk: bk.algorithms.gradient_allreduce()),
    "bytegrad": Way(lambda bk: bk.algorithms.bytegrad()),
    "bytegrad-feedback": Way(lambda bk: bk.algorithms.bytegrad(error_feedback=True)),
    "bytegrad-nodes": Way(lambda bk: bk.hierarchical(bk.algorithms.bytegrad()), ranks=4, nodes=True),
    "qadam": Way(lambda bk: bk.algorithms.qadam(warmup_steps=30), lr=0.01, momentum=0),
    "power_sgd": Way(lambda bk: bk.algorithms.power_sgd(rank=4)),
    "top_k": Way(lambda bk: bk.algorithms.top_k(ratio=0.05), lr=0.2),
    "decentralized-awc": Way(lambda bk: bk.algorithms.decentralized(), lr=0.2),
    "decentralized-atc": Way(lambda bk: bk.algorithms.decentralized(order="atc"), lr=0.2),
    "low_precision_decentralized": Way(lambda bk: bk.algorithms.low_precision_decentralized(), lr=0.2),
    "choco": Way(lambda bk: bk.algorithms.choco(), lr=0.2),
    "gradient_tracking": Way(lambda bk: bk.algorithms.gradient_tracking(), lr=0.2),
    "push_sum": Way(
        lambda bk: bk.algorithms.push_sum(bk.topology.FromDigraph([(0, 1), (1, 2), (2, 0), (0, 2)])),
        lr=0.2,
        reaches=0.92,
        ranks=3,
    ),
    "local_sgd": Way(lambda bk: bk.algorithms.local_sgd(every=4), lr=0.2),
    "diloco": Way(lambda bk: bk.algorithms.diloco(every=5), lr=0.1, reaches=0.89),
    "diloco-fragments": Way(lambda bk: bk.algorithms.diloco(every=6, fragments=2, delay=1), 0.1, reaches=0.89),
    "async_model_average": Way(
        lambda bk: bk.algorithms.async_model_average(warmup_steps=5), lr=0.1, reaches=0.85, pace=0.01
    ),
}
PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
FAST = ("fp16", 3, "eager")


def cells():
    """(algorithm, precision, micro-batches, backend), those marked slow that `make test` leaves out."""
    for name in WAYS:
        for precision in PRECISIONS:
            for parts in (1, 3):
                for backend in ("eager", "aot_eager"):
                    marks = [] if (precision, parts, backend) == FAST else [pytest.mark.slow]
                    yield pytest.param(name, precision, parts, backend, marks=marks)
    for name in ("bytegrad", "decentralized-awc", "diloco"):
        marks = [pytest.mark.slow, pytest.mark.timeout(300)]  # Inductor calls a C++ compiler
        yield pytest.param(name, "bf16", 3, "inductor", marks=marks)


def scaler_for(rules):
    """The gradient scaler that a script takes with these rules."""
    if all(rule.window in ("during_backward", "free_running") for rule in rules):
        return torch.amp.GradScaler("cpu", init_scale=1024.0)
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    return ShardedGradScaler(device="cpu", init_scale=1024.0)


def data(rank, size):
    """((images, labels) of this rank, (images, labels) to test on)."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    tested, trained = order[:360], order[360:]
    mine = trained[labels[trained] % size == rank]
    return (images[mine], labels[mine]), (images[tested], labels[tested])


def accuracy(model, tested):
    with torch.no_grad():
        return float((model(tested[0]).argmax(1) == tested[1]).float().mean())


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10))


def compiled(model, backend):
    """The model as it is called in training."""
    if backend == "eager":
        return model
    torch._dynamo.reset()
    if backend == "inductor":
        warnings.simplefilter("ignore")  # its own imports warn
    return torch.compile(model, backend=backend, fullgraph=True)


def train(way, precision, parts, backend):
    """Train on this rank; accuracy alone and merged, the steps made, whether all weights are finite, and the graphs."""
    import torch.distributed as dist
    from torch._dynamo.utils import counters
    from torch.distributed.device_mesh import init_device_mesh
    from torch.nn.functional import cross_entropy

    import baguakit as bk

    rank, size = dist.get_rank(), dist.get_world_size()
    (images, labels), tested = data(rank, size)
    draw = torch.Generator().manual_seed(rank)
    model = network()
    forward = compiled(model, backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=way.lr, momentum=way.momentum)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1, 0.05, STEPS)
    algorithm = way.make(bk)
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("inter", "intra")) if way.nodes else None
    scaler = scaler_for(bk.rules.rules_of(algorithm)) if precision == "fp16" else None
    dtype = PRECISIONS[precision]

    counters.clear()
    with bk.attach(model, optimizer, algorithm, comm=bk.Comm(mesh=mesh), scaler=scaler, timeout=30) as att:
        for step in range(STEPS):
            optimizer.zero_grad()
            for part in range(parts):
                rows = torch.randint(len(labels), (ROWS // parts,), generator=draw)
                with contextlib.nullcontext() if part == parts - 1 else att.no_sync():
                    with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
                        loss = cross_entropy(forward(images[rows]), labels[rows]) / parts
                    if scaler is not None and step == OVERFLOW and rank == 1 and part == 0:
                        loss = loss * float("inf")
                    (loss if scaler is None else scaler.scale(loss)).backward()
            if scaler is None:
                nn.utils.clip_grad_norm_(model.parameters(), 100.0)
                optimizer.step()
            else:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 100.0)
                scaler.step(optimizer)
                scaler.update()
            schedule.step()
            time.sleep(way.pace)
            if way.pace and step % 10 == 9:
                dist.barrier()
        made = att.step
        alone = accuracy(model, tested)
        att.merge()
        apart = att.consensus_distance()
    finite = all(bool(torch.isfinite(p).all()) for p in model.parameters())
    return alone, accuracy(model, tested), made, finite, apart, counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("name, precision, parts, backend", list(cells()))
def test_digits_are_learnt(name, precision, parts, backend):
    """The mean of the networks reads them; an overflow on one rank costs one step, and nothing else."""
    import baguakit as bk

    way = WAYS[name]
    limit = LIMIT if backend != "inductor" else 4 * LIMIT
    results = ranks(way.ranks, train, way, precision, parts, backend, limit=limit)
    skips_alone = any(rule.window == "free_running" for rule in bk.rules.rules_of(way.make(bk)))
    for rank, (_, merged, made, finite, apart, graphs) in enumerate(results):
        assert merged >= way.reaches and finite and apart < 1e-6
        skipped = precision == "fp16" and (rank == 1 or not skips_alone)
        assert made == STEPS - skipped
        assert graphs == (0 if backend == "eager" else 1)


def test_no_rank_learns_them_alone():
    """Without communication a rank reads half of them at most: the cells above show that it was there."""
    way = Way(lambda bk: bk.algorithms.local_sgd(every=10**9), lr=0.2)
    for alone, merged, *_ in ranks(2, train, way, "fp32", 1, "eager"):
        assert alone <= 0.55 and merged < min(way.reaches for way in WAYS.values())


def test_rules_on_weights_are_refused_with_a_scaler_that_skips_alone():
    """Each algorithm that waits for others when it averages weights, on both ranks, before anything hangs."""

    def run(algorithm):
        import baguakit as bk

        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(ValueError) as caught:
            bk.attach(model, optimizer, algorithm(bk), scaler=torch.amp.GradScaler("cpu"))
        return str(caught.value)

    import baguakit as bk

    waits = [
        way
        for way in WAYS.values()
        if {"between_steps", "after_step"} & {rule.window for rule in bk.rules.rules_of(way.make(bk))}
    ]
    assert len(waits) == 9
    for way in waits:
        for said in ranks(way.ranks, run, way.make):
            assert said.startswith("with a plain GradScaler a rank skips a step alone, and ")
            assert said.endswith("ShardedGradScaler, with which all ranks skip together")
