"""The runner of a rule on gradients: its buckets are launched one by one, and landed together.

With a delay d, the buckets of the latest d backward passes are in the air. With the landed buckets, they form a ring of
d + 1 lists. Gradients are views of the buckets that landed last, and the next backward launches the same buckets.
"""

import contextlib
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import compress
from operator import attrgetter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..buckets import Bucket, Pair, is_view, real
from ..comm import Comm, Rider
from ..keeping import Joint
from ..lanes import Phases
from ..stages import Stage
from ..tensors import uploaded
from .runner import BucketFlight, RuleRunner

VERSION, GRAD = attrgetter("_version"), attrgetter("grad")
NOTHING: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
FAILED = 2  # each flag of a rank whose backward has failed; other flags are 0 or 1


@dataclass(eq=False)
class Flags:
    """Flags that tell which gradients a rank has, a byte per parameter. They are sent with a backward's last bucket."""

    mine: list[int]  # 1 if this rank has a gradient, else 0; `FAILED` if its backward has failed
    rows: Tensor | None = None  # (1, parameters) of the maximum over ranks, or (ranks, parameters)

    def beside(self, ones: Tensor, dtype: torch.dtype) -> list[Pair]:
        """Return pairs (to, from), copies of `ones` that set all flags on the device; [] if one is 0."""
        if self.mine.count(1) < len(self.mine):
            return []
        used = torch.empty_like(ones)
        self.rows = used[None, : len(self.mine)]
        return [(used.view(dtype), ones.view(dtype))]

    def begin(self, like: Tensor, comm: Comm) -> tuple[Comm, Callable[[], Any] | None]:
        """Send the flags with a bucket. Return the Comm for the bucket's stage, and a function to call after the stage.

        Over gloo the flags are a second message at the same time. NCCL sends messages one after another, so the flags
        are sent in the message of the bucket. With one rank nothing is sent, and the function is None.
        """
        if comm.size == 1:
            return comm, None
        by_nccl = comm._by_nccl(like.device)
        if self.rows is None:
            mine = torch.tensor([self.mine], dtype=torch.uint8)
            self.rows = uploaded(mine, like.device) if by_nccl else mine
        if not by_nccl:
            return comm, comm.all_reduce_later(self.rows, dist.ReduceOp.MAX).wait
        rider = Rider(self.rows, comm.size)

        def arrive() -> None:
            rider.arrive(comm)
            self.rows = rider.rows

        return rider.aboard(comm), arrive

    def of_all(self) -> list[bool]:
        """Return a bool for each parameter: whether any rank has its gradient. Call it when all buckets have landed."""
        if self.rows is None or all(self.mine):  # only a rank that misses one asks the device whether another has it
            return list(map(bool, self.mine))
        return list(map(bool, self.rows.amax(0).tolist()))


class Pass(NamedTuple):
    buckets: list[Bucket]
    air: dict[int, BucketFlight]
    flags: Flags


