"""Every algorithm × precision × accumulation × compilation learns the digits, of which each rank holds only some.

One cell of an algorithm for each choice of windows runs in `make test`, all of them in `make test-all`.
"""

import contextlib
import time
import warnings
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from everything import ALGORITHMS, family, made, of_each_kind, on_weights, runs_free, scaler, windows
from pool import ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy
from training import net

import baguakit as bk

pytest.importorskip("sklearn")

STEPS, ROWS = 120, 48  # optimizer steps, and rows of a step on each rank
OVERFLOW = 7  # the step at which rank 1 overflows in fp16
LIMIT = 60  # seconds that a cell may take on its ranks


@dataclass(frozen=True)
class Way:
    """The settings that an algorithm is trained with.

    Attributes:
        lr, momentum: of the optimizer, a plain SGD.
        reaches: the accuracy on the test images that the mean of the networks must reach.
        ranks: the number of ranks; rank r has the digits d with d mod ranks = r.
        pace: seconds that a step takes at least; ranks keep within ten steps of one another. Flights that nobody
            waits for must have time to come, however busy the machine is.
        nodes: the ranks are divided into nodes of two.
    """

    lr: float = 0.2
    momentum: float = 0.9
    reaches: float = 0.93
    ranks: int = 2
    pace: float = 0.0
    nodes: bool = False


WAYS = {  # of algorithms, or of entries, that want other settings than most
    "qadam": Way(lr=0.01, momentum=0),
    "decoupled_momentum": Way(lr=0.03, momentum=0),
    "signum": Way(lr=0.04, momentum=0, reaches=0.9),  # of two ranks with other digits, a tie is often the vote
    "lion_vote": Way(lr=0.04, momentum=0, reaches=0.9),
    "diloco": Way(lr=0.1, reaches=0.89),
    "quasi_global_momentum": Way(momentum=0),
    "push_sum": Way(ranks=3, reaches=0.92),
    "async_model_average": Way(lr=0.1, reaches=0.85, pace=0.01),
    "async_gossip": Way(lr=0.1, reaches=0.85, pace=0.01),
    "async_push_sum": Way(lr=0.1, reaches=0.85, pace=0.01),
    "decoupled_diloco": Way(lr=0.1, reaches=0.85, pace=0.01),
    "bytegrad(Sign(), error_feedback=True)": Way(lr=0.3, momentum=0.0, reaches=0.87),
    "decoupled_momentum(0.1, 0.9, values=UInt2(), sign=False)": Way(),
    "diloco(every=4, delay=2)": Way(lr=0.05, reaches=0.85),
    "gradient_allreduce(delay=1)": Way(lr=0.5, momentum=0.0, reaches=0.91),
    "bytegrad(MinMaxUInt8(block=64), error_feedback=True, delay=2)": Way(lr=0.5, momentum=0.0, reaches=0.91),
    # Four bits, and a step of each four is given up.
    "diloco(every=4, inner=ErrorFeedback(CompressedMean(UInt4(block=64))), delay=1, fragments=2, mix=0.0)": Way(
        lr=0.1, reaches=0.86
    ),
}
INSTEAD = {  # of entries whose small arguments fit a toy and not this task
    "qadam(3, compressor=MinMaxUInt8(block=64))": "qadam(30)",
    "qadam(3, compressor=MinMaxUInt8(block=64), error_feedback=True)": "qadam(30, error_feedback=True)",
    "power_sgd(rank=2)": "power_sgd(rank=4)",
    "diloco(every=2)": "diloco(every=5)",
    "diloco(every=4, fragments=3, delay=1)": "diloco(every=6, fragments=2, delay=1)",
    # However busy the machine is, so much must have come.
    "async_gossip()": "async_gossip(staleness=2)",
    "async_gossip(compressor=MinMaxUInt8(block=64))": "async_gossip(compressor=MinMaxUInt8(block=64), staleness=2)",
    "async_push_sum(Exponential())": "async_push_sum(Exponential(), staleness=2)",
}
NODES = "hierarchical(bytegrad())"
CELLS = {INSTEAD.get(each, each): WAYS.get(each, WAYS.get(family(each), Way())) for each in ALGORITHMS}
CELLS[NODES] = Way(ranks=4, nodes=True)
FEW = [INSTEAD.get(each, each) for each in of_each_kind(kind_of=windows)]
PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
FAST = ("fp16", 3, "eager")


