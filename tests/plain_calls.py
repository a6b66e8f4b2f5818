"""Plain calls: for every argument that must be given, a value with which the call works."""

import contextlib
import os
import shutil
import tempfile
import uuid
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import baguakit as bk
from baguakit.compressors import MinMaxUInt8
from baguakit.stages import CompressedMean, Mean
from baguakit.topology import Ring
from baguakit.tune import Codec, Compute, Line, Link, Load, Machine, Network, Place, Prediction

LINE = Line(1e-4, 1e-9)
MEASURED = {
    "machine": {"device": "cpu", "processor": "any", "date": "2026-11-22"},
    "rows": [{"family": "sign", "name": "compress", "values": 1024, "seconds": 1e-5, "share": 0.5}],
}


class World:
    """The arguments of one call, made when asked for; they are closed when the block ends."""

    def __init__(self) -> None:
        self.kept: list[Any] = []

    @cached_property
    def model(self) -> nn.Module:
        return nn.Linear(4, 2)

    @cached_property
    def optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.model.parameters(), lr=0.1)

    @cached_property
    def path(self) -> str:
        return tempfile.mkdtemp()

    @cached_property
    def network(self) -> Network:
        links = tuple(Link("flat", 1, bk.Comm().size, LINE, LINE) for _ in range(1))
        return Network(bk.Comm().size, 1, "cpu", 1, links, (Codec("MinMaxUInt8()", 1e-9, 1e-9, 1e-9),))

    def keep(self, value: Any) -> Any:
        self.kept.append(value)
        return value

    def __enter__(self) -> "World":
        return self

    def __exit__(self, *error: object) -> None:
        for value in reversed(self.kept):
            for name in ("detach", "close", "stop"):
                if type(value).__module__.startswith("baguakit") and not isinstance(value, bk.Comm):
                    with contextlib.suppress(Exception):
                        getattr(value, name, lambda: None)()
            flight = getattr(value, "flight", None)
            if flight is not None:
                with contextlib.suppress(Exception):
                    flight.result()
        if "path" in vars(self):
            shutil.rmtree(self.path, ignore_errors=True)


def rows(world: World) -> Tensor:
    return torch.linspace(-1, 1, 256).view(1, -1)


def flat(world: World) -> Tensor:
    return torch.linspace(-1, 1, 256)


def flat_list(world: World, called: Any) -> list[Tensor]:
    return [flat(world)]


def packed(world: World, called: Any) -> Tensor:
    return called.__self__.compress(rows(world))


def state(world: World, called: Any) -> dict[str, Any]:
    return called.__self__.init(bk.Bucket.of(flat(world)), bk.Comm().at(0, 0))


def prediction(world: World) -> Prediction:
    return Prediction(bk.algorithms.bytegrad(), 1 << 20, 1, 1, 0.1, 0.01, 1e6)


def rows_too(world: World, called: Any) -> Tensor:
    return rows(world)


def flat_too(world: World, called: Any) -> Tensor:
    return flat(world)


def with_nodes(world: World, called: Any) -> bk.Comm:
    mesh = init_device_mesh("cpu", (1, bk.Comm().size), mesh_dim_names=("inter", "intra"))
    return bk.Comm(mesh=mesh).at(0, 0)


def sharded(world: World, called: Any) -> nn.Module:
    mesh = init_device_mesh("cpu", (bk.Comm().size,))
    return fully_shard(world.model, mesh=mesh)