@dataclass(eq=False)
class GradientRunner(RuleRunner):
    """A runner of a rule on gradients. A round ends with a step that is not skipped or, with a delay, a backward."""

    flown: bool = False  # gradients have landed since the last optimizer step
    untouched: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # gradients not accumulated into, and copies
    mine: list[int] = field(default_factory=list)  # the flags of the buckets launched so far
    versions: list[int] = field(default_factory=list)  # of the views of each bucket, summed, when they landed

    def __post_init__(self) -> None:
        super().__post_init__()
        self.ids = list(map(id, self.params()))
        self.flags = Flags([1] * len(self.ids))  # of the backward whose buckets are at hand
        # Maps the id of a list of buckets to views of the first value of each gradient, in one list for each dtype.
        self._heads: dict[int, list[list[Tensor]]] = {}
        # The flags of a rank that has all gradients. They are on the device, padded to a multiple of 8 bytes.
        self.ones = torch.ones(-(-len(self.ids) // 8) * 8, dtype=torch.uint8, device=self.buckets[0].flat.device)
        self.ring = deque[Pass]()  # what lands in the next backward passes, in order; zeros before the first
        for _ in range(self.rule.delay):
            zeros = [Bucket.of(torch.zeros_like(bucket.flat), bucket.params) for bucket in self.buckets]
            self.ring.append(Pass(zeros, {}, Flags([1] * len(self.ids))))

    def launch_bucket(
        self, i: int, step: int, touched: set[Tensor], scale: Tensor | None, joint: Joint | None, whole: bool = False
    ) -> None:
        """Launch bucket `i` with the gradients in `touched` and zeros; `whole` tells that all are in it."""
        if i == 0:
            self.untouched, self.mine = [], []
        bucket, idle = self.buckets[i], list[Tensor]()
        grads = list(map(GRAD, bucket.params))
        if whole:
            self.mine += [1] * len(grads)
        for p, grad, view in zip(bucket.params, grads, bucket.views, strict=True) if not whole else ():
            self.mine.append(int(p in touched and grad is not None))
            if not (p in touched or self.ring) and is_view(grad, view):
                idle.append(view)
        flags = Flags(self.mine) if i == len(self.buckets) - 1 else None

        def load(beside: list[Pair]) -> Tensor:
            if flags and self.channel.comm.size > 1 and not self.channel.comm._by_host(bucket.flat.device):
                beside = [*beside, *flags.beside(self.ones, bucket.flat.dtype)]
            flat = bucket._load_gradients(grads, beside)
            if idle:
                self.untouched += [(view, view.clone()) for view in idle]
            return flat

        self._launch(i, step, load, flags, scale, joint)

    def launch_filled(self, i: int, step: int, joint: Joint | None, failed: bool) -> None:
        """Launch bucket `i`, filled with NaN if the backward has `failed` on this rank, else with zeros."""
        value, flag = (torch.nan, FAILED) if failed else (0.0, 0)
        flags = Flags([flag] * len(self.params())) if i == len(self.buckets) - 1 else None
        flat = self.buckets[i].flat

        def load(beside: list[Pair]) -> Tensor:
            for x, zeros in beside:
                x.copy_(zeros)
            return (flat if self.ring else torch.empty_like(flat)).fill_(value)  # gradients in the bucket stay

        self._launch(i, step, load, flags, None, joint)

    def _launch(
        self, i: int, step: int, load: Any, flags: Flags | None, scale: Tensor | None, joint: Joint | None
    ) -> None:
        state = self.states[i]
        self.flags = self.flags if flags is None else flags
        loaded, beside = None, None if self.ring else list[Pair]()
        if self.ring:  # now: gradients take no other memory while they wait for their turn, and the scale may change
            loaded = load([]) if scale is None else load([]).mul_(scale.reciprocal())
            scale = None

        def work(stage: Stage, _: Tensor, comm: Comm) -> Phases:
            flat: Tensor = load(beside) if loaded is None else loaded
            arrived = None
            if flags is not None:
                comm, arrived = flags.begin(flat, comm)
            with NOTHING if joint is None else joint.flight(state, self.guards, lambda: flat, whose=(self, i)):
                if scale is not None:
                    flat.mul_(scale.reciprocal())
                result = yield from self.phases_of(stage, flat, state, comm)
                if result is not flat:
                    flat.copy_(result)
                if scale is not None:
                    flat.mul_(scale)
            if arrived is not None:
                arrived()
            return flat

        self.launch(i, step, work, beside=beside)

    def arrive_all(self) -> bool:
        """Wait for the buckets of the backward that lands now. Return True if the host sees that some rank failed."""
        if self.ring:
            self.channel.lane.flush()  # these land later, and wait for nothing more
            self._turn()
        for i in sorted(self.air):
            self.arrive(i)
        if self.ring:
            self.round += 1
            for p in self.params():
                p.grad = None  # it is in the air
        rows = self.flags.rows
        return rows is not None and rows.is_cpu and int(rows[0, 0]) == FAILED

    def _turn(self) -> None:
        """Append the buckets of this backward to the ring, and take out the oldest buckets, which land now."""
        self.ring.append(Pass(self.buckets, self.air, self.flags))
        self.buckets, self.air, self.flags = self.ring.popleft()

    def _show_fault(self) -> None:
        """On a GPU, set the first value of each gradient to NaN if the monitor gave up before the gradient landed."""
        if (fault := self.channel.monitor.fault) is None:
            return
        if id(self.buckets) not in self._heads:  # the runner keeps its buckets
            heads = defaultdict[torch.dtype, list[Tensor]](list)
            for view in (real(view) for bucket in self.buckets for view in bucket.views if view.numel()):
                heads[view.dtype].append(view.as_strided((1,), (1,)))
            self._heads[id(self.buckets)] = list(heads.values())
        for alike in self._heads[id(self.buckets)]:
            fault.multiply_(alike)

    def land(self, scale: Tensor | None) -> list[int]:
        """Set `.grad` to a view of the bucket (times `scale`, if delayed) where any rank has one; return these ids."""
        self._show_fault()
        landed = used = self.flags.of_all()
        self.flown, self.versions = True, []
        for bucket in self.buckets:
            here, used = used[: len(bucket.params)], used[len(bucket.params) :]
            if self.untouched:
                kept = {view.data_ptr() for view, has in zip(bucket.views, here, strict=True) if not has}
                for view, held in (pair for pair in self.untouched if pair[0].data_ptr() in kept):
                    view.data.copy_(held)  # as it was: its version stays
            if self.ring and scale is not None:
                bucket.flat.mul_(scale)
            bucket.store("grad", only=None if all(here) else here)
            self.versions.append(sum(map(VERSION, bucket.views)))
        return self.ids if all(landed) else list(compress(self.ids, landed))

    def used(self, flags: Flags, i: int, state: Tensor) -> Tensor | None:
        """Return for each value of a state of bucket `i` whether any rank has its gradient; None if this rank has all.

        For a state of another shape than the bucket, return one bool: whether any rank has a gradient of the bucket.
        """
        if flags.mine.count(1) == len(flags.mine):
            return None
        bucket, start = self.buckets[i], sum(len(bucket.params) for bucket in self.buckets[:i])
        of_all = torch.tensor(flags.mine, dtype=torch.uint8) if flags.rows is None else flags.rows.amax(0)
        here = of_all[start : start + len(bucket.params)] > 0
        if state.shape != bucket.flat.shape:
            return here.any().to(state.device)
        sizes = uploaded(torch.tensor([view.numel() for view in bucket.views]), here.device)
        padding = here.new_ones(bucket.padding.numel())
        values = here.repeat_interleave(sizes, output_size=len(bucket.flat) - len(padding))
        return torch.cat([values, padding]).to(state.device)

    def flights(self) -> list[BucketFlight]:
        return [*(flight for each in self.ring for flight in each.air.values()), *super().flights()]

    def drop(self) -> None:
        for _ in range(len(self.ring) + 1):
            self._turn()
            super().drop()

    def start_over(self) -> None:
        super().drop()

    def step_ended(self) -> None:
        self.round += self.flown and not self.ring
        self.flown = False

    def landed_on(self, i: int, reached: set[Tensor]) -> bool:
        """Return True if a second backward, which came to `reached`, has added to landed gradients of bucket `i`."""
        bucket = self.buckets[i]
        pairs = [(p, view) for p, view in zip(bucket.params, bucket.views, strict=True) if is_view(p.grad, view)]
        added = sum(p in reached for p, _ in pairs)
        if added == 0 or sum(map(VERSION, bucket.views)) - self.versions[i] <= added:  # nobody has zeroed them
            return added > 0
        # Zeroed or clipped. If the gradients that this backward has not reached yet are all 0, they were zeroed.
        return any(bool(view.any()) for p, view in pairs if p not in reached)
