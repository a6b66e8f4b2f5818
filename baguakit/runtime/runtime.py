"""The runtime of attachments and handles, from start to end.

The monitor starts before groups are made, so that it can name a rank that does not come.
"""

import contextlib
import uuid
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from datetime import timedelta
from functools import partial
from itertools import product
from typing import Any, Generic

import torch
from torch import Tensor

from ..comm import FLAT, HOSTS, Comm, abort_all
from ..comm.groups import PatientStore, error_in, host, lazy, next_name, ranks_by_host, store_of
from ..comm.sending import CPU, is_staged
from ..kernels import cpu
from ..lanes import Lane, lane
from ..monitor import Collective, Monitor, PeerError, end_with_process, store_gone, store_silent
from ..primitives import compressed_all_gather, neighbor_mean_, scattered_mean
from ..primitives.neighbors import is_mean, links
from ..rules import Rule
from ..stages import CompressedMean, Hierarchical, Mean, NeighborMean, Stage
from ..topology import Chosen, Topology
from .agreement import AnySetup, agree, agrees, as_time, asked, beside, channel_of, on_mesh

AGREEMENTS = 2  # the number of the channel of agreements: the channels of flights come first
ROUNDS = 16  # of a topology, whose connections are made at the start
SLOWEST_CONNECTION = 5.0  # seconds that the store may take to answer a new connection: it may look up a name first


@contextlib.contextmanager
def or_abandon(made: Any) -> Iterator[None]:
    """Call `made.abandon(error)` if the `with` block raises, to end everything that has begun on this rank."""
    try:
        yield
    except BaseException as error:
        made.abandon(error)
        raise


@dataclass(frozen=True, eq=False)
class Channel:
    """A lane, and the process groups that only the work on this lane uses."""

    number: int  # tells channels apart, for the monitor
    lane: Lane
    comm: Comm
    monitor: Monitor
    failed: list[str] = field(default_factory=list)  # descriptions of work that has failed here

    def check(self) -> None:
        """Raise a PeerError if work on this lane failed: ranks that wait for it would receive later messages."""
        self.monitor.check()
        if self.failed:
            raise PeerError(self.failed[0])

    def note(self, label: str, error: Exception) -> None:
        """Record that work has failed. With one rank, record nothing, because no rank waits for its messages."""
        if self.comm.size > 1:  # in words: the error holds the frames in which it was raised, and they hold groups
            self.failed.append(f"{label} failed on rank {self.comm.rank}: {type(error).__name__}: {error}")

    def begin(self, label: str, work: Callable[[Comm], Any], meet: bool = False, shared: bool = True) -> Collective:
        """Put `work(comm)` on the lane, and return its collective. All ranks call this if it is `shared`.

        `label` describes the work. Work that sends nothing need not be shared.

        With `meet`, the lane waits until all ranks have made the same call. Calls of users need this, because a user
        may call on some ranks only, and then a message could be received in another flight.
        """
        self.monitor.check()
        collective = Collective(label=label, shared=shared)
        launches = self.monitor.launched(self.number, collective)

        def run() -> Any:
            self.check()
            if meet:
                self.monitor.barrier(self.number, launches)
            try:
                return work(self.comm)
            except Exception as error:
                self.note(label, error)
                raise

        collective.flight = self.lane.run(run, label)
        return collective

    def together(self, label: str, work: Callable[[Comm], Any], meet: bool = False) -> Any:
        """Run `work(comm)` on the lane, and return its result, or raise a PeerError that names a rank. Collective.

        With `meet`, the lane first waits for all ranks, and on CUDA the host waits until the device has finished.
        """
        collective = self.begin(label, work, meet)
        if meet and collective.flight.on_device:  # a user's call: the user may save the result
            self.monitor.wait_until(collective.flight.done)
        return self.monitor.wait_for(collective)


