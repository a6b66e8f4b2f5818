"""Primitives whose means go in one kernel, executed as PTX, and the same primitives over collectives as NCCL's."""

import threading
from collections.abc import Sequence
from typing import Any

import torch
from exchanges import Mean, Node
from row_exchanges import AllGather, AllToAll, Exchange, Place, ReduceScatter

import baguakit as bk
from baguakit.kernels import rotation
from baguakit.kernels.exchange.tiles_gpu import Memory


def comm_of(kind: type, rank: int, ranks: int, **private: Any) -> Any:
    """Return a Comm without a process group."""
    return object.__new__(kind)._with(group=None, rank=rank, size=ranks, _flows={}, **private)


def average(mean: Mean, comm: bk.Comm, x: torch.Tensor, residual: torch.Tensor | None) -> None:
    if mean.codec is None:
        bk.primitives.mean_(x, comm)
    else:
        bk.primitives.compressed_mean_(x, mean.codec, comm, residual)


class HeldMemory:
    """The memory of a node, which is there."""

    def __init__(self, memory: Memory, part: str = "flat") -> None:
        self.held, self.part = memory, part

    @property
    def for_neighbors(self) -> "HeldMemory":
        return self

    def memory(self, x: torch.Tensor, needed: int, differs: bool = False) -> Memory:
        assert differs or needed <= self.held.half_bytes
        return self.held


class Primitives(Node):
    """Memory of ranks whose means primitives launch. `formats` and `sent` have what each rank notes for a report."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.formats, self.sent = ([kind() for _ in range(self.ranks)] for kind in (list, dict))

    def launch(self, rank: int, mean: Mean, x: torch.Tensor, residual: torch.Tensor | None) -> Any:
        rotation.signs_of.cache_clear()  # the signs are in the memory of each rank
        addresses = torch.tensor([each.data_ptr() for each in self.whole])
        memory = Memory(rank, self.ranks, addresses, self.counters[rank], self.control[rank], self.half, self.limit)
        noted = {"_formats": self.formats[rank], "_sent": self.sent[rank]}
        average(mean, comm_of(bk.Comm, rank, self.ranks, _node=HeldMemory(memory), **noted), x, residual)


class Rows(Place):
    """Memory of ranks whose exchanges primitives launch; what they note and send is there as well."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.formats, self.sent = ([kind() for _ in range(self.ranks)] for kind in (list, dict))

    def begin(self, rank: int, exchange: Exchange, x: torch.Tensor, results: Sequence[torch.Tensor]) -> torch.Tensor:
        rotation.signs_of.cache_clear()  # the signs and tables are in the memory of each rank
        self.kernels._table.cache_clear()
        memory = HeldMemory(self.memory(rank))
        noted = {"_formats": self.formats[rank], "_sent": self.sent[rank]}
        by_primitive(exchange, comm_of(bk.Comm, rank, self.ranks, _node=memory, **noted), x, results)
        return memory.held.control[:1] == 0


def by_primitive(exchange: Exchange, comm: bk.Comm, x: torch.Tensor, results: Sequence[torch.Tensor]) -> None:
    """Store the results of a rank."""
    if isinstance(exchange, AllGather):
        bk.primitives.compressed_all_gather(x, exchange.codec, comm, *results)
    elif isinstance(exchange, ReduceScatter):
        out, lost = (*results, None)[:2]
        bk.primitives.compressed_reduce_scatter(x, exchange.codec, comm, lost, exchange.average, out)
    elif isinstance(exchange, AllToAll):
        splits = exchange.receives(comm.rank), exchange.splits[comm.rank]
        bk.primitives.compressed_all_to_all(x, exchange.codec, comm, *splits, *results)
    elif exchange.edges is None:
        bk.primitives.neighbor_mean_(*results, exchange.topology, comm._with(_round=exchange.round))
    else:
        own, sources, targets = exchange.links(comm.rank)
        given = {"self_weight": own, "src_weights": sources, "dst_weights": targets, "check": False}
        bk.primitives.neighbor_mean_(*results, comm=comm, **given)


class Threads(bk.Comm):
    """A rank that is a thread. Its collectives are those of NCCL."""

    board: list
    barrier: threading.Barrier

    def _by_nccl(self, device):
        return True

    def met_with(self, x):
        """Return the tensors of all ranks."""
        self.board[self.rank] = x.clone()
        self.barrier.wait(60)
        found = list(self.board)
        self.barrier.wait(60)
        return found

    def all_to_all_later(self, out, rows):
        out.copy_(torch.stack([each[self.rank] for each in self.met_with(rows)]))
        self._count((self.size - 1) * (rows.nbytes // self.size))
        return self

    def all_gather_later(self, out, x):
        out.view(-1).copy_(torch.cat([each.view(-1) for each in self.met_with(x)]))
        self._count((self.size - 1) * x.nbytes)
        return self

    def wait(self):
        pass


def by_collectives(mean: Mean) -> tuple[list[torch.Tensor], list[torch.Tensor], list[dict]]:
    """Return the values, residuals and sent bytes of each rank."""
    values, sent = [x.clone() for x in mean.values], [{} for _ in mean.values]
    residuals = [torch.full((mean.length,), 7.0) for _ in values]
    shared = {"board": [None] * mean.ranks, "barrier": threading.Barrier(mean.ranks)}
    failed = []

    def run(rank):
        try:
            comm = comm_of(Threads, rank, mean.ranks, **shared, _sent=sent[rank])
            with torch.no_grad():
                average(mean, comm, values[rank], residuals[rank] if mean.residual else None)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(mean.ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed, failed
    return values, residuals, sent