def cells():
    """Yield (algorithm, precision, micro-batches, backend); those that `make test` leaves out are marked slow."""
    for name in CELLS:
        for precision in PRECISIONS:
            for parts in (1, 3):
                for backend in ("eager", "aot_eager"):
                    fast = name in FEW and (precision, parts, backend) == FAST
                    yield pytest.param(name, precision, parts, backend, marks=[] if fast else [pytest.mark.slow])
    for name in ("bytegrad(MinMaxUInt8(block=64))", "decentralized()", "diloco(every=5)"):
        marks = [pytest.mark.slow, pytest.mark.timeout(300)]  # Inductor calls a C++ compiler
        yield pytest.param(name, "bf16", 3, "inductor", marks=marks)


@pytest.fixture(scope="module")
def digits():
    """All images and labels, in an order of chance: ranks are sent them, since to import scikit-learn takes long."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    return torch.tensor(digits.data, dtype=torch.float32)[order] / 16, torch.tensor(digits.target)[order]


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


def train(name, way, precision, parts, backend, images, labels):
    """Train on this rank.

    Returns:
        The accuracy alone and merged, the steps made, whether all weights are finite, the distance, and the graphs.
    """
    from torch._dynamo.utils import counters

    rank, size = dist.get_rank(), dist.get_world_size()
    tested, mine = (images[:360], labels[:360]), labels[360:] % size == rank
    images, labels = images[360:][mine], labels[360:][mine]
    draw = torch.Generator().manual_seed(rank)
    model = network()
    forward = compiled(model, backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=way.lr, momentum=way.momentum)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1, 0.05, STEPS)
    algorithm = made(name)
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("inter", "intra")) if way.nodes else None
    grad_scaler = scaler(algorithm, init_scale=1024.0) if precision == "fp16" else None
    dtype = PRECISIONS[precision]

    counters.clear()
    with bk.attach(model, optimizer, algorithm, comm=bk.Comm(mesh=mesh), scaler=grad_scaler, timeout=30) as att:
        for step in range(STEPS):
            optimizer.zero_grad()
            for part in range(parts):
                rows = torch.randint(len(labels), (ROWS // parts,), generator=draw)
                with contextlib.nullcontext() if part == parts - 1 else att.no_sync():
                    with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
                        loss = cross_entropy(forward(images[rows]), labels[rows]) / parts
                    if grad_scaler is not None and step == OVERFLOW and rank == 1 and part == 0:
                        loss = loss * float("inf")
                    (loss if grad_scaler is None else grad_scaler.scale(loss)).backward()
            if grad_scaler is None:
                nn.utils.clip_grad_norm_(model.parameters(), 100.0)
                optimizer.step()
            else:
                grad_scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 100.0)
                grad_scaler.step(optimizer)
                grad_scaler.update()
            schedule.step()
            time.sleep(way.pace)
            if way.pace and step % 10 == 9:
                dist.barrier()
        steps = att.step
        alone = accuracy(model, tested)
        att.merge()
        apart = att.consensus_distance()
    finite = all(bool(torch.isfinite(p).all()) for p in model.parameters())
    return alone, accuracy(model, tested), steps, finite, apart, counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("name, precision, parts, backend", list(cells()))
def test_digits_are_learnt(name, precision, parts, backend, digits):
    """The mean of the networks reads them; an overflow on one rank costs one step, and nothing else."""
    way = CELLS[name]
    limit = LIMIT if backend != "inductor" else 4 * LIMIT
    results = ranks(way.ranks, train, name, way, precision, parts, backend, *digits, limit=limit)
    for rank, (_, merged, steps, finite, apart, graphs) in enumerate(results):
        assert merged >= way.reaches and finite and apart < 1e-6
        skipped = precision == "fp16" and (rank == 1 or not runs_free(made(name)))
        assert steps == STEPS - skipped
        assert graphs == (0 if backend == "eager" else 1)


def test_no_rank_learns_them_alone(digits):
    """Without communication a rank reads half of them at most: the cells above show that it was there."""
    for alone, merged, *_ in ranks(2, train, f"local_sgd(every={10**9})", Way(), "fp32", 1, "eager", *digits):
        assert alone <= 0.55 and merged < min(way.reaches for way in CELLS.values())


@pytest.mark.parametrize("algorithm", [each for each in ALGORITHMS if on_weights(made(each))])
def test_rules_on_weights_are_refused_with_a_scaler_that_skips_alone(algorithm):
    """On both ranks, before anything hangs."""

    def run():
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(ValueError) as caught:
            bk.attach(model, optimizer, made(algorithm), scaler=torch.amp.GradScaler("cpu"))
        return str(caught.value)

    for said in ranks(2, run):
        assert said.startswith("with a plain GradScaler a rank skips a step alone, and ")
        assert said.endswith("ShardedGradScaler, with which all ranks skip together")
