"""A process group and the number of its current round, with methods that send messages. A single rank sends nothing."""

import hashlib
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import Store

from ..arguments import checked, instance, integer, message, tensor, truth
from ..tensors import bytes_of
from . import sending
from .groups import HOSTS, Membership, check_mesh, facts_of, flat_group, gloo_between, inner_of, node_groups
from .own import Flows, flows_of, longer, own_groups, shut_all
from .sending import FLAT, INTER, INTRA, Inner, Rider, Sent, SentFormat, from_host
from .symmetric import NodeMemory, node_of
from .weights import Weighted, Weights, between, within


@dataclass(frozen=True, eq=False)
class Comm(Inner, Weighted):
    """A group of ranks, the nodes that the group spans, and the round and step at which the group is used.

    Args:
        group: the process group; None means the ranks of `mesh` or, without a mesh, the default group.
        mesh: "hosts", or a `DeviceMesh` with the dimensions ("inter", "intra"): nodes, and ranks within a node. With a
            mesh, `comm.intra` and `comm.inter` are the groups that `Hierarchical` uses. With "hosts" each host is a
            node; all hosts must have the same number of ranks. "hosts", or a mesh of fewer ranks than the default
            group, makes new groups: then all members must construct this `Comm` together.
        between: with a mesh, "gloo" sends all messages but those within nodes by gloo, from the memory of the host, so
            that NCCL connects no nodes. Members, of a group "cpu:gloo,cuda:nccl", construct this `Comm` together.
        flows: the number of connections to each peer, for networks that limit the bandwidth of one connection. Messages
            of 256 KiB or more on the CPU are divided among these connections; with a mesh, only messages between nodes.
            More than one flow makes new groups: then all members must construct this `Comm` together.
        kernels: exchange CUDA tensors within a node in one kernel, through memory that all its ranks can reach: means,
            all-gathers, reduce-scatters, all-to-alls and means of neighbours of fp32, bf16 and fp16, exact or packed
            without random rounding, with the same results. That is for a group on one node or, with a mesh, for
            `intra`. `attach`, or the first exchange, makes the memory, of 256 MiB a rank at most, and as much for
            neighbours; NCCL sends what needs more, and everything if a rank cannot reach the memory of the others,
            which a warning names. A CUDA graph with such an exchange must not run beside others of this `Comm`. Tests
            execute the kernels on CPUs, instruction by instruction; no GPU has run them yet, so the default is False.

    Attributes:
        rank, size: the rank of this process in the group, and the number of ranks.

    Raises:
        RuntimeError: torch.distributed is not initialised.
        ValueError: the mesh has other dimensions, or other ranks than the group; hosts have different numbers of
            ranks; `flows` is not 1 to 64; `between` is not "gloo", or there is no mesh; `kernels` is True without NCCL.
    """

    group: Any = None
    mesh: DeviceMesh | Literal["hosts"] | None = None
    flows: int = 1
    between: Literal["gloo"] | None = None
    kernels: bool = False
    membership: ClassVar[Membership] = Membership()
    rank: int = field(default=0, init=False)
    size: int = field(default=1, init=False)
    _flows: dict[str, Flows] = field(default_factory=dict)  # by part
    _parts: tuple[Any, Any] | None = None  # the intra and inter groups
    _round: int | None = None
    _step: int | None = None
    _bucket: int = 0
    _call: int = 0  # distinguishes the messages of different calls
    _meet: Callable[[], None] | None = None  # called before this Comm waits for other ranks or adds values
    _sent: Sent | None = None  # counted for a report
    _formats: list[SentFormat] | None = None  # of one flight, likewise
    _part: str = FLAT
    _rider: Rider | None = None  # flags that the first all-gather carries
    _node: NodeMemory | None = None  # for exchanges in one kernel
    _weights: Weights | None = None  # of all ranks, if they differ

    def __post_init__(self) -> None:
        if self.group is None and not dist.is_initialized():
            raise RuntimeError(
                "torch.distributed is not initialised: call init_process_group first (one rank will do), or pass "
                "comm=, which bk.elastic.join has returned"
            )
        words = "a ProcessGroup of which this rank is a member, or None for all ranks"
        instance("group", self.group, (dist.ProcessGroup, type(None)), words)
        mesh: Any = None if isinstance(self.mesh, str) and self.mesh == HOSTS else self.mesh
        if mesh is not None and self._parts is None:
            check_mesh(mesh, self.group)
            vars(self).update(_parts=tuple(inner_of(mesh.get_group(part)) for part in (INTRA, INTER)))
        group = inner_of(flat_group(mesh) if self.group is None else self.group)
        vars(self).update(group=group, rank=int(group.rank()), size=int(group.size()))
        if mesh is not self.mesh and self._parts is None:
            vars(self).update(_parts=node_groups(self))
        integer("flows", self.flows, 1, 64)
        if self.between is not None and self._part == FLAT:
            vars(self).update(zip(("group", "_parts"), gloo_between(self), strict=True))
        if self.flows > 1 and not self._flows and self.size > 1:
            name, store = self.broadcast_object(uuid.uuid4().hex), self.group.get_group_store()
            vars(self).update(_flows=flows_of(self.group, self._parts, self.flows, name, default_pg_timeout, store))
        if truth("kernels", self.kernels) and self._node is None and self.size > 1:
            vars(self).update(_node=node_of(self))

    def __repr__(self) -> str:
        return f"<Comm: {', '.join(facts_of(self))}>"

    @property
    def round(self) -> int:
        """The number of the current flight among the flights of its rule: 0, 1, 2 …, equal on all ranks."""
        if self._round is None:
            raise ValueError("this Comm has no round; set it with comm.at(round)")
        return self._round

    @property
    def step(self) -> int:
        """The number of optimizer steps before the current flight; a free-running rule has no step."""
        if self._step is None:
            raise ValueError("this Comm has no step: set it with comm.at(round, step); a free-running rule has no step")
        return self._step

    def at(self, round: int, step: int | None = None) -> "Comm":
        """Return this `Comm` at another round and step; with `step=None` the new `Comm` has no step."""
        integer("round", round, 0)
        integer("step", 0 if step is None else step, 0)
        return replace(self, _round=round, _step=step)

    def for_flight(
        self, round: int, step: int | None, bucket: int, sent: Sent, formats: list[SentFormat] | None = None
    ) -> "Comm":
        """Return a `Comm` for one flight: `sent` counts the bytes that are sent, and `formats` lists their formats."""
        return self._with(_round=round, _step=step, _bucket=bucket, _sent=sent, _formats=formats)

    def meeting(self, call: int, meet: Callable[[], None] | None) -> "Comm":
        """Return a `Comm` for the user's call number `call` (below 2³¹). A user may make this call on some ranks only.

        Over gloo, a rank receives only messages of the same `call`. `meet()` waits until all ranks make this call. An
        exchange of rows runs `meet()` after its first messages are sent; gloo's collectives run it before they begin.
        """
        return self._with(_call=call, _meet=meet)

    def note(self, asked: Any, flew: Any, reason: Any = "") -> None:
        """Record in which format this flight sends values, for the report of an attachment. A single rank sends none.

        Args:
            asked: the requested format, such as a compressor; a report prints the `repr` of this object.
            flew: the format that is used: often the object `asked`, or a `torch.dtype`.
            reason: why `flew` is not `asked`, or that `asked` saves no bytes; "" if neither. A report prints its `str`.
        """
        if self._formats is not None:
            flew, reason = (flew, reason) if self.size > 1 else (None, "one rank")
            self._formats.append(SentFormat(asked, flew, reason, self._part))

    def key(self, salt: int = 0, shared: bool = False) -> int:
        """Return a random-number key in `[0, 2**31)`: a hash of `salt`, round, bucket and, unless `shared`, rank."""
        if type(salt) is not int or type(shared) is not bool:
            salt, shared = integer("salt", salt), truth("shared", shared)
        text = f"{salt}/{self._round or 0}/{self._bucket}/{'' if shared else self.rank}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little") >> 1

    @property
    def intra(self) -> "Comm":
        """The `Comm` of the ranks of this node. Raises a ValueError without a mesh."""
        group, nodes = self._nodes()
        weights = within(self._weights, nodes.rank())
        return replace(self, group=group, mesh=None, _parts=None, flows=1, _flows={}, _part=INTRA, _weights=weights)

    @property
    def inter(self) -> "Comm":
        """The `Comm` of the ranks, one per node, that have the same number within their node as this rank."""
        weights = between(self._weights)
        return replace(self, group=self._nodes()[1], mesh=None, _parts=None, _part=INTER, _weights=weights)

    # Collectives on flat tensors. All ranks of the group call them in the same order.

    @checked
    @from_host
    def all_reduce(self, x: Tensor, op: Any = dist.ReduceOp.SUM) -> Tensor:
        """Reduce `x` over the ranks in place, and return it. By default `op` is the sum."""
        sending.check_added(x, op)
        if self.size == 1:
            return x
        if (flows := self._begin(2 * (self.size - 1) / self.size * x.nbytes)) is None:
            dist.all_reduce(x, op, group=self.group)
        else:
            flat = x.view(-1)
            flows.begin(flat, lambda s, g: dist.all_reduce(flat[s], op, group=g, async_op=True)).wait()
        return x

    def all_reduce_later(self, x: Tensor, op: Any = dist.ReduceOp.SUM) -> Any:
        """Begin `all_reduce`; return the work, or None with one rank. Call its `.wait()` before `x` is read."""
        sending.check_added(tensor("x", x), op)
        if self.size == 1:
            return None
        if (ready := self._ready(x)) is not x:
            return sending.Staged(self.all_reduce_later(ready, op), x, ready)
        self._count(2 * (self.size - 1) / self.size * x.nbytes)
        options = dist.AllreduceOptions()
        options.reduceOp = op
        return self.group.allreduce([x], options)

    @checked
    @from_host
    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Return this rank's shard (k,) of the sum of `x` (size · k,) over the ranks."""
        sending.check_added(x)
        if x.dim() != 1 or len(x) % self.size:
            raise ValueError(message("x", f"flat, of a length that {self.size} ranks divide", x))
        if self.size == 1:
            return x
        x = x.detach()
        out, scatter = x.new_empty(x.numel() // self.size), sending.reduce_scatter_single
        if (flows := self._begin((self.size - 1) * out.nbytes)) is None:
            scatter(out, x, group=self.group)
        else:
            rows = x.view(self.size, len(out))
            flows.begin(out, lambda s, g: scatter(out[s], rows[:, s].reshape(-1), group=g, async_op=True)).wait()
        return out

    @checked
    @from_host
    def all_gather(self, x: Tensor) -> Tensor:
        """Return the tensors `x` (k, …) of all ranks, concatenated: (size · k, …)."""
        if x.dim() == 0:
            raise ValueError(message("x", "of one dimension or more, such as x.view(1)", x))
        if self.size == 1:
            return x
        out = x.new_empty(self.size * x.shape[0], *x.shape[1:])
        landing, mine = sending.as_sent(out), sending.as_sent(x.detach())
        if (flows := self._begin((self.size - 1) * x.nbytes)) is None:
            self._gather(landing, mine).wait()
        else:
            rows, flat = landing.view(self.size, mine.numel()), mine.view(-1)
            flows.begin(flat, lambda s, g: g.allgather([list(rows[:, s])], [flat[s]])).wait()
        return out

    @checked
    def all_gather_later(self, out: Tensor, x: Tensor) -> Any:
        """Begin to gather `x` (k, …) of all ranks into `out` (size · k, …); return the work, which has `.wait()`."""
        sending.check_gathered(out, x, self.size)
        landing, mine = self._landing(out), self._ready(x.detach())
        if landing is not out:
            return sending.Staged(self.all_gather_later(landing, mine), out, landing)
        self._count((self.size - 1) * x.nbytes)
        return self._gather(out, mine)

    def _gather(self, out: Tensor, x: Tensor) -> Any:
        if self._rider is None or (pair := self._rider.boards(self._part, self.size)) is None:
            return sending.all_gather_single(out, x, group=self.group, async_op=True)
        self._count((self.size - 1) * pair[1].nbytes)  # in the same launch
        outs, given = ([bytes_of(each) for each in both] for both in zip((out, x), pair, strict=True))
        return self.group.allgather_into_tensor_coalesced(outs, given)

    @checked
    def all_to_all_later(self, out: Tensor, rows: Tensor) -> Any:
        """Begin to send row r of `rows` (size, k) to rank r, and to receive row r of `out` from it; return the work."""
        sending.check_gathered(out, rows, 1, "rows")
        landing, mine = self._landing(out), self._ready(rows.detach())
        if landing is not out:
            return sending.Staged(self.all_to_all_later(landing, mine), out, landing)
        self._count((self.size - 1) * (rows.nbytes // self.size))
        return dist.all_to_all_single(out, mine, group=self.group, async_op=True)

    @checked
    @from_host
    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        """Overwrite `x` with `x` of rank `source`, and return it."""
        integer("source", source, 0, self.size - 1)
        if self.size > 1:
            self._count((self.size - 1) / self.size * x.nbytes)  # the mean over ranks
            dist.broadcast(sending.as_sent(x), group=self.group, group_src=source)
        return x

    def gather_objects(self, value: Any, plain: bool = False) -> list[Any]:
        """Return each rank's `value`, by rank. Send it as a pickle or, if `plain`, as JSON, which cannot run code."""
        truth("plain", plain)
        return [value] if self.size == 1 else sending.gather_objects(value, self.group, plain)

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        """Return the picklable `value` of rank `source`; the `value` of other ranks is not read."""
        integer("source", source, 0, self.size - 1)
        return value if self.size == 1 else sending.broadcast_object(value, source, self.group)

    def _begin(self, nbytes: float) -> Flows | None:
        self._count(nbytes)
        self.met()
        return self.agree_on_shares()

    def agree_on_shares(self) -> Flows | None:
        """Return the flows, if any. All ranks call this before a collective; each 16th call sets new shares."""
        if (flows := self._flows.get(self._part)) is not None:
            flows.settle(self.met)
        return flows

    def met(self) -> None:
        """Wait until all ranks are known to make the same call, if `meeting` made this `Comm`; else do nothing."""
        if self._meet is not None:
            self._meet()

    # Messages use methods of the group, because torch's irecv and isend take 1.5 times as long. A tag depends on the
    # length and the call, because gloo ends the process if a message is too long, and accepts one that is too short.

    def receive_later(self, x: Tensor, peer: int, tag: int = 0) -> Any:
        """Begin to receive `x` from `peer`; return the work. Call its `.wait()` before `x` is read."""
        at = self._tag(x, peer, tag)
        if not self._as_it_lies(x):
            landing = self._landing(x)
            return sending.Staged(self.receive_later(landing, peer, tag), x, landing)
        if (flows := self._flows.get(self._part)) is not None:
            return flows.begin(x.view(-1), lambda s, group: group.recv([x.view(-1)[s]], peer, at))
        return self.group.recv([x], peer, at)

    def send_later(self, x: Tensor, peer: int, tag: int = 0) -> Any:
        """Begin to send `x` to `peer`; return the work. Call its `.wait()` before `x` is overwritten."""
        tag = self._tag(x, peer, tag)
        x = self._ready(x)
        self._count(x.nbytes)
        if (flows := self._flows.get(self._part)) is not None:
            return flows.begin(x.view(-1), lambda s, group: group.send([x.view(-1)[s]], peer, tag))
        return self.group.send([x], peer, tag)

    @checked
    def exchange(self, x: Tensor, sources: Iterable[int], targets: Iterable[int]) -> dict[int, Tensor]:
        """Send `x` to every target, and return the tensor from each source, in the order of `sources`."""
        return self.exchange_each(dict.fromkeys(targets, x), {p: torch.empty_like(x) for p in sources}, x.device)

    @checked
    def exchange_each(
        self, outgoing: Mapping[int, Tensor], incoming: dict[int, Tensor], device: torch.device | None = None
    ) -> dict[int, Tensor]:
        """Send `outgoing` {target: tensor}, receive into `incoming` {source: tensor}, wait for all, return `incoming`.

        All ranks call it. A rank without peers passes the `device` of the other ranks' tensors.
        """
        self.agree_on_shares()
        device = next((x.device for x in (*outgoing.values(), *incoming.values())), device)
        if device is not None and self._by_nccl(device):
            sending.warm(self.group, device)
            if outgoing or incoming:  # in one call: NCCL matches sends and receives only within a call
                self.group._start_coalescing(device)
                for peer, x in outgoing.items():
                    self._count(x.nbytes)
                    self.group.send([x], peer, 0)
                for peer, buffer in incoming.items():
                    self.group.recv([buffer], peer, 0)
                self.group._end_coalescing(device).wait()
            return incoming
        # Receives are posted before sends, because a message without a posted receive stalls the connection. Each rank
        # sends to the next rank first, so that ranks do not all send to the same peer first.
        works = [self.receive_later(buffer, peer) for peer, buffer in incoming.items()]
        for peer in sorted(outgoing, key=lambda peer: (peer <= self.rank, peer)):
            works.append(self.send_later(outgoing[peer], peer))
        for work in works:
            work.wait()
        return incoming

    @checked
    def own(
        self,
        name: str,
        timeout: timedelta,
        device: torch.device,
        flows: int | None = None,
        store: Any = None,
        parts: Collection[str] = (FLAT, INTRA, INTER),
    ) -> "Comm":
        """Return a `Comm` of these ranks with new process groups, used by nothing else. Collective. Close it after use.

        Args:
            name, timeout, device: a unique name, the timeout of messages, and the device of their tensors.
            flows, store: the number of flows, and the store to connect with; None means those of this `Comm`.
            parts: the groups that will be used, among "flat", "intra" and "inter". In each, a first message is sent.
        """
        store = self.group.get_group_store() if store is None else instance("store", store, Store, "a Store")
        count = integer("flows", self.flows if flows is None else flows, 1, 64)
        group, nodes, made = own_groups(self, count, parts, name, longer(timeout), device, store)
        kept = {"group": group, "_parts": nodes, "flows": count if made else 1, "_flows": made}
        new = replace(self, mesh=None, between=None, kernels=False, _node=None, **kept)
        for each in new.groups() if FLAT in parts else new.groups()[1:]:
            sending.warm(each, device)
        if self._node is None or self._node.part not in parts:
            return new
        return new._with(_node=self._node.another(group if nodes is None else nodes[0], device))

    def groups(self) -> list[Any]:
        """Return the process groups: flat, then intra and inter if there is a mesh, then the groups of flows."""
        return [self.group, *(self._parts or ()), *(g for flows in self._flows.values() for g in flows.groups[1:])]

    def close(self) -> None:
        """Shut down the groups of this `Comm`, which `own` made, and release its memory."""
        if self._node is not None:
            self._node.close()
        for flows in self._flows.values():
            flows.close()
        shut_all(self.groups())


def check_comm(comm: Any) -> None:
    instance("comm", comm, Comm, "a bk.Comm")