class Runtime(Generic[AnySetup]):
    """The monitor, process groups and lanes of an attachment or a handle on this rank.

    Collective. If the constructor fails, all ranks raise the error, and everything made so far is closed. `kind` is the
    kind of hooks; the name that ranks agree on begins with it. `make` makes the setup of this rank, and raises if
    `timeout` is invalid. `aborted` is called on any thread when the groups have been aborted.
    """

    def __init__(
        self, kind: str, make: Callable[[], AnySetup], comm: Comm, timeout: Any, aborted: Callable[[], None]
    ) -> None:
        self.comm, self.over, self._aborted = comm, False, aborted
        self.channels: list[Channel] = []  # for work that ends within a step and, if a rule needs one, longer flights
        self.host: Channel | None = None  # sends CPU tensors, if a rule is free-running
        self.weighing: Channel | None = None  # sends the weights of ranks, if functions give them
        self.name, self.monitor = start_monitor(comm, kind, timeout, self._abort, lambda: error_in(self.groups()))
        comm.membership.watch(self.monitor)
        try:
            self.setup = agree(self.monitor, lambda: on_mesh(make(), comm))
        except BaseException:  # which all ranks raise
            self.over = True
            self.monitor.leave()
            raise
        device, by_host = self.setup.device, comm._by_host(self.setup.device)
        self.monitor.fly_on(CPU if by_host else device)
        with or_abandon(self):
            for number in range(1 + any(map(channel_of, self.setup.rules))):
                own = self._own_comm(f"{self.name}/{number}", number)
                self.channels.append(Channel(number, lane(device, by_host=by_host), own, self.monitor))
            if not comm.membership.changes:
                warn_of_shared_cards(self.channels[0], list(filter(packs_flat, self.setup.rules)))
            if any(map(agrees, self.setup.rules)):
                self.host = self._on_host(AGREEMENTS, "host")
            if callable(self.setup.weight) and comm.size > 1:
                self.weighing = self._on_host(AGREEMENTS + 1, "weights")

    def _on_host(self, number: int, name: str) -> Channel:
        """Return a channel that sends CPU tensors. Collective."""
        timeout = self.setup.timeout
        own = own_comm(Comm(self.comm.group), f"{self.name}/{name}", timeout, CPU, self.monitor, {FLAT})
        return Channel(number, lane(CPU), own, self.monitor)

    def _own_comm(self, name: str, channel: int, flows: int | None = None) -> Comm:
        setup = self.setup
        return own_comm(self.comm, name, setup.timeout, setup.device, self.monitor, setup.groups(channel), flows)

    def use_flows(self, flows: int) -> None:
        """Replace the groups of every channel by groups with `flows` flows each. Collective."""
        before = self.channels
        unique = before[0].together("other flows", lambda comm: comm.broadcast_object(uuid.uuid4().hex))
        owns = [self._own_comm(f"{self.name}/{unique}/{c.number}", c.number, flows) for c in before]
        self.channels = [Channel(c.number, c.lane, own, self.monitor) for c, own in zip(before, owns, strict=True)]
        for channel in before:
            channel.comm.close()

    # Methods that end the runtime

    def finish(self, drain: Callable[[], None]) -> None:
        """Call `drain`, which waits for the launched flights, and close the runtime. Idempotent."""
        if self.over:
            return
        with or_abandon(self):
            drain()
            for channel in self.channels:  # the host waits while a lost rank is still noticed
                self.monitor.wait_until(channel.lane.idle)
                if channel.comm._node is not None:
                    channel.comm._node.check()
        self.over = True
        self.monitor.leave()
        self._close(wait=True)

    def abandon(self, error: BaseException | None) -> None:
        """End without waiting for any rank. Tell the others the error, or that this rank has left. Idempotent."""
        if self.over:
            return
        self.over = True
        self.monitor.leave(error)
        self._abort()
        self._close(wait=False)

    def _abort(self) -> None:
        for channel in self.channels:
            if channel.comm._node is not None:
                channel.comm._node.stop()
        abort_all(self.groups())
        self._aborted()

    def _close(self, wait: bool) -> None:
        channels = self._channels()
        for channel in channels:
            channel.lane.close(wait)
        for channel in channels if self.comm.size > 1 else ():
            channel.comm.close()
            if wait:  # else work may still be on the lane. A group has a thread, which ends with its last reference.
                vars(channel).update(comm=self.comm)

    def groups(self) -> list[Any]:
        """Return the process groups that this runtime made. A single rank uses the user's group and makes none."""
        return [group for channel in self._channels() if self.comm.size > 1 for group in channel.comm.groups()]

    def _channels(self) -> list[Channel]:
        return [*self.channels, *filter(None, (self.host, self.weighing))]


