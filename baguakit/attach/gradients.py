"""A rule on gradients: its buckets, launched one by one and landed together."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..buckets import is_view
from ..comm import Comm
from ..keeping import Joint
from ..kernels.shared.uploads import uploaded
from .errands import Errand, begin
from .routes import Route, through

FAILED = 2  # in the place of the flags, 0 and 1


@dataclass(eq=False)
class GradientRoute(Route):
    """A rule on gradients. Beside its last bucket travels a byte for each parameter: whether some rank has a gradient,
    or its backward has failed.

    Attributes:
        flown: gradients have landed since the last optimizer step. The round ends with the step: a skipped one has no
            round of its own.
        used: the bytes, all-reduced.
        untouched: views that are gradients without being touched, and what they held.
        versions: of the flat tensors, when their gradients landed.
        factor: of the gradients at launch: not 1 where the mean is over fewer ranks than there are.
    """

    flown: bool = False
    used: Tensor | None = None
    untouched: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    factor: float = 1.0

    def launch_bucket(self, i: int, step: int, touched: set[Tensor], scale: Tensor | None, joint: Joint | None) -> None:
        """Launch bucket `i` with the gradients there are; one that is missing counts as zero."""
        if i == 0:
            self.untouched = []
        bucket, factor = self.buckets[i], self.factor
        flags = [int(has_gradient(p, touched)) for p in self.params()] if i == len(self.buckets) - 1 else None
        idle = [v for p, v in zip(bucket.params, bucket.views, strict=True) if p not in touched and is_view(p.grad, v)]

        def load() -> Tensor:
            flat = bucket.load("grad")
            self.untouched += [(view, view.clone()) for view in idle]
            return flat if factor == 1 else flat.mul_(factor)

        self._launch(i, step, load, flags, scale, joint)

    def launch_failed(self, i: int, step: int, joint: Joint | None) -> None:
        """Launch NaN in place of bucket `i`, which a failed backward has not reached: other ranks wait for it."""
        flags = [FAILED] * len(self.params()) if i == len(self.buckets) - 1 else None
        flat = self.buckets[i].flat
        self._launch(i, step, lambda: torch.full_like(flat, torch.nan), flags, None, joint)

    def launch_zeros(self, i: int, step: int, joint: Joint | None) -> None:
        """Launch zeros in place of bucket `i`: this rank has no batch, and others have. `.grad` stays as it is."""
        flags = [0] * len(self.params()) if i == len(self.buckets) - 1 else None
        flat = self.buckets[i].flat
        self._launch(i, step, lambda: torch.zeros_like(flat), flags, None, joint)

    def _launch(
        self,
        i: int,
        step: int,
        load: Any,
        flags: list[int] | None,
        scale: Tensor | None,
        joint: Joint | None,
    ) -> None:
        stage, state = self.stage(i), self.states[i]

        def work(_: Tensor, comm: Comm) -> Tensor:
            flat: Tensor = load()
            used, later = begin_flags(flags, flat, comm)
            self.used = used if flags is not None else self.used
            with contextlib.nullcontext() if joint is None else joint.flight(state, self.guards, lambda: flat):
                through(stage, flat, state, comm, scale)
            if later is not None:
                later.wait()
            return flat

        self.launch(i, step, work)

    def arrive_all(self) -> bool:
        """Wait for all buckets. Return whether the backward failed on some rank, where the host can tell at once."""
        for i in range(len(self.buckets)):
            self.arrive(i)
        return self.used is not None and self.used.is_cpu and int(self.used[0]) == FAILED

    def land(self, touched: set[Tensor]) -> None:
        """Let the gradients that some rank has be views of the buckets."""
        mine = [has_gradient(p, touched) for p in self.params()]
        # Only a rank that misses a gradient asks the device whether another has one.
        used = mine if all(mine) or self.used is None else [bool(u) for u in self.used.tolist()]
        for bucket in self.buckets:
            here, used = used[: len(bucket.params)], used[len(bucket.params) :]
            kept = {view.data_ptr() for view, here_used in zip(bucket.views, here, strict=True) if not here_used}
            for view, held in self.untouched:
                if view.data_ptr() in kept:
                    view.copy_(held)
            bucket.store("grad", only=None if all(here) else here)
        self.flown, self.versions = True, [bucket.flat._version for bucket in self.buckets]

    def step_ended(self) -> None:
        """The optimizer has stepped with what has landed."""
        self.round += self.flown
        self.flown = False

    def landed_on(self, i: int, reached: set[Tensor]) -> bool:
        """Return whether a second backward has added gradients of bucket `i` to what the first one brought there.

        Args:
            reached: the parameters whose gradients this backward has accumulated so far.
        """
        bucket = self.buckets[i]
        pairs = list(zip(bucket.params, bucket.views, strict=True))
        added = [p for p, view in pairs if p in reached and is_view(p.grad, view)]
        if not added:
            return False
        if bucket.flat._version - self.versions[i] <= len(added):  # nobody has zeroed them
            return True
        # Zeroed, or clipped: the gradients that this backward has not reached yet tell.
        rest = [view for p, view in pairs if p not in reached and is_view(p.grad, view)]
        return bool(rest) and any(bool(view.any()) for view in rest)


def has_gradient(p: Tensor, touched: set[Tensor]) -> bool:
    """Return whether this rank has a gradient for `p` to average."""
    return p in touched and p.grad is not None


def begin_flags(flags: list[int] | None, like: Tensor, comm: Comm) -> tuple[Tensor | None, Any]:
    """Begin to find the largest of each flag over all ranks. Return them as bytes, and the work to wait for."""
    if flags is None or comm.size == 1:
        return None, None
    if all(flag == 1 for flag in flags):  # nearly always; and then nothing is copied to the device
        used = torch.ones(len(flags), dtype=torch.uint8, device=like.device)
    else:
        used = uploaded(torch.tensor(flags, dtype=torch.uint8), like.device)
    return used, comm.all_reduce_later(used, dist.ReduceOp.MAX)


def decide(joint: Joint, routes: Sequence[Route], alike: bool = True) -> Errand:
    """Begin to decide what the flights of a backward keep: on the lane, behind them.

    Ranks ask each other unless their results are `alike` wherever stages agree.
    """
    agree = not (alike and all(route.rule.stage.agrees for route in routes))

    def settle(comm: Comm) -> None:
        for route in routes:
            if isinstance(route, GradientRoute) and route.used is not None:
                joint.note(route.used[0] != FAILED)  # the backward has failed on no rank
        joint.settle((lambda ok: everywhere(ok, comm)) if agree else None)

    return begin("the decision on what to keep", settle, routes[0].track, routes[0].monitor)


def everywhere(ok: Tensor, comm: Comm) -> Tensor:
    """Return whether the bool `ok` is true on all ranks."""
    return comm.all_reduce(ok.to(torch.uint8), dist.ReduceOp.MIN).bool()
