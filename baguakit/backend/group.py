"""The process group of the backend: it compresses collectives, or passes them to an inner group."""

import contextlib
import sys
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from functools import partialmethod
from itertools import count as numbers
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..arguments import describe, instance
from ..comm import FLAT, Comm, abort_all
from ..comm.groups import add_nccl, error_in, own_group, stand_for
from ..comm.own import longer, set_timeout, timeout_of
from ..comm.sending import LENGTHS, SENT, TAGS, is_staged, to_host
from ..lanes import lane, lane_of
from ..lanes.base import tensors_in
from ..monitor import Collective
from ..runtime.agreement import Setup, agree
from ..runtime.runtime import Channel, own_comm, start_monitor, warn_of_shared_cards
from ..tensors import is_dense
from .methods import EXCHANGES, Call, Methods, compare, parts_of
from .policy import Policy, count
from .works import Passed, Work

NAME = "bagua"
CPU = torch.device("cpu")
# For these gloo mixes up the values of tensors with gaps, without an error.
WITHOUT_GAPS = {"allreduce", "broadcast", "reduce", "reduce_scatter", "scatter"}


class BaguaGroup(Methods):
    """The process group of the backend: it uses NCCL on a GPU, and gloo for tensors of all other devices. Collective.

    Compressed collectives run on a lane, in the order of the calls, over process groups made for this lane. If a
    collective hangs, or ranks differ, an error names the rank at fault. `options` is what torch passes to backends.
    """

    def __init__(self, options: Any, policy: Policy) -> None:
        super().__init__(options.group_rank, options.group_size)
        self.policy, self._store, self._rounds = policy, options.store, numbers()
        self._timeout: timedelta = options.timeout
        self._channels: dict[str, Channel] = {}  # by kind of device
        self._dropped: deque[Work] = deque(maxlen=16)  # works that the program has dropped: see `Work`
        self._follower, self._this = lane(CPU, "baguakit futures"), Comm(self)
        self._inner: Any = None
        self._destroyed = False
        self._name, self._monitor = start_monitor(
            self._this, "backend", self._timeout, lambda: abort_all(self._groups()), lambda: error_in(self._groups())
        )
        setup = Setup((), {}, (), CPU, self._timeout, None, (repr(policy), f"NCCL: {by_nccl()}"))
        try:
            agree(self._monitor, lambda: setup, "init_process_group('bagua')", "register")
            self._connect(options.global_ranks_in_group)
        except BaseException:
            self._monitor.leave()
            raise
        self._set_group_name(options.group_id)
        if self._this.rank == 0 and not options.global_ranks_in_group:
            print(f"baguakit: {policy!r} on {self._this.size} ranks", file=sys.stderr, flush=True)

    def _connect(self, members: list[int]) -> None:
        """Make the inner group, which runs exact collectives, and the channel for other collectives on the CPU."""
        name = f"{self._name}/exact"
        if self._this.size == 1:
            self._inner = own_group(self, self._store, name, self._timeout, CPU)
        else:
            self._inner = own_comm(self._this, name, self._timeout, CPU, self._monitor, {FLAT}, 1).group
            self._set, self._monitor.limit = timeout_of(self._inner), self._limit
            channel, all_ranks = self._channel(CPU), not members or len(members) == dist.get_world_size()
            if self.policy.compressor is not None and "all_reduce" in self.policy.operations and all_ranks:
                warn_of_shared_cards(channel, [self.policy])
            if self.policy.compressor is not None and not members and not by_nccl():
                with self._monitor.busy("compiling"):
                    self.policy.compressor.warm_up(CPU)
        stand_for(self, self._inner, members)
        kinds, other = {"cpu": CPU}, torch.accelerator.current_accelerator()
        if by_nccl():
            add_nccl(self._inner, self._store, f"{self._name}/nccl", self._timeout)
        if other is not None:  # whose tensors are sent from the memory of the host, unless by NCCL
            kinds[other.type] = other if by_nccl() else CPU
        for kind, sent in kinds.items():
            backend = self._inner._get_backend(torch.device(sent.type))
            self._register_backend(torch.device(kind), dist.ProcessGroup.BackendType.CUSTOM, backend)

    def _limit(self) -> timedelta:
        """Return the timeout. If torch has changed the inner group's timeout, set the new timeout in all groups."""
        if (now := timeout_of(self._inner)) != self._set:
            self._timeout, self._set = now, longer(now)  # before the loop, since another thread may call this, too
            for group in self._groups():
                set_timeout(group, self._set)
        return self._timeout

    def _channel(self, device: torch.device) -> Channel:
        """Return a device's channel: a lane, and groups that only this lane uses. Collective at the first call."""
        kind = device.type
        if kind not in self._channels:
            flows = self.policy.flows if kind == "cpu" else 1
            own = own_comm(self._this, f"{self._name}/{kind}", self._timeout, device, self._monitor, {FLAT}, flows)
            self._monitor.device = device  # its threads ask there
            self._channels[kind] = Channel(0, lane(device, "baguakit backend"), own, self._monitor)
        return self._channels[kind]

    def _launch(self, call: Call) -> Work:
        self._check()
        tensors = tensors_in([arguments for _, arguments, _ in call.passed])
        if tensors and is_staged(self._inner, tensors[0].device):
            host = call.on_host()
            return self._launch(host).lands(call.outs, host.outs)
        why = self.policy.objection(call.operation, call.whole, call.op, self._this.size) or call.unlike
        why = why or "no tensors" * (not call.whole)
        return self._passed(call, why) if why else self._compressed(call)

    def _compressed(self, call: Call) -> Work:
        """Launch a collective on the lane: compressed or, without a compressor, over several connections (flows)."""
        on_gpu, policy, number = call.whole[0].is_cuda, self.policy, next(self._rounds)
        channel, label = self._channel(call.whole[0].device), call.described(exact=False)
        channel.lane.uses(call.passed)

        def work(comm: Comm) -> None:
            sent: dict[str, float] = {}
            notes: list[Any] = []
            meet, tag = None, parts_of(label)[0]
            if policy.compare and not on_gpu:
                meet = compare(comm.group, self._monitor, label, number + 1, call.splits)
            with writing(call.outs):
                for piece in call.pieces:
                    flying = comm.for_flight(number, None, 0, sent, notes).meeting(tag, meet)
                    EXCHANGES[call.operation](*piece, policy.compressor, flying)
            if meet is not None:  # a rank that neither sends nor hears anything has not met the others
                meet()
            flew, reason = "exact", notes[-1].reason if notes else "over flows"
            for note in notes:
                if note.flew is note.asked:
                    flew, reason = note.flew, ""
            count(call.operation, sum(sent.values()), flew, reason)

        follower = channel.lane if on_gpu else self._follower
        return Work(channel.begin(label, work), self._monitor, call.outs, follower, self._dropped)

    def _passed(self, call: Call, why: str) -> Work:
        """Pass a collective to the inner group.

        On a GPU, NCCL reports its work as ended once a connection breaks, although the kernel still waits. So a lane
        waits for the work, and the monitor watches an event on that lane, which does not end before the kernel.
        """
        if other := next((x.dtype for x in call.whole if x.is_cpu and x.dtype not in SENT), None):
            raise TypeError(f"{call.operation}: gloo does not send {other}; send the bytes, x.view(torch.uint8)")
        if {name for name, *_ in call.passed} & WITHOUT_GAPS:
            for x in tensors_in([arguments for _, arguments, _ in call.passed]):
                if x.is_cpu and x.layout is torch.strided and not is_dense(x):
                    raise ValueError(
                        f"{call.operation}: gloo mixes up the values of {describe(x)} with gaps; pass x.contiguous()"
                    )
        collective, n = Collective(label=call.described(exact=True)), self._this.size
        self._monitor.launched(0, collective)
        nbytes = sum(x.nbytes for x in call.whole if x.layout is torch.strided)
        nbytes += sum(part.nbytes for x in call.whole if x.is_sparse for part in (x._indices(), x._values()))
        share = 2 * (n - 1) / n if call.operation == "all_reduce" else (n - 1) / n
        count(call.operation, share * nbytes, "exact", why)
        tensors, beside = tensors_in([arguments for _, arguments, _ in call.passed]), None
        device = tensors[0].device if tensors else CPU
        if tensors:
            over_gloo = device == CPU and {(x.dtype, x.layout) for x in tensors} == {(tensors[0].dtype, torch.strided)}
        else:
            over_gloo = call.operation == "barrier" and not by_nccl()  # which prefers NCCL
        if n > 1 and self.policy.compare and not call.unlike and over_gloo:  # it refuses nothing, as far as can be seen
            return self._compared(call, collective)
        # Torch chooses the backend by the device of the tensors. Without tensors, gloo's error says what is missing.
        inner = self._inner if tensors or call.operation == "barrier" else self._inner._get_backend(CPU)
        collective.flight = passed = Passed([self._call(inner, collective, *each) for each in call.passed])
        if device.type == "cuda":
            self._monitor.device, beside = device, lane_of(self._inner, device)
            beside.uses(call.passed)
            collective.flight = beside.run(passed.follow, collective.label)
        return Work(collective, self._monitor, call.outs, beside, self._dropped)

    def _compared(self, call: Call, collective: Collective) -> Work:
        """Launch a collective over gloo. It begins after earlier calls, once all ranks have made the same call."""
        channel, number = self._channels["cpu"], next(self._rounds) + 1
        group = channel.comm.group

        def begin() -> list[Any]:
            with writing(call.outs):
                return [getattr(group, name)(*arguments, **named) for name, arguments, named in call.passed]

        def fly() -> list[Any]:
            channel.check()
            compare(group, self._monitor, collective.label, number, call.splits)()
            return [] if profiled else begin()

        profiled = torch._C._autograd._profiler_enabled()
        flight = channel.lane.run(fly, collective.label)
        collective.flight = Passed(launch=flight)
        if profiled:  # the profiler sees only what its own thread begins
            with contextlib.suppress(Exception):  # the wait for this work raises it
                flight.result()
            if flight._error is None:
                collective.flight = Passed(begin())
        return Work(collective, self._monitor, call.outs, self._follower, self._dropped)

    def _message(self, name: str, tensors: list[Tensor], *where: int) -> Any:
        """Pass a message between two ranks to the inner group. Other ranks do not take part."""
        self._check()
        if is_staged(self._inner, tensors[0].device):
            hosts = [to_host(x) for x in tensors]
            return self._message(name, hosts, *where).lands(*([], []) if name == "send" else (tensors, hosts))
        count(name, sum(x.nbytes for x in tensors) if name == "send" else 0, "exact", "not in the policy")
        message, device = Collective(label=name), tensors[0].device
        where = (*where[:-1], (where[-1] + LENGTHS * tensors[0].nbytes) % TAGS)  # as of a Comm
        message.flight = passed = Passed([self._call(self._inner, message, name, [tensors, *where], {})])
        if device.type == "cuda":  # the monitor sees the end on a lane for which nothing else waits
            self._monitor.device, watching = device, lane_of(self._monitor, device)
            watching.uses(tensors)
            self._monitor.air.watch(Collective(label=name, flight=watching.run(passed.result)))
        return Work(message, self._monitor, tensors, None, self._dropped)

    def _call(self, inner: Any, collective: Collective, name: str, arguments: Sequence[Any], named: Any) -> Any:
        """Call a method of the inner group. If a connection is broken, raise an error that names the rank at fault."""
        try:
            return getattr(inner, name)(*arguments, **named)
        except dist.DistBackendError as error:  # NCCL may find a connection broken as it launches
            collective.flight = Passed([])
            collective.flight.fail(error)
            return self._monitor.wait_for(collective)  # raises the sentence that names the rank at fault
        except Exception:  # the arguments are refused: no message is sent that others could wait for
            collective.landed = True
            raise

    def _check(self) -> None:
        if self._destroyed:
            raise RuntimeError("this process group has been destroyed; make another with torch.distributed.new_group")
        self._monitor.check()

    def get_group_store(self) -> Any:
        return self._store

    def getBackendName(self) -> str:
        return NAME

    def shutdown(self) -> None:
        if well := self._monitor.error is None:
            self._monitor.compare(*range(self._this.size), sure=True)
        self._end(wait=self._monitor.error is None)
        self._inner.shutdown()
        if well and self._monitor.error is not None:  # of work for which nobody has waited
            print(f"baguakit: {self._monitor.error}", file=sys.stderr, flush=True)

    def abort(self) -> None:
        self._end(wait=False)
        abort_all(self._groups())

    def _end(self, wait: bool) -> None:
        self._destroyed = True
        self._dropped.clear()
        for channel in self._channels.values():
            channel.lane.close(wait)
        self._follower.close(wait)
        self._monitor.leave()
        for channel in self._channels.values():
            channel.comm.close()

    def _groups(self) -> list[Any]:
        own = [group for channel in list(self._channels.values()) for group in channel.comm.groups()]
        return own + [self._inner] * (self._inner is not None)


