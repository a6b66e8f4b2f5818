"""The runner of a rule on gradients: its buckets are launched one by one, and landed together."""

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...buckets import is_view
from ...comm import Comm
from ...keeping import Joint
from ...kernels.shared.uploads import uploaded
from .runner import RuleRunner, call_unscaled

FAILED = 2  # in the place of the flags, 0 and 1


@dataclass(eq=False)
class GradientRunner(RuleRunner):
    """A runner of a rule on gradients.

    With its last bucket travels a byte for each parameter: 1 if the rank has a gradient, `FAILED` if its backward has
    failed.

    Attributes:
        flown: gradients have landed since the last optimizer step. The round ends with the step: a skipped one has no
            round of its own.
        used: the bytes, all-reduced.
        untouched: views that are gradients and were not accumulated into, each with its values before the launch.
        versions: of the flat tensors, when their gradients landed.
        factor: of the gradients at launch: not 1 where the mean is over some ranks only.
    """

    flown: bool = False
    used: Tensor | None = None
    untouched: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    factor: float = 1.0

    def launch_bucket(self, i: int, step: int, touched: set[Tensor], scale: Tensor | None, joint: Joint | None) -> None:
        """Launch bucket `i` with the gradients of this rank; a missing gradient counts as zero."""
        if i == 0:
            self.untouched = []
        bucket, factor = self.buckets[i], self.factor
        grads = [p.grad for p in bucket.params]
        flags = [int(has_gradient(p, touched)) for p in self.params()] if i == len(self.buckets) - 1 else None
        idle = [v for p, v in zip(bucket.params, bucket.views, strict=True) if p not in touched and is_view(p.grad, v)]

        def load() -> Tensor:
            flat = bucket._load_gradients(grads)
            if idle:
                self.untouched += [(view, view.clone()) for view in idle]
            return flat if factor == 1 else flat.mul_(factor)

        self._launch(i, step, load, flags, scale, joint)

    def launch_filled(self, i: int, step: int, joint: Joint | None, failed: bool) -> None:
        """Launch NaN in place of bucket `i` if the backward has failed here, else zeros. `.grad` stays as it is."""
        value, flag = (torch.nan, FAILED) if failed else (0.0, 0)
        flags = [flag] * len(self.params()) if i == len(self.buckets) - 1 else None
        flat = self.buckets[i].flat
        self._launch(i, step, lambda: torch.full_like(flat, value), flags, None, joint)

    def _launch(
        self, i: int, step: int, load: Any, flags: list[int] | None, scale: Tensor | None, joint: Joint | None
    ) -> None:
        stage, state = self.stage(i), self.states[i]

        def work(_: Tensor, comm: Comm) -> Tensor:
            flat: Tensor = load()
            used, later = begin_flags(flags, flat, comm)
            self.used = used if flags is not None else self.used
            if joint is None:
                call_unscaled(stage, flat, state, comm, scale)
            else:
                with joint.flight(state, self.guards, lambda: flat):
                    call_unscaled(stage, flat, state, comm, scale)
            if later is not None:
                later.wait()
            return flat

        self.launch(i, step, work)

    def arrive_all(self) -> bool:
        """Wait for all buckets. Return True if the backward failed on some rank and the flags are on the host."""
        for i in range(len(self.buckets)):
            self.arrive(i)
        return self.used is not None and self.used.is_cpu and int(self.used[0]) == FAILED

    def land(self, touched: set[Tensor]) -> None:
        """Make the gradients that some rank has views of the buckets."""
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
        """End the round, if gradients have landed in this step."""
        self.round += self.flown
        self.flown = False

    def landed_on(self, i: int, reached: set[Tensor]) -> bool:
        """Return True if a second backward has added gradients of bucket `i` to those that the first one brought there.

        It has accumulated gradients of the parameters in `reached` so far.
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
    """Return True if this rank has a gradient of `p` to average."""
    return p in touched and p.grad is not None


def begin_flags(flags: list[int] | None, like: Tensor, comm: Comm) -> tuple[Tensor | None, Any]:
    """Begin an all-reduce of the flags by their maximum. Return them as bytes, and the work to wait for."""
    if flags is None or comm.size == 1:
        return None, None
    if flags.count(1) == len(flags):  # nearly always; and then nothing is copied to the device
        used = torch.ones(len(flags), dtype=torch.uint8, device=like.device)
    else:
        used = uploaded(torch.tensor(flags, dtype=torch.uint8), like.device)
    return used, comm.all_reduce_later(used, dist.ReduceOp.MAX)
