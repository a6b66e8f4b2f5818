"""A process group at a round: the only door to `torch.distributed`.

Every message of the package leaves through the methods of `Comm`, so that byte counts, group creation and the names
that torch gives its collectives are each written once. With one rank nothing is sent.
"""

import hashlib
import uuid
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh

from ..arguments import checked, instance, whole
from . import groups
from .flows import Flows
from .groups import FLAT, INTER, INTRA, all_gather_single, check_mesh, flat_group, reduce_scatter_single, rotated
from .own import flows_of, own_groups, shut_all


@dataclass(frozen=True, eq=False)
class Comm:
    """A group of ranks, the nodes it spans, and the round and step at which it is used.

    Args:
        group: the process group; None means the default group, or the ranks of `mesh`.
        mesh: a `DeviceMesh` with the dimensions ("inter", "intra"): nodes, and ranks within a node. With a mesh,
            `comm.intra` and `comm.inter` are the groups that `Hierarchical` works in. A mesh that covers fewer ranks
            than the default group makes a new group: then all its members must make this `Comm` together.
        flows: divide every message of 256 KiB or more over so many connections to each peer, where the network caps
            what one of them carries; between nodes only, with a mesh. For tensors on the CPU. Makes groups: all
            members must make this `Comm` together.

    Raises:
        RuntimeError: torch.distributed is not initialised.
        ValueError: the mesh lacks the two dimensions, or covers other ranks than the group; flows is not 1 to 64.
    """

    group: Any = None
    mesh: DeviceMesh | None = None
    flows: int = 1
    _flows: "dict[str, Flows]" = field(default_factory=dict, repr=False)  # by part
    _parts: "tuple[Any, Any] | None" = field(default=None, repr=False)  # the intra and inter groups
    _round: int | None = field(default=None, repr=False)
    _step: int | None = field(default=None, repr=False)
    _bucket: int = field(default=0, repr=False)
    _sent: "dict[str, float] | None" = field(default=None, repr=False)  # bytes by part, counted for a report
    _part: str = field(default=FLAT, repr=False)

    def __post_init__(self) -> None:
        if not dist.is_initialized():
            raise RuntimeError("torch.distributed is not initialised: call init_process_group first (one rank will do)")
        groups.check_group(self.group)
        if self.mesh is not None and self._parts is None:
            check_mesh(self.mesh, self.group)
            object.__setattr__(self, "_parts", (self.mesh.get_group(INTRA), self.mesh.get_group(INTER)))
        if self.group is None:
            object.__setattr__(self, "group", flat_group(self.mesh))
        whole("flows", self.flows, 1, 64)
        if self.flows > 1 and not self._flows and self.size > 1:
            name = self.gather_objects(uuid.uuid4().hex)[0]
            made = flows_of(self.group, self._parts, self.flows, name, default_pg_timeout)
            object.__setattr__(self, "_flows", made)

    # Who and when

    @property
    def rank(self) -> int:
        """This process's rank in the group."""
        return int(self.group.rank())

    @property
    def size(self) -> int:
        """The number of ranks in the group."""
        return int(self.group.size())

    @property
    def round(self) -> int:
        """The ordinal of this flight in its rule: 0, 1, 2 …, equal on all ranks."""
        if self._round is None:
            raise ValueError("this Comm stands at no round; give it one with comm.at(round)")
        return self._round

    @property
    def step(self) -> int:
        """The number of optimizer steps made before this flight; a free-running rule has none."""
        if self._step is None:
            raise ValueError(
                "this Comm stands at no step: give it one with comm.at(round, step); a free-running rule has no step"
            )
        return self._step

    def at(self, round: int, step: int | None = None) -> "Comm":
        """The same group at another round (and step)."""
        whole("round", round, 0)
        whole("step", 0 if step is None else step, 0)
        return replace(self, _round=round, _step=step)

    def stand(self, round: int, step: int | None, bucket: int, sent: "dict[str, float]") -> "Comm":
        """The same group for one flight: its round, step and bucket, counting the bytes it sends into `sent`."""
        return replace(self, _round=round, _step=step, _bucket=bucket, _sent=sent)

    def key(self, salt: int = 0, shared: bool = False) -> int:
        """A random key for this round, bucket and rank (without the rank if `shared`), in [0, 2**31)."""
        text = f"{salt}/{self._round or 0}/{self._bucket}/{'' if shared else self.rank}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little") >> 1

    @property
    def intra(self) -> "Comm":
        """The ranks of this node."""
        return replace(self, group=self._part_groups()[0], mesh=None, _parts=None, flows=1, _flows={}, _part=INTRA)

    @property
    def inter(self) -> "Comm":
        """The ranks with this one's place in the other nodes."""
        return replace(self, group=self._part_groups()[1], mesh=None, _parts=None, _part=INTER)

    @property
    def hierarchical(self) -> bool:
        """Whether this group knows its nodes."""
        return self._parts is not None

    def _part_groups(self) -> "tuple[Any, Any]":
        if self._parts is None:
            made = 'Comm(mesh=init_device_mesh(…, mesh_dim_names=("inter", "intra")))'
            raise ValueError(f"this Comm knows no nodes; make it with {made}; a stage names them in `needs_groups`")
        return self._parts

    # Collectives on flat tensors. Each is called by all ranks of the group, in the same order.

    def all_reduce(self, x: Tensor, op: Any = dist.ReduceOp.SUM) -> Tensor:
        """Sum `x` over the ranks, in place."""
        if self.size > 1:
            self._count(2 * (self.size - 1) / self.size * x.nbytes)
            if (flows := self.settled()) is None:
                dist.all_reduce(x, op, group=self.group)
            else:
                flows.begin(
                    x.view(-1), lambda part, group: dist.all_reduce(part, op, group=group, async_op=True)
                ).wait()
        return x

    def all_reduce_later(self, x: Tensor, op: Any = dist.ReduceOp.SUM) -> Any:
        """Begin `all_reduce`; the work returned is waited for by `.wait()`. None with one rank."""
        if self.size == 1:
            return None
        self._count(2 * (self.size - 1) / self.size * x.nbytes)
        return dist.all_reduce(x, op, group=self.group, async_op=True)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """This rank's shard of the sum of `x` (size · k,) over the ranks: (k,)."""
        if self.size == 1:
            return x
        out = x.new_empty(x.numel() // self.size)
        self._count((self.size - 1) * out.nbytes)
        if (flows := self.settled()) is None:
            reduce_scatter_single(out, x, group=self.group)
        else:
            flows.reduce_scatter(out, x, reduce_scatter_single)
        return out

    def all_gather(self, x: Tensor) -> Tensor:
        """The tensors `x` (k, …) of all ranks, one after another: (size · k, …)."""
        if self.size == 1:
            return x
        out = x.new_empty(self.size * x.shape[0], *x.shape[1:])
        self._count((self.size - 1) * x.nbytes)
        if (flows := self.settled()) is None:
            all_gather_single(out, x, group=self.group)
        else:
            flows.all_gather(out.view(-1), x.view(-1), all_gather_single)
        return out

    def all_gather_later(self, out: Tensor, x: Tensor) -> Any:
        """Begin to gather `x` (k, …) of all ranks into `out` (size · k, …); `.wait()` for it."""
        groups.check_gathered(out, x, self.size)
        self._count((self.size - 1) * x.nbytes)
        return all_gather_single(out, x, group=self.group, async_op=True)

    def all_to_all_later(self, out: Tensor, rows: Tensor) -> Any:
        """Begin to send row r of `rows` (size, k) to rank r, and to receive as many into `out`; `.wait()` for it."""
        groups.check_gathered(out, rows, 1, "rows")
        self._count((self.size - 1) * (rows.nbytes // self.size))
        return dist.all_to_all_single(out, rows, group=self.group, async_op=True)

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        """Overwrite `x` with that of rank `source`."""
        whole("source", source, 0, self.size - 1)
        if self.size > 1:
            dist.broadcast(x, group=self.group, group_src=source)
        return x

    def gather_objects(self, value: Any) -> list[Any]:
        """The picklable `value` of every rank."""
        return groups.gather_pickled(value, self.group) if self.size > 1 else [value]

    def settled(self) -> "Flows | None":
        """The flows if there are any, their shares agreed on. All ranks call it before messages that all send."""
        if (flows := self._flows.get(self._part)) is not None:
            flows.settle()
        return flows

    # Messages between two ranks: by the group's own methods, since torch's irecv and isend take half as long again.

    def receive_later(self, x: Tensor, peer: int, tag: int = 0) -> Any:
        """Begin to receive `x` from `peer`; `.wait()` for it."""
        groups.check_peer(peer, self.group)
        if (flows := self._flows.get(self._part)) is not None:
            return flows.begin(x.view(-1), lambda part, group: group.recv([part], peer, tag))
        return self.group.recv([x], peer, tag)

    def send_later(self, x: Tensor, peer: int, tag: int = 0) -> Any:
        """Begin to send `x` to `peer`; `.wait()` before overwriting it."""
        groups.check_peer(peer, self.group)
        self._count(x.nbytes)
        if (flows := self._flows.get(self._part)) is not None:
            return flows.begin(x.view(-1), lambda part, group: group.send([part], peer, tag))
        return self.group.send([x], peer, tag)

    def exchange(self, x: Tensor, sources: Iterable[int], targets: Iterable[int]) -> dict[int, Tensor]:
        """Send `x` to every target; return what each source sent, in the order of `sources`."""
        received = {peer: torch.empty_like(x) for peer in sources}
        return self.exchange_each(dict.fromkeys(targets, x), received, x.device)

    def exchange_each(
        self, outgoing: Mapping[int, Tensor], incoming: dict[int, Tensor], device: torch.device | None = None
    ) -> dict[int, Tensor]:
        """Send each rank what `outgoing` has for it, and fill the tensors of `incoming`; waits for both.

        All ranks call it. One without a peer says on which `device` the tensors of the others are; None: of its own.
        """
        self.settled()
        device = next((x.device for x in (*outgoing.values(), *incoming.values())), device)
        if device is not None and device.type == "cuda":
            if outgoing:
                self._count(sum(x.nbytes for x in outgoing.values()))
            return groups.exchange_together(self.group, outgoing, incoming, device)
        # Every receive is posted before any send: a peer that sends first and finds no receiver stalls the connection.
        works = [self.receive_later(buffer, peer) for peer, buffer in incoming.items()]
        works += [self.send_later(outgoing[peer], peer) for peer in rotated(outgoing, self.rank)]
        for work in works:
            work.wait()
        return incoming

    # Groups of one's own

    def own(
        self,
        name: str,
        timeout: timedelta,
        device: torch.device,
        flows: int | None = None,
        store: Any = None,
        parts: Collection[str] = (FLAT, INTRA, INTER),
    ) -> "Comm":
        """The same ranks, which all call it, in new process groups that nothing else uses; `close()` them.

        They meet in `store`, and time out after `timeout`. Those in `parts` are warmed; nodes are made only if used.
        """
        timeout = timeout * 1.25 + timedelta(seconds=2)
        count = whole("flows", self.flows if flows is None else flows, 1, 64)
        nodes = self._parts if count > 1 or not {INTRA, INTER}.isdisjoint(parts) else None
        group, nodes = own_groups(self.group, nodes, name, timeout, device, store)
        made = flows_of(group, nodes, count, name, timeout, store) if self.size > 1 else {}
        comm = replace(self, group=group, mesh=None, _parts=nodes, flows=count if made else 1, _flows=made)
        for each in comm.groups():
            if each is not group or FLAT in parts:
                groups.warm(each, device)
        return comm

    def groups(self) -> list[Any]:
        """The process groups of this Comm: flat, then intra and inter where there are nodes, then further flows."""
        return [self.group, *(self._parts or ()), *(g for flows in self._flows.values() for g in flows.groups[1:])]

    def close(self) -> None:
        """Shut the groups that `own` made."""
        for flows in self._flows.values():
            flows.close()
        shut_all(self.groups())

    def _count(self, nbytes: float) -> None:
        if self._sent is not None:
            self._sent[self._part] = self._sent.get(self._part, 0) + nbytes


def check_comm(comm: Any) -> None:
    """Raise a TypeError unless `comm` is a Comm."""
    instance("comm", comm, Comm, "a bk.Comm")


_CHECKED = "all_reduce all_reduce_later reduce_scatter all_gather all_gather_later all_to_all_later broadcast key stand"
for _name in (*_CHECKED.split(), "receive_later", "send_later", "exchange", "exchange_each", "own"):
    setattr(Comm, _name, checked(getattr(Comm, _name)))
