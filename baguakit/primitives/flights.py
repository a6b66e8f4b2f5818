"""A stage in the air while the caller goes on: asynchronous averaging by hand."""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ..buckets import Bucket
from ..comm import Comm
from ..kernels import mixing_ops
from ..lanes import Flight, lane_of
from .flat import check_averageable


class Stage(Protocol):
    """What `launch` needs of a stage (see `baguakit.stages`)."""

    def init(self, bucket: Bucket, comm: Comm) -> dict[str, Any]: ...

    def __call__(self, x: Tensor, state: dict[str, Any], comm: Comm) -> Tensor: ...


@dataclass(frozen=True, eq=False)
class LaunchedFlight:
    """A tensor on its way through a stage; made by `launch`."""

    flight: Flight
    before: Tensor  # what was launched
    version: int  # of the tensor that was launched

    def done(self) -> bool:
        """Whether the result has arrived; never waits."""
        return self.flight.done()

    def land_(self, x: Tensor) -> Tensor:
        """Wait for the result and bring it into `x`, keeping what changed there meanwhile.

        If `x` has not been written to since it was launched, x ← result; else x ← x + (result − what was launched).
        """
        result = self.flight.result().view(x.shape)
        return land_(x, result, None if x._version == self.version else self.before.view(x.shape))


def land_(x: Tensor, result: Tensor, before: Tensor | None) -> Tensor:
    """x ← result; or, given what it was `before`, x ← x + (result − before) where `x` has moved since."""
    with torch.no_grad():
        if before is None:
            return x.copy_(result)
        mixing_ops.land_(x, result, before)
        return x


def launch(stage: Stage, x: Tensor, comm: Comm, state: dict[str, Any] | None = None) -> LaunchedFlight:
    """Start `stage` on a copy of `x`, on a lane beside the training loop, and return its flight.

        flight = launch(Mean(), x, comm)
        ...                                  # x may be trained on meanwhile
        if flight.done():
            flight.land_(x)

    All ranks of the group launch the same stages in the same order; a group's flights fly one after another. Do not
    use the group for anything else while one is in the air.

    Args:
        stage: what to do, such as `stages.Mean()`.
        x: a floating, contiguous tensor. It is only read.
        comm: the group, at the round to play.
        state: what the stage remembers from flight to flight, as `stage.init(Bucket.of(x), comm)` returned it; made
            anew for this one flight if None.

    Returns:
        A `LaunchedFlight`: `done()`, `land_(x)`, which raises what the stage raised.

    Raises:
        TypeError: `x` is not floating, or is sparse.
    """
    check_averageable(x)
    flat = x.detach().reshape(-1).clone()
    before = flat.clone()
    remembered = stage.init(Bucket.of(flat), comm) if state is None else state
    flight = lane_of(comm.group, x.device).run(lambda: stage(flat, remembered, comm))
    return LaunchedFlight(flight, before, x._version)
