"""Means over ranks in one kernel, executed as PTX, and what the package's own compressors say they are."""

import functools
from collections import Counter
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from formats import BLOCKWISE, SELDOM
from hostile import difference, hostile

from baguakit.compressors import BFloat16, Compressor, Float8, Float16
from baguakit.kernels import cpu, rotation
from baguakit.kernels.exchange import mean_gpu as kernels
from baguakit.kernels.exchange.tiles_gpu import Memory, Wire
from bench.exchange.node import needed, separately, wire_of
from ptx.ranks import Together, together

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
USUAL = {repr(each): each for each in (*BLOCKWISE, BFloat16(), Float16())}
EXACT = "exact"
CODECS: dict[str, Compressor | None] = USUAL | {repr(each): each for each in (Float8("e5m2"), *SELDOM)} | {EXACT: None}
NEVER = (1 << 63) - 1  # nanoseconds: a wait without a limit, which the executor finds if it cannot end
COUNTS: Counter = Counter()  # orders, exchanges and turns of programs so far


@dataclass(frozen=True)
class Mean:
    """A mean over ranks, of `length` values each, of a kind and a seed of `hostile`; exact without a codec."""

    ranks: int
    length: int
    codec: Compressor | None = None
    dtype: torch.dtype = torch.float32
    residual: bool = False
    one_hop: bool = False
    kind: str = "many scales"
    seed: int = 0

    @property
    def wire(self) -> Wire:
        return wire_of(self.codec, self.dtype)

    @property
    def shard(self) -> int:
        return self.length if self.one_hop else -(-self.length // self.ranks)

    @property
    def bytes(self) -> int:
        """Of half a rank's memory."""
        return needed(self.ranks, self.wire, self.length, self.one_hop)

    @functools.cached_property
    def values(self) -> list[torch.Tensor]:
        return [
            hostile(self.kind, self.length, self.dtype, self.seed * self.ranks + rank) for rank in range(self.ranks)
        ]

    @functools.cached_property
    def wanted(self) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The mean, and what each rank's residual then is."""
        lost = [] if self.codec is None else [torch.empty(self.length) for _ in self.values]
        with patch.object(cpu, "functions", return_value=None):
            return separately(self.codec, self.values, lost or None, self.one_hop)[0], lost

    def good(self, ctas: int) -> list[bool]:
        """Return whether each CTA's values of the mean are finite."""
        constants = self.wire.constants(self.shard, self.values[0].itemsize, at_16=True)
        tile = constants["BLOCK"] * constants["BLOCKS"]
        owner = torch.arange(self.length) % self.shard // tile % ctas
        finite = self.wanted[0].isfinite()
        return [bool(finite[owner == cta].all()) for cta in range(ctas)]


class Node:
    """The memory of all ranks of a node, in this process; it holds no sensible values at first.

    Args:
        begun: how many exchanges there have been.
        mean_: launches a mean, as `kernels.mean_` does.
    """

    def __init__(self, ranks: int, half_bytes: int, ctas: int, begun: int = 0, limit: int = NEVER, mean_: Any = None):
        self.ranks, self.half, self.ctas, self.begun, self.limit = ranks, half_bytes, ctas, begun, limit
        self.mean_ = mean_ or kernels.mean_
        words, number = 2 * ranks * ctas, _int32(begun)
        self.whole = [torch.full((2 * half_bytes + 4 * words,), 0xAB, dtype=torch.uint8) for _ in range(ranks)]
        self.data = [each[: 2 * half_bytes] for each in self.whole]
        self.signals = [each[2 * half_bytes :].view(torch.int32).fill_(number) for each in self.whole]
        self.counters = [torch.full((ctas,), number, dtype=torch.int32) for _ in range(ranks)]
        self.control = [torch.zeros(1 + ranks, dtype=torch.int32) for _ in range(ranks)]

    def launch(self, rank: int, mean: Mean, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        """Launch a rank's part of a mean; return which CTAs say that their values are finite."""
        rotation.signs_of.cache_clear()  # the signs are in the memory of each rank
        addresses = torch.tensor([each.data_ptr() for each in self.whole])
        memory = Memory(rank, self.ranks, addresses, self.counters[rank], self.control[rank], self.half, self.limit)
        return self.mean_(memory, mean.wire, x, residual, mean.one_hop)

    def together(
        self, gpu: Any, launch: Any, order: Any = None, others: int = 0, found: Any = None
    ) -> Together:  # fmt: skip
        """Run what all ranks launch, and `others` behind them, which have no memory."""
        nothing = [[torch.zeros(4, dtype=torch.int32) for _ in range(others)] for _ in range(3)]
        done = together(
            gpu, self.ranks + others, launch, order=order, found=found,
            symmetric={"memory": self.data + nothing[0], "control": self.control + nothing[1]},
            signals={"signals": self.signals + nothing[2]},
        )  # fmt: skip
        COUNTS.update(orders=1, exchanges=max(done.launches), turns=done.turns)
        return done


def _int32(number):
    return (number + (1 << 31)) % (1 << 32) - (1 << 31)


@dataclass
class Results:
    """Of means one after another: values, residuals and, where it was launched, finite CTAs of each rank."""

    values: list[list[torch.Tensor]]
    residuals: list[list[torch.Tensor]]
    finite: list[dict[int, torch.Tensor]]


def run(
    gpu: Any, node: Node, *means: Mean, order: Any = None, come: Any = None, apart: int = 0, found: Any = None
) -> Results:
    """Run means one after another in an order.

    Args:
        come: how many of them each rank runs; by default all.
        apart: how many values lie between the begin of a tensor's memory and the tensor.
        found: takes what is not ordered, and programs go on, as on a GPU; by default it is raised.
    """
    values = [[torch.cat([x[:1].expand(apart), x])[apart:] for x in mean.values] for mean in means]
    residuals = [[torch.full((apart + mean.length,), 7.0)[apart:] for _ in mean.values] for mean in means]
    finite: list[dict[int, torch.Tensor]] = [{} for _ in means]

    def launch(rank):
        for place, mean in enumerate(means[: None if come is None else come[rank]]):
            lost = residuals[place][rank] if mean.residual else None
            finite[place][rank] = node.launch(rank, mean, values[place][rank], lost)

    node.together(gpu, launch, order, found=found)
    return Results(values, residuals, finite)


def unlike(node: Node, results: Results, *means: Mean) -> str:
    """Say what first differs from the definition of the means; nothing if all is as it should be."""
    for place, mean in enumerate(means):
        value, lost = mean.wanted
        for rank in range(mean.ranks):
            at = f"mean {place}, rank {rank}"
            if found := difference(results.values[place][rank], value):
                return f"{at}: {found}"
            if mean.residual and (found := difference(results.residuals[place][rank], lost[rank])):
                return f"{at}, residual: {found}"
            if results.finite[place][rank].tolist() != mean.good(node.ctas):
                return f"{at}: {results.finite[place][rank].tolist()} are finite, not {mean.good(node.ctas)}"
    return ""


def wrong(node: Node, results: Results, *means: Mean) -> str:
    """Say likewise what differs in the results, counters and words for the host."""
    ended = [_int32(node.begun + len(means))] * node.ctas
    for rank in range(node.ranks):
        if node.counters[rank].tolist() != ended or node.control[rank].any():
            return f"rank {rank} ends with {node.counters[rank].tolist()} and {node.control[rank].tolist()}"
    return unlike(node, results, *means)


def checked(gpu: Any, *means: Mean, order: Any = None, ctas: int = 2, begun: int = 0, apart: int = 0) -> None:
    """Run means one after another in an order, in memory of their own, and compare."""
    node = Node(means[0].ranks, max(mean.bytes for mean in means), ctas, begun=begun)
    results = run(gpu, node, *means, order=order, apart=apart)
    assert not (found := wrong(node, results, *means)), f"{means}, {order and order.name}: {found}"