def start_monitor(
    comm: Comm, kind: str, timeout: Any, abort: Callable[[], None], broken: Callable[[], str]
) -> tuple[str, Monitor]:
    """Return the name of these hooks, which begins with `kind` and is equal on all ranks, and the started monitor.

    Raise a PeerError if the store does not answer. For an invalid `timeout`, the setup will raise, on all ranks.
    """
    try:
        time_limit = as_time(timeout)
    except (TypeError, ValueError):
        time_limit = as_time(None)

    def started() -> tuple[str, Monitor]:
        name = f"{kind}/{next_name(comm.group)}"
        store = store_of(comm.group, f"{name}/monitor") if comm.size > 1 else None
        monitor = Monitor(store, comm.rank, comm.size, time_limit, abort, broken)
        monitor.start()
        if store is not None:
            monitor.run = store.compare_set("run", "", monitor.run).decode()  # that of the first that comes
        return name, monitor

    if comm.size == 1:
        return started()
    flight, seconds = beside(started, "attach()"), max(SLOWEST_CONNECTION, time_limit.total_seconds())
    if not flight.wait(seconds):
        raise PeerError(store_silent(comm.rank, seconds, "attach()", seconds))
    try:
        name, monitor = flight.result()
    except Exception as error:
        raise PeerError(store_gone(comm.rank, error)) from None
    end_with_process(monitor)
    return name, monitor


def own_comm(
    comm: Comm,
    name: str,
    timeout: timedelta,
    device: torch.device,
    monitor: Monitor,
    parts: Collection[str],
    flows: int | None = None,
) -> Comm:
    """Return a Comm of the same ranks with new groups of the kinds in `parts`; with one rank, `comm`. Collective.

    If a rank does not come, the first message of a group waits beyond all timeouts. So the groups are made on a thread
    that is not joined. Over gloo they get a store that stops waiting when the monitor names that rank. NCCL gets the
    usual store: NCCL's threads wait in the store, and Python would slow them down. All ranks pass the same `name`.
    """
    if comm.size == 1:
        return comm
    by_nccl = device.type == "cuda" and not all(is_staged(group, device) for group in comm.groups())
    current = torch.cuda.current_device() if by_nccl else None
    store = PatientStore(comm.group, monitor.wait_until) if current is None else None

    def made() -> Comm:
        if current is not None:
            torch.cuda.set_device(device if device.index is not None else current)
        return comm.own(name, timeout, device, flows, store, parts)

    monitor.check()
    collective = Collective(label=f"the group {name}")
    monitor.launched(0, collective)
    own: Comm = asked(monitor, collective, made)
    return own


def warn_of_shared_cards(channel: Channel, packs: Sequence[Any]) -> None:
    """Warn on rank 0 if ranks that share a network card each send packed messages to all other ranks. Collective.

    Let each of n hosts run L of the N ranks. A card then sends the packed bucket L (1 − 1/n) times to the owners of
    shards, and (N − 1)/N times around a ring. With `Hierarchical` it sends the packed bucket 2 (1 − 1/n) times. `packs`
    are the rules, or the policy, that send such messages, if any.
    """
    N = channel.comm.size
    if not packs or channel.comm.hierarchical or N < 4:
        return
    hosts = ranks_by_host(channel.together("the hosts of all ranks", lambda comm: comm.gather_objects(host())))
    n, L = len(hosts), len(hosts[0])
    if channel.comm.rank == 0 and n > 1 and L > 1 and n * L == N:
        warnings.warn(
            f"{N} ranks share the network cards of {n} hosts: {packs[0]!r} sends its packed values "
            f"{L * (1 - 1 / n) + (N - 1) / N:.2f} times over each card, and bk.hierarchical(…) {2 * (1 - 1 / n):.2f} "
            f'times: use that in BaguaStrategy or, with comm=bk.Comm(mesh="{HOSTS}"), in bk.attach or bk.interop.ddp',
            stacklevel=2,
        )