for _name in ("send", "recv", "recv_anysource"):
    setattr(BaguaGroup, _name, partialmethod(BaguaGroup._message, _name))


def by_nccl() -> bool:
    return torch.cuda.is_available() and dist.is_nccl_available()


def writing(tensors: Sequence[Tensor]) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which a lane's thread may write to `tensors`, even if they were made in inference mode."""
    return torch.inference_mode() if True in map(Tensor.is_inference, tensors) else contextlib.nullcontext()


_chosen = [Policy()]  # for groups that are made from now on


def register(policy: Policy | None = None) -> None:
    """Register the backend "bagua" with torch, for `init_process_group("bagua")` and groups that are made later.

        bk.backend.register()
        torch.distributed.init_process_group("bagua")

    All ranks call this with the same policy, before they make the group. Rank 0 then prints the policy. A later call
    sets the policy of groups that are made after it.

    Args:
        policy: which collectives are compressed; None for `Policy()`.
    """
    _chosen[0] = Policy() if policy is None else instance("policy", policy, Policy, "a bk.backend.Policy")
    if NAME not in dist.Backend.backend_list:
        # `torch.compile` must call these methods between its graphs, and not trace into them.
        for name, method in [*vars(Methods).items(), *vars(BaguaGroup).items()]:
            if callable(method) and not name.startswith("__") and hasattr(dist.ProcessGroup, name):
                setattr(BaguaGroup, name, torch.compiler.disable(method))
        dist.Backend.register_backend(NAME, lambda o, _: BaguaGroup(o, _chosen[0]), True, ["cpu", "cuda"])
