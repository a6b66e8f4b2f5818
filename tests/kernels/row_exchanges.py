"""Exchanges in one hop in one kernel, executed as PTX, and what the arithmetic of the primitives says they are."""

import functools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any
from unittest.mock import patch

import torch
from exchanges import NEVER, Mean, Node, _int32
from hostile import difference, hostile

from baguakit.compressors import Compressor
from baguakit.compressors.formats import Cast
from baguakit.kernels import cpu, mixing, rotation
from baguakit.kernels.exchange import rows_gpu as kernels
from baguakit.kernels.exchange.tiles_gpu import Memory, Wire
from baguakit.primitives.compressed import pays
from baguakit.primitives.neighbors import links
from baguakit.topology import Ring, Topology

INTEGERS = (torch.uint8, torch.int16, torch.bool, torch.int64, torch.complex128)


def values_of(kind: str, n: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return `n` values: hostile ones, or bytes of any kind where the dtype does not float."""
    if dtype.is_floating_point:
        return hostile(kind, n, dtype, seed) if n else torch.empty(0, dtype=dtype)
    source = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.rand(n, generator=source) < 0.5
    return torch.randint(-128, 128, (n * dtype.itemsize,), dtype=torch.int8, generator=source).view(dtype)


def wire_of(codec: Compressor | None) -> Wire | None:
    if codec is None:
        return None
    return Wire(None, dtype=codec.dtype) if isinstance(codec, Cast) else Wire(codec.form, codec.block)


def rounded(codec: Compressor | None, x: torch.Tensor, lost: torch.Tensor | None = None) -> torch.Tensor:
    """Return Q(x) in the dtype of x."""
    if codec is None or not x.numel():
        return x
    return codec.decompress(codec.compress(x[None], None if lost is None else lost[None]), len(x), x.dtype)[0]


@dataclass(frozen=True)
class Exchange:
    """An exchange of `ranks` ranks; its values are of a kind and a seed of `hostile`."""

    ranks: int
    length: int
    codec: Compressor | None = None
    dtype: torch.dtype = torch.float32
    kind: str = "many scales"
    seed: int = 0

    neighbors = False

    @property
    def bytes(self) -> bool:
        """Return whether all bytes are those of the values, NaN too."""
        return self.codec is None and isinstance(self, (AllGather, AllToAll))

    @functools.cached_property
    def values(self) -> list[torch.Tensor]:
        return [
            values_of(self.kind, self.sent(rank), self.dtype, self.seed * self.ranks + rank)
            for rank in range(self.ranks)
        ]

    @functools.cached_property
    def wanted(self) -> list[list[torch.Tensor]]:
        """Return the results of each rank, in the order of `begin`."""
        with patch.object(cpu, "functions", return_value=None):
            return [self.definition(rank) for rank in range(self.ranks)]

    def sent(self, rank: int) -> int:
        """Return how many values a rank has."""
        return self.length

    def begin(self, rank: int, x: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors of a rank's results as they are before."""
        raise NotImplementedError

    def launch(self, memory: Memory, x: torch.Tensor, results: Sequence[torch.Tensor], kernels: Any) -> torch.Tensor:
        raise NotImplementedError

    def definition(self, rank: int) -> list[torch.Tensor]:
        raise NotImplementedError


def unlike_zeros(n: int, dtype: torch.dtype) -> torch.Tensor:
    """Return values that no exchange leaves behind."""
    return torch.full((n * dtype.itemsize,), 0x5A, dtype=torch.uint8).view(dtype)


class AllGather(Exchange):
    def begin(self, rank, x):
        return [unlike_zeros(self.ranks * self.length, self.dtype)]

    def launch(self, memory, x, results, kernels):
        return kernels.all_gather(memory, wire_of(self.codec), x, *results)

    def definition(self, rank):
        return [torch.cat([rounded(self.codec, x) for x in self.values])]


@dataclass(frozen=True)
class ReduceScatter(Exchange):
    """`length` is that of a shard; exact without a codec."""

    residual: bool = False
    average: bool = False

    def sent(self, rank):
        return self.ranks * self.length

    def begin(self, rank, x):
        lost = [torch.full((len(x),), 7.0)] if self.residual else []
        return [unlike_zeros(self.length, self.dtype), *lost]

    def launch(self, memory, x, results, kernels):
        wire = wire_of(self.codec) or Wire(None, dtype=self.dtype, exact=True)
        return kernels.reduce_scatter(memory, wire, x, *results, average=self.average)

    def definition(self, rank):
        shards = [x.view(self.ranks, -1)[rank] for x in self.values]
        if self.codec is None:
            parts = [(x * (1 / self.ranks) if self.average else x).float() for x in shards]
            return [functools.reduce(torch.add, parts).to(self.dtype)]
        weights = torch.full((self.ranks,), 1 / self.ranks if self.average else 1.0)
        packed = self.codec.compress(torch.stack(shards))
        total = self.codec.add_(torch.zeros(self.length), packed, weights)
        lost = torch.empty(self.ranks, self.length)
        self.codec.compress(self.values[rank].view(self.ranks, -1), lost)
        return [total.to(self.dtype), *([lost.view(-1)] if self.residual else [])]


class AllToAll(Exchange):
    """The splits are drawn from the seed, up to `length` values each, some of them 0."""

    @functools.cached_property
    def splits(self) -> list[list[int]]:
        """Return how many values each rank sends to each."""
        source = random.Random(self.seed)
        return [
            [source.choice([0, self.length, source.randrange(self.length + 1)]) for _ in range(self.ranks)]
            for _ in range(self.ranks)
        ]

    def receives(self, rank: int) -> list[int]:
        return [row[rank] for row in self.splits]

    def sent(self, rank):
        return sum(self.splits[rank])

    def begin(self, rank, x):
        return [unlike_zeros(sum(self.receives(rank)), self.dtype)]

    def packs(self, n: int) -> bool:
        return self.codec is not None and pays(n, self.dtype.itemsize, self.codec, 1)

    def launch(self, memory, x, results, kernels):
        splits = self.splits[memory.rank], self.receives(memory.rank)
        return kernels.all_to_all(memory, wire_of(self.codec), x, *results, *splits, self.packs)

    def definition(self, rank):
        parts = [x.split(row)[rank] for x, row in zip(self.values, self.splits, strict=True)]
        return [
            torch.cat(
                [
                    rounded(self.codec if peer != rank and self.packs(len(part)) else None, part)
                    for peer, part in enumerate(parts)
                ]
            )
        ]


@dataclass(frozen=True)
class NeighborMean(Exchange):
    """A round of a topology; or of `edges` (sender, hearer), whose weights differ, as do factors of those who hear."""

    topology: Topology = Ring()
    round: int = 0
    edges: tuple[tuple[int, int], ...] | None = None

    neighbors = True

    def begin(self, rank, x):
        return [x]

    def links(self, rank: int) -> tuple[float, dict[int, float], dict[int, float]]:
        if self.edges is None:
            own, sources, targets = links(self.topology, rank, self.ranks, self.round)
            return own, sources, dict.fromkeys(targets, 1.0)
        hears = sorted(sender for sender, hearer in self.edges if hearer == rank)
        heard = {hearer: 0.5 + hearer + 3 * rank for sender, hearer in self.edges if sender == rank}
        return 0.3 - rank, {peer: (peer + 2) / 7 for peer in hears}, heard

    def launch(self, memory, x, results, kernels):
        own, sources, targets = self.links(memory.rank)
        heard, [x], ranks = {**sources, memory.rank: own}, results, range(self.ranks)
        there, here = ([len(x) * (peer in met) for peer in ranks] for met in (targets, heard))
        weights = [heard.get(peer, 0.0) for peer in ranks] + [targets.get(peer, 1.0) for peer in ranks]
        wire = Wire(None, dtype=self.dtype, exact=True)
        return kernels.neighbor_mean_(memory, wire, x, there, here, weights)

    def definition(self, rank):
        own, sources, _ = self.links(rank)
        sent = [self.values[peer] * self.links(peer)[2][rank] for peer in sources]
        mixing.mix_(x := self.values[rank].clone(), sent, [own, *sources.values()])
        return [x]


class Averaged(Exchange):
    """An exact mean of all ranks, among other exchanges."""

    def begin(self, rank, x):
        return [x]

    def launch(self, memory, x, results, kernels):
        mean_gpu = import_module(f"{kernels.__package__}.mean_gpu")
        return mean_gpu.mean_(memory, Wire(None, dtype=self.dtype, exact=True), x)

    def definition(self, rank):
        return [Mean(self.ranks, self.length, None, self.dtype, kind=self.kind, seed=self.seed).wanted[0]]


class Place(Node):
    """The memory of all ranks of a node, for exchanges of one kind."""

    def __init__(self, exchanges: Sequence[Exchange], ctas: int = 2, begun: int = 0, limit: int = NEVER, **given: Any):
        first = exchanges[0]
        rows = [(wire_of(each.codec), each.length * each.dtype.itemsize, each.length) for each in exchanges]
        row = max(max(-(-plain // 16) * 16, wire.row_bytes(n) if wire else 0) for wire, plain, n in rows)
        super().__init__(first.ranks, first.ranks * row, ctas, begun, limit)
        self.kernels, self.neighbors = given.get("kernels") or kernels, first.neighbors

    def begin(self, rank: int, exchange: Exchange, x: torch.Tensor, results: Sequence[torch.Tensor]) -> torch.Tensor:
        """Launch a rank's part of an exchange; return which CTAs say that they heard all."""
        rotation.signs_of.cache_clear()  # the signs and tables are in the memory of each rank
        self.kernels._table.cache_clear()
        return exchange.launch(self.memory(rank), x, results, self.kernels)

    def memory(self, rank: int) -> Memory:
        addresses = torch.tensor([each.data_ptr() for each in self.whole])
        return self.kernels.Memory(
            rank, self.ranks, addresses, self.counters[rank], self.control[rank], self.half, self.limit, self.neighbors
        )


def run(
    gpu: Any, place: Place, *exchanges: Exchange, order: Any = None, come: Any = None, apart: int = 0, found: Any = None
) -> tuple[list, list, Any]:
    """Run exchanges one after another; return the results and heard CTAs of each by rank, and the run.

    Args:
        come: how many of them each rank runs; by default all.
        apart: how many values lie between the begin of a tensor's memory and the tensor.
        found: takes what is not ordered, and programs go on, as on a GPU; by default it is raised.
    """
    # Views share the memory of all before them, so that a tensor can begin anywhere.
    values = [[torch.cat([x.new_zeros(apart), x])[apart:] for x in each.values] for each in exchanges]
    results: list[list] = [
        [
            [y if y is x else torch.cat([y.new_zeros(apart), y])[apart:] for y in each.begin(rank, x)]
            for rank, x in enumerate(values[at])
        ]
        for at, each in enumerate(exchanges)
    ]
    heard: list[dict[int, torch.Tensor]] = [{} for _ in exchanges]

    def launch(rank):
        for at, each in enumerate(exchanges[: None if come is None else come[rank]]):
            heard[at][rank] = place.begin(rank, each, values[at][rank], results[at][rank])

    return results, heard, place.together(gpu, launch, order, found=found)


def unlike(results: list, *exchanges: Exchange) -> str:
    """Say what first differs from the definition; nothing if all is as it should be."""
    for at, each in enumerate(exchanges):
        for rank in range(each.ranks):
            for ours, theirs in zip(results[at][rank], each.wanted[rank], strict=True):
                if each.bytes:
                    ours, theirs = ours.view(torch.uint8), theirs.view(torch.uint8)
                if found := difference(ours, theirs):
                    return f"exchange {at}, rank {rank}: {found}"
    return ""


def wrong(place: Place, results: list, heard: list, *exchanges: Exchange) -> str:
    """Say likewise what differs in the results, counters and words for the host."""
    ended = [_int32(place.begun + len(exchanges))] * place.ctas
    for rank in range(place.ranks):
        if place.counters[rank].tolist() != ended or place.control[rank].any():
            return f"rank {rank} ends with {place.counters[rank].tolist()} and {place.control[rank].tolist()}"
        if not all(each[rank].all() for each in heard):
            return f"rank {rank} has not heard all"
    return unlike(results, *exchanges)


def checked(
    gpu: Any, *exchanges: Exchange, order: Any = None, ctas: int = 2, begun: int = 0, apart: int = 0
) -> Any:  # fmt: skip
    """Run exchanges one after another in an order, in memory of their own, and compare; return the run."""
    place = Place(exchanges, ctas, begun)
    results, heard, done = run(gpu, place, *exchanges, order=order, apart=apart)
    assert not (found := wrong(place, results, heard, *exchanges)), f"{exchanges}, {order and order.name}: {found}"
    return done