# By the end of a callable's name and the argument, by the argument, by the annotation: the first that there is.
SPECIAL: dict[tuple[str, str], Any] = {}
BY_NAME: dict[str, Any] = {
    "packed": lambda w, called: packed(w, called),
    "out": lambda w, called: flat(w),
    "weights": lambda w, called: [1.0],
    "state": lambda w, called: state(w, called) if hasattr(called.__self__, "init") else called.__self__.state_dict(),
    "model": lambda w, called: w.model,
    "optimizer": lambda w, called: w.optimizer,
    "att": lambda w, called: w.keep(bk.attach(w.model, w.optimizer, bk.algorithms.bytegrad())),
    "size": lambda w, called: 4,
    "rank": lambda w, called: 0,
    "round": lambda w, called: 0,
    "n": lambda w, called: 256,
    "of": lambda w, called: 2,
    "step": lambda w, called: 1,
    "topology": lambda w, called: Ring(),
    "path": lambda w, called: os.path.join(w.path, "a"),
    "graph": lambda w, called: [(0, 1), (1, 2), (2, 3), (3, 0)],
    "matrix": lambda w, called: [[0.25] * 4] * 4,
    "named": lambda w, called: dict(w.model.named_parameters()),
    "device": lambda w, called: torch.device("cpu"),
    "text": lambda w, called: w.network.to_json(),
    "distances": lambda w, called: {Ring(): [1.0, 0.5]},
    "curves": lambda w, called: {"a": [(1.0, 0.5), (2.0, 0.7)]},
    "part": lambda w, called: "flat",
    "failures": lambda w, called: {0: "no"},
    "dataset": lambda w, called: [torch.zeros(2), torch.ones(3), torch.ones(4)],
    "complexity": lambda w, called: [1.0, 2.0, 3.0],
    "writer": lambda w, called: None,
    "module": lambda w, called: w.model,
    "params": lambda w, called: list(w.model.parameters()),
    "key": lambda w, called: b"key",
    "keys": lambda w, called: [b"key"],
    "value": lambda w, called: b"value",
    "link": lambda w, called: {(1, 1): 1e9, (1, 2): 2e9},
    "stage": lambda w, called: Mean(),
    "algorithm": lambda w, called: bk.algorithms.bytegrad(),
    "algorithms": lambda w, called: bk.algorithms.bytegrad(),
    "compressors": lambda w, called: MinMaxUInt8(),
    "compressor": lambda w, called: MinMaxUInt8(),
    "where": lambda w, called: torch.tensor(True),
    "store": lambda w, called: w.keep(bk.data.MemoryStore()),
    "capacity": lambda w, called: 1,
    "ddp_model": lambda w, called: nn.parallel.DistributedDataParallel(w.model),
    "tensors": flat_list,
    "grads": flat_list,
    **dict.fromkeys(("p", "g", "m", "v"), lambda w, called: flat(w).abs_()),
    "steps": lambda w, called: range(2),
    "sources": lambda w, called: [],
    "targets": lambda w, called: [],
    "outgoing": lambda w, called: {},
    "incoming": lambda w, called: {},
    "timeout": lambda w, called: timedelta(seconds=5),
    "links": lambda w, called: w.network.links,
    "measured": lambda w, called: MEASURED,
    "other": lambda w, called: bk.algorithms.bytegrad(),
    "sample": lambda w, called: torch.ones(2),
    "function": lambda w, called: int,
}
BY_KIND: dict[Any, Any] = {
    "Tensor": lambda w: flat(w),
    "Comm": lambda w: bk.Comm().at(0, 0),
    "Stage": lambda w: Mean(),
    "Topology": lambda w: Ring(),
    "Compressor": lambda w: MinMaxUInt8(),
    "Bucket": lambda w: bk.Bucket.of(flat(w)),
    "Network": lambda w: w.network,
    "Compute": lambda w: Compute(0.01, 0.02),
    "Load": lambda w: Load(1000),
    "Place": lambda w: Place(w.network),
    "Line": lambda w: LINE,
    "int": lambda w: 1,
    "float": lambda w: 0.5,
    "bool": lambda w: True,
    "str": lambda w: "a",
    "bytes": lambda w: b"a",
}
SPECIAL |= {
    ("checks_of", "part"): lambda w, called: bk.topology.Ring(),
    ("parametrize_with_checks", "parts"): lambda w, called: [bk.topology.Ring()],
    ("Bucket().load", "what"): lambda w, called: "data",
    ("Bucket().store", "what"): lambda w, called: "data",
    ("tune.probe", "seconds"): lambda w, called: 0.02,
    ("data.LoadBalancedBatchSampler", "batch_size"): lambda w, called: 2,
    ("data.LoadBalancedBatchSampler", "num_replicas"): lambda w, called: 2,
    ("data.LoadBalancedBatchSampler", "rank"): lambda w, called: 0,
    ("data.LoadBalancedSampler", "num_replicas"): lambda w, called: 2,
    ("data.LoadBalancedSampler", "rank"): lambda w, called: 0,
    ("optim.unfuse", "optimizer"): lambda w, called: bk.optim.fuse(w.optimizer),
    ("baguakit.Rule", "window"): lambda w, called: "during_backward",
    ("stages.ErrorFeedback", "inner"): lambda w, called: CompressedMean(),
    ("stages.call_stage", "state"): lambda w, called: {},
    ("stages.update_if_finite_", "state"): flat_too,
    ("stages.CompressedMean", "compressor"): lambda w, called: MinMaxUInt8(),
    ("stages.SparseMean", "compressor"): lambda w, called: MinMaxUInt8(),
    ("primitives.neighbor_gather", "topology"): lambda w, called: Ring(),
    ("primitives.neighbor_mean_", "topology"): lambda w, called: Ring(),
    ("primitives.neighbor_gather", "comm"): lambda w, called: bk.Comm().at(0, 0),
    ("primitives.neighbor_mean_", "comm"): lambda w, called: bk.Comm().at(0, 0),
    ("primitives.launch", "state"): lambda w, called: None,
    ("compress", "x"): rows_too,
    ("decompress", "out"): lambda w, called: rows(w),
    ("interop.fsdp", "model"): sharded,
    ("tune.simulate", "machines"): lambda w, called: [Machine("a", 1.0)],
    ("tune.Network", "codecs"): lambda w, called: w.network.codecs,
    ("tune.Network", "device"): lambda w, called: "cpu",
    ("Comm().for_flight", "sent"): lambda w, called: {},
    ("Comm().meeting", "meet"): lambda w, called: None,
    ("Comm().note", "asked"): lambda w, called: MinMaxUInt8(),
    ("Comm().note", "flew"): lambda w, called: torch.float32,
    ("all_gather_later", "out"): lambda w, called: torch.empty(256 * bk.Comm().size),
    ("Comm().own", "name"): lambda w, called: uuid.uuid4().hex,
    ("data.RedisStore", "hosts"): lambda w, called: "127.0.0.1:1",
    ("sgd_step_", "lr"): lambda w, called: 0.1,
    ("sgd_step_", "step"): lambda w, called: None,
    ("lion_step_", "step"): lambda w, called: None,
    ("LMDBStore", "capacity_bytes"): lambda w, called: 1 << 24,
    ("CachedDataset", "name"): lambda w, called: "name",
    ("net.build", "out"): lambda w, called: os.path.join(w.path, "a.so"),
    ("().decode", "stored"): lambda w, called: called.__self__.encode(1),
    **{("Hierarchical()." + name, "comm"): with_nodes for name in ("__call__", "check", "init", "multiple_of")},
    ("Hierarchical().__call__", "state"): lambda w, called: called.__self__.init(
        bk.Bucket.of(flat(w)), with_nodes(w, called)
    ),
    ("tune.Plan", "rows"): lambda w, called: (prediction(w),),
    ("tune.Plan", "best"): lambda w, called: prediction(w),
    **{(f"sync.{name}", "tensors"): lambda w, called: {"w": torch.ones(3)} for name in ("Publisher", "Subscriber")},
    ("sync.changes", "new"): lambda w, called: torch.ones(3),
    ("sync.changes", "old"): lambda w, called: torch.zeros(3),
    ("sync.apply_", "x"): lambda w, called: torch.zeros(3),
    ("sync.apply_", "packed"): lambda w, called: bk.sync.changes(torch.ones(3), torch.zeros(3)),
    ("sync.Publisher", "to"): lambda w, called: os.path.join(w.path, "weights"),
    ("sync.Subscriber", "source"): lambda w, called: os.path.join(w.path, "weights"),
    ("Hierarchical", "inner"): lambda w, called: Mean(),
    ("Chosen().choose", "src_weights"): lambda w, called: {},
}
# Called by what makes them, and by no user.
MADE_BY_OTHERS = {
    "tune.Event",
    "tune.Simulation",
    "tune.Tuner",
    "data.Store",
    "interop.Handle",
    "ranks.RankError",
    "elastic.Change",
    "elastic.Left",
    "data.StoreError",
    "data.CacheReport",
    "backend.Report",
    "backend.Row",
    "testing.Check",
    "testing.CheckFailed",
    *(f"baguakit.{name}" for name in ("Attachment", "Handle", "PeerError", "RankError", "Report", "Timeline")),
    "compressors.Compressor",
    "topology.Topology",
    "stages.Stage",
}
# Too slow, or too public, to be called where it works: only what cannot work is tried.
COSTLY = {
    "baguakit.Ranks", "net.build", "tune.probe", "tune.plan", "tune.simulate", "data.RedisStore",
    "baguakit.Comm().receive_later", "baguakit.Comm().send_later", "elastic.join",
    "primitives.compressed_send", "primitives.compressed_receive_", "backend.register",
    "testing.check_algorithm", "testing.check_compressor", "testing.check_stage", "testing.check_topology",
}  # fmt: skip
OPTIONS = {"algorithms.diloco": ["lr"]}
# Refused here, whatever is given.
REFUSED = (
    "TopK().reduce",
    "Window().fetch",  # of one rank, which hears no other
    *(f"attach().{name}" for name in ("leave", "recoverable", "on_regroup")),
    "Publisher().regroup",  # of a folder
    "Subscriber().regroup",
    "Sampler().follow",  # these work in groups whose ranks come and go
    # Nobody knows what all ranks have chosen.
    *(f"Chosen().{name}" for name in dir(bk.topology.Chosen) if name != "choose"),
)
# Of topologies and policies: their other methods or their room call it, with arguments that they have checked.
HOOKS = {"links", "for_flight", "meeting", "objection", "phases"}
ALIASES = {
    "size": "group",
    "algorithms": "algorithm",
    "params": "parameters?",
    "p": "parameter",
    "out": "n",
    "comm": "Comm",
    "compressor": "compressors",
    "sources": "peer",
    "targets": "peer",
    "families": "measured",
    "part": "network",
    "parts": "part",
    "link": "host",
}  # what sentences also say of an argument
ENDS = {
    "close",
    "abort",
    "stop",
    "detach",
    "clear",
    "for_flight",
    "meeting",
}  # methods after which there is nothing more to call


def value_of(world: World, target: str, argument: str, annotation: Any, called: Any) -> Any:
    """A value for an argument with which the call works."""
    for (end, name), make in SPECIAL.items():
        if name == argument and target.endswith(end):
            return make(world, called)
    if argument in BY_NAME:
        return BY_NAME[argument](world, called)
    kind = getattr(annotation, "__name__", None)
    if kind in BY_KIND:
        return BY_KIND[kind](world)
    raise LookupError(f"no plain value for {argument}: {annotation} of {target}; give tests/plain_calls.py one")