def packs_flat(rule: Rule) -> bool:
    """Return whether a rule without `Hierarchical` compresses a mean of all ranks in every step."""
    stages = rule.stage.whole() if rule.every == 1 else []
    packs = any(each.same_on_all_ranks and any(c.dense for c in each.compressors()) for each in stages)
    return packs and not any(each.shards for each in stages)


def warm_up(stages: Sequence[Stage], tensors: Sequence[Tensor], channel: Channel) -> None:
    """Compile kernels for tensors like `tensors`, while others suspend their timeouts; connect ranks. Collective."""
    if channel.comm.size > 1:
        node = channel.comm._node
        with channel.monitor.busy("compiling"):
            if tensors and channel.comm._home(tensors[0].device) == CPU:
                cpu.functions("mixing")  # what lands in the weights
            for stage, x in product(stages, tensors):
                home = channel.comm._home(x.device)
                x = x if home == x.device else torch.empty((), dtype=x.dtype, device=home).expand(x.shape)
                for each in stage.whole():
                    each.prepare(x, channel.comm)
                    if node is not None and x.is_contiguous():  # a bucket
                        channel.together("first means", partial(first_means, each, x))
        if any(topologies_of(each) for stage in stages for each in stage.whole()):
            x = tensors[0].new_zeros(1)
            channel.together("first messages", lambda comm: connect(stages, x, comm))


def first_means(stage: Stage, x: Tensor, comm: Comm) -> None:
    """Average zeros like `x`, so that no step waits for the memory and the compiler of one kernel. Collective."""
    if type(stage) is Hierarchical:
        zeros = x.new_zeros(x.numel() + -x.numel() % comm.intra.size)
        compressed_all_gather(scattered_mean(zeros, comm.intra), None, comm.intra)
    elif comm._node is None or comm._node.part != comm._part:
        return
    elif type(stage) is Mean:
        stage(torch.zeros_like(x), {}, comm)
    elif type(stage) is CompressedMean:
        for lost in (None, torch.zeros_like(x, dtype=torch.float32)):
            stage(torch.zeros_like(x), {}, comm, residual=lost)
    elif type(stage) is NeighborMean:
        for topology in topologies_of(stage):
            for round in range(min(topology.period(comm.size), ROUNDS)):
                neighbor_mean_(torch.zeros_like(x), topology, comm.at(round))


def connect(stages: Iterable[Stage], x: Tensor, comm: Comm) -> None:
    """Send `x` (1,) to the ranks that stages will send to, so that no step waits for connections. Collective.

    The first `ROUNDS` rounds of a topology are run in the same order as its stage runs them, so that they cannot block.
    Nothing is sent in gloo groups that connected all ranks at the start, or for rounds that are an all-reduce.
    """
    n = comm.size
    for stage in stages:
        for topology in topologies_of(stage) if comm._by_nccl(x.device) or comm.group in lazy else ():
            for round in range(min(topology.period(n), ROUNDS)):
                if not is_mean(topology, n, round):
                    _, sources, targets = links(topology, comm.rank, n, round)
                    comm.exchange(x, sources, targets)
        connect(stage.nested().values(), x, comm.inter if isinstance(stage, Hierarchical) else comm)


def topologies_of(stage: Stage) -> list[Topology]:
    """Return the topologies in the fields of a stage, except `Chosen`, whose peers are not known in advance."""
    held = [getattr(stage, each.name) for each in fields(stage)]
    return [each for each in held if isinstance(each, Topology) and not isinstance(each, Chosen)]
