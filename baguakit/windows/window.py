"""The class `Window`."""

import contextlib
import secrets
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import fsum
from typing import Annotated, Any

import torch
from torch import Tensor

from ..arguments import Natural, Range, checked, describe, message, several, tensor
from ..comm import Comm, check_comm
from ..compressors import Compressor
from ..compressors.base import check_dtype
from ..kernels.operators import mix_
from ..primitives.neighbors import links_in
from ..topology import Topology
from ..topology.chosen import weights_in
from .links import Links
from .memory import Memory
from .messages import ADD, FREE, GET, LOCK, PING, PUT, UNLOCK, Format

Tensors = Tensor | Sequence[Tensor]
Weights = Mapping[int, float] | Iterable[int] | None


class Window:
    """Values of this rank, and a buffer for each rank that it hears, to which that rank writes whenever it likes.

    Construct it on all ranks together; all other calls are made by one rank alone. Threads send and receive over TCP,
    whole messages only: no call sees half a message. A call returns when the peers have applied it or, with
    `wait=False`, at once; calls that wait for a slow peer become one message, so that a peer delays nobody else.
    Tensors on a device are copied to the host. Any backend's group will do, since it is used by the constructor only.

    The edge to a rank that has ended, or has not answered for `timeout` seconds, is dropped for ever: what was
    accumulated for it, and what it did not confirm, comes back to this rank in the next update. If that rank goes on
    after all, its last message may count twice.

    Args:
        tensors: a floating tensor or a list of them, of the same shapes and dtypes on all ranks. `update` and
            `accumulate` change them. What peers `get` is a copy from this rank's latest call.
        topology: a static topology such as `Ring()`: a rank puts to ranks that hear it, and gets from those it hears.
        comm: the group; None for all ranks.
        compressor: the format of values. Puts and gets send the change of a replica, and accumulating sends later
            what a message lost; both are kept in fp32. None: exact values.
        zero: begin with buffers, and their push-sum weights, of zeros, in place of this rank's own values.
        timeout: the seconds in which a peer that lives answers.

    Raises:
        TypeError: a tensor is not floating, or another argument has a wrong type.
        ValueError: the topology changes from round to round or does not fit; ranks pass different arguments.
    """

    @torch.no_grad()
    @checked
    def __init__(
        self, tensors: Tensors, topology: Topology, comm: Comm | None = None, compressor: Compressor | None = None,
        zero: bool = False, timeout: Annotated[float, Range(above=0)] = 60.0,
    ) -> None:  # fmt: skip
        self.comm = Comm() if comm is None else comm
        check_comm(self.comm)
        self.topology, self._tensors = topology, floats("tensors", tensors)
        self._single = isinstance(tensors, Tensor)
        if topology.period(self.comm.size) > 1:
            raise ValueError(f"topology is one whose rounds are all the same, not {topology!r}; use its static graph")
        self._row = links_in(topology, self.comm)
        dtype = self._tensors[0].dtype
        for each in self._tensors:
            dtype = torch.promote_types(dtype, each.dtype)
        wide = torch.promote_types(dtype, torch.float32)
        n = sum(each.numel() for each in self._tensors)
        self._format = Format(self.comm.rank, n, dtype, wide, compressor)
        _, sources, targets = self._row
        self._memory = Memory(self._format, self._read(), sources, zero)
        self._links = Links(self._memory, self.comm.rank, timeout)
        self._close = weakref.finalize(self, self._links.close)
        self._updates, self._held = 0, set[int]()
        facts = [n, str(dtype), repr(topology), repr(compressor), zero]
        said = self.comm.gather_objects([*facts, *self._links.address, secrets.token_hex(16)], plain=True)
        for rank, each in enumerate(said):
            if each[:5] != said[0][:5]:
                self.close()
                raise ValueError(f"tensors, topology or options differ: {said[0][:5]} on rank 0, {each[:5]} on {rank}")
        token = bytes.fromhex(said[0][7])
        self._links.start(token, {peer: tuple(said[peer][5:7]) for peer in sorted({*sources, *targets})})

    # What this rank sends.

    @torch.no_grad()
    @checked
    def put(self, values: Tensors | None = None, dst_weights: Weights = None, wait: bool = True) -> None:
        """Overwrite this rank's buffers on other ranks:  b_jr ← d_j x.

        Args:
            values: x, tensors like those of the window; None for its tensors.
            dst_weights: {j: d_j}, or a list of ranks, with weights of 1; None for all ranks that hear this rank.
            wait: whether to return when all calls so far are applied; False: at once.
        """
        x, p = self._given(values), self._memory.p
        self._send(PUT, x, p, dst_weights, wait)
        self._expose(x if values is None else None)

    @torch.no_grad()
    @checked
    def accumulate(
        self, values: Tensors | None = None, dst_weights: Weights = None, self_weight: float = 1.0, wait: bool = True
    ) -> None:
        """Add to this rank's buffers on other ranks:  b_jr ← b_jr + d_j x;  then  x_r ← s x_r.

        Args:
            values, dst_weights, wait: as in `put`.
            self_weight: s, by which the window's tensors and p are multiplied.
        """
        x, p = self._given(values), self._memory.p
        self._send(ADD, x, p, dst_weights, False)
        own, memory = x if values is None else self._read(), self._memory
        with memory.changed:
            back, memory.back = memory.back, None
            memory.p, memory.back_p = self_weight * memory.p + memory.back_p, 0.0
        if self_weight != 1 or back is not None:
            total = own.to(self._format.wide) * self_weight
            own = self._write(total if back is None else total + back)
        self._expose(own)
        self.wait() if wait else None

    @checked
    def get(self, src_weights: Mapping[int, float] | None = None, wait: bool = True) -> None:
        """Read the values of ranks that this rank hears:  b_rj ← w_j x_j.

        Args:
            src_weights: {j: w_j}; None for all ranks that this rank hears, with weights of 1.
            wait: whether to return when the values are there; False: at once.
        """
        weights = self._weights("src_weights", src_weights, self._row[1], "which this rank does not hear")
        for peer, weight in weights.items():
            self._links.edges[peer].ask(GET, weight)
        self.wait() if wait else None

    @checked
    def wait(self, ahead: Natural = 0) -> None:
        """Wait until each peer has at most `ahead` calls of this rank to confirm."""
        self._check_open()
        edges = self._links.edges.values()
        with self._memory.changed:
            self._memory.changed.wait_for(lambda: self._memory.closed or all(e.pending <= ahead for e in edges))
        self._check_open()

    # What has come.

    @torch.no_grad()
    @checked
    def update(
        self, self_weight: float | None = None, src_weights: Mapping[int, float] | None = None, reset: bool = False,
        staleness: Natural | None = None,
    ) -> None:  # fmt: skip
        """Mix what has come into the window's tensors:  x_r ← w_rr x_r + Σ_j w_rj b_rj.

        Args:
            self_weight, src_weights: w_rr and {j: w_rj}. With None, weights are those of the topology, without lost
                ranks and divided by their sum; with only `src_weights`, w_rr is 1 − Σ_j w_rj.
            reset: set the buffers to zeros.
            staleness: τ: in its k-th update, wait until each rank that it hears has put or accumulated k − τ times.
                None: never wait.
        """
        self._check_open()
        own, sources, _ = self._row
        given = src_weights is not None
        if src_weights is not None:
            sources = self._weights("src_weights", src_weights, sources, "which this rank does not hear")
            own = 1 - fsum(sources.values()) if self_weight is None else self_weight
        elif self_weight is not None:
            raise ValueError(f"self_weight={describe(self_weight)} needs src_weights, too")
        if staleness is not None:
            self._wait_for(self._updates + 1 - staleness)
        memory = self._memory
        x = self._read().to(self._format.wide, copy=True)
        with memory.changed:
            if not given and memory.lost:
                own, sources = living(own, sources, memory.lost)
            mix_(x, [memory.buffers[j] for j in sources], [own, *sources.values()])
            memory.p = own * memory.p + sum(w * memory.ps[j] for j, w in sources.items()) + memory.back_p
            x = x if memory.back is None else x.add_(memory.back)
            memory.back, memory.back_p = None, 0.0
            memory.came = dict.fromkeys(memory.came, 0)
            if reset:
                memory.buffers = {j: torch.zeros_like(b) for j, b in memory.buffers.items()}
                memory.ps = dict.fromkeys(memory.ps, 0.0)
            self._updates += 1
        self._expose(self._write(x))

    @checked
    def collect(self, staleness: Natural | None = None) -> None:
        """Add all that has come, and set the buffers to zeros: `update(1.0, {j: 1.0 for all j}, reset=True)`."""
        self.update(1.0, dict.fromkeys(self._row[1], 1.0), reset=True, staleness=staleness)

    @torch.no_grad()
    @checked
    def fetch(self, rank: int) -> Tensors:
        """Return a copy of the buffer for `rank`, in the form of the window's tensors, on the CPU."""
        self._weights("rank", [rank], self._row[1], "which this rank does not hear")
        with self._memory.changed:
            flat = self._memory.buffers[rank].clone()
        shaped = [f.view(t.shape).to(t.dtype) for f, t in self._split(flat)]
        return shaped[0] if self._single else shaped

    @checked
    def mutex(self, ranks: Iterable[int] | None = None) -> contextlib.AbstractContextManager[None]:
        """Return a context in which this rank alone holds the mutexes of `ranks`, granted in the order of requests.

        A mutex keeps out only ranks that ask for it, too. It is free again when its holder ends.

        Args:
            ranks: this rank and its neighbours, or some of them; None: all ranks that hear this rank.

        Raises:
            RuntimeError: in the context, this rank holds one of them already; or it lost one, since a connection broke.
        """
        around = dict.fromkeys([self.comm.rank, *self._links.edges], 1.0)
        chosen = self._row[2] if ranks is None else ranks
        return self._holding(sorted(self._weights("ranks", chosen, around, "which is no neighbour")))

    @contextlib.contextmanager
    def _holding(self, ranks: list[int]) -> Iterator[None]:
        if already := self._held.intersection(ranks):
            raise RuntimeError(f"this rank holds the mutexes of {sorted(already)} already")
        locked = list[int]()
        try:
            for rank in ranks:  # in rising order, so that no two ranks wait for each other
                self._held.add(rank)
                locked.append(rank)
                self._ask(rank, LOCK)
            yield
        finally:
            self._held.difference_update(locked)
            free = [rank for rank in reversed(locked) if not self._ask(rank, UNLOCK)]
        if free:
            raise RuntimeError(f"the connection to ranks {free} broke, so that this rank lost their mutexes")

    def _ask(self, rank: int, kind: int) -> bool:
        """Lock or unlock a mutex; return False if this rank did not hold it. A lost rank has none."""
        memory = self._memory
        if rank == self.comm.rank:
            memory.lock(rank, None) if kind == LOCK else memory.unlock(rank, None)
            return True
        asked = self._links.edges[rank].ask(kind)
        with memory.changed:
            memory.changed.wait_for(lambda: asked.answer or rank in memory.lost or self._memory.closed)
        return asked.answer is None or asked.answer.kind != FREE

    # Attributes.

    @property
    def p(self) -> float:
        """The push-sum weight of this rank; 1.0 at first."""
        return self._memory.p

    @property
    def lost(self) -> dict[int, str]:
        """The dropped edges: {rank: reason}."""
        return dict(self._memory.lost)

    @property
    def versions(self) -> dict[int, int]:
        """The number of calls that have changed the buffer for each rank since the last update."""
        return dict(self._memory.came)

    @property
    def pending(self) -> dict[int, int]:
        """The number of calls that each peer has not yet confirmed."""
        with self._memory.changed:
            return {peer: edge.pending for peer, edge in self._links.edges.items()}

    def close(self) -> None:
        """End the threads and connections: for the other ranks this one is lost. What waits is not sent. Idempotent."""
        self._close()

    def __enter__(self) -> "Window":
        return self

    def __exit__(self, *error: object) -> None:
        """Wait until all calls are applied, unless an error leaves the block, and close."""
        try:
            if error[0] is None:
                self.wait()
        finally:
            self.close()

    def _check_open(self) -> None:
        if self._memory.closed:
            raise RuntimeError("this window is closed")

    def _wait_for(self, arrivals: int) -> None:
        memory = self._memory

        def late() -> list[int]:
            return [j for j, count in memory.total.items() if count < arrivals and j not in memory.lost]

        with memory.changed:
            for peer in late():
                self._links.edges[peer].ask(PING)  # which finds out whether it has ended
            memory.changed.wait_for(lambda: self._memory.closed or not late())
        self._check_open()

    def _send(self, kind: int, x: Tensor, p: float, dst_weights: Weights, wait: bool) -> None:
        weights = self._weights("dst_weights", dst_weights, self._row[2], "which does not hear this rank")
        for peer, weight in weights.items():
            self._links.edges[peer].ask(kind, weight, weight * p, x)
        self.wait() if wait else None

    def _weights(self, name: str, given: Any, peers: Iterable[int], wrong: str) -> dict[int, float]:
        """Return {rank: weight}; raise unless each rank is one of `peers`."""
        self._check_open()
        weights = weights_in(name, dict.fromkeys(peers, 1.0) if given is None else given)
        if others := [rank for rank in weights if type(rank) is not int or rank not in peers]:
            raise ValueError(f"{name} names {describe(others[0])}, {wrong}: the peers are {list(peers)}")
        return dict(sorted(weights.items()))

    def _given(self, values: Tensors | None) -> Tensor:
        if values is None:
            return self._read()
        listed = floats("values", values)
        if [each.shape for each in listed] != [each.shape for each in self._tensors]:
            raise ValueError(message("values", "tensors with the shapes of those of the window", values))
        return self._read(listed)

    def _read(self, tensors: Sequence[Tensor] | None = None) -> Tensor:
        """Return a copy of the tensors on the CPU, one after another."""
        given = self._tensors if tensors is None else tensors
        return torch.cat([each.detach().flatten().to("cpu", self._format.dtype) for each in given])

    def _write(self, flat: Tensor) -> Tensor:
        """Write values into the window's tensors, and return a copy of what is there then."""
        for part, each in self._split(flat):
            each.detach().copy_(part.view(each.shape))
        return flat if all(each.dtype == flat.dtype for each in self._tensors) else self._read()

    def _split(self, flat: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        return zip(flat.split([each.numel() for each in self._tensors]), self._tensors, strict=True)

    def _expose(self, own: Tensor | None) -> None:
        if own is not None:
            with self._memory.changed:
                self._memory.own = own


def living(own: float, sources: Mapping[int, float], lost: Iterable[int]) -> tuple[float, dict[int, float]]:
    """Return the weights without those of lost ranks, divided by their sum."""
    left = {j: w for j, w in sources.items() if j not in lost}
    total = own + fsum(left.values())
    return (own / total, {j: w / total for j, w in left.items()}) if total else (1.0, left)


def floats(name: str, given: Any) -> list[Tensor]:
    """Return the tensors of an argument; raise unless there are some, of dtypes that can be mixed."""
    words = "a tensor or a list of tensors"
    listed = [given] if isinstance(given, Tensor) else several(name, given, words, ordered=True)
    for each in listed:
        check_dtype(name, tensor(name, each).dtype)
    if not sum(each.numel() for each in listed):
        raise ValueError(message(name, "a tensor or a list of them, with at least one value", given))
    return listed
