"""Asynchronous averaging in your own loop: a stage runs while the caller continues."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..arguments import instance, message
from ..buckets import Bucket
from ..comm import Comm, check_comm
from ..kernels import operators as mixing_ops
from ..lanes import Flight, lane_of
from ..topology.chosen import as_chosen
from .compressed import check_averageable


@dataclass(eq=False)
class LaunchedFlight:
    """A running stage and its tensor; `launch` returns it."""

    flight: Flight
    shape: torch.Size
    before: Tensor | None  # what was launched; None once it has landed
    held: Any  # what the lane works on: kept, since a CUDA lane uses it after the host has let go of it

    def done(self) -> bool:
        """Return whether the result has arrived, without waiting."""
        return self.flight.done()

    def result(self) -> Tensor:
        """Wait for the result and return it: the same tensor in every call. Do not write to it before `land_`.

        If the stage raised an error, raise that error.
        """
        found: Any = self.flight.result()
        if not isinstance(found, Tensor) or found.numel() != self.shape.numel():
            shown = f"a tensor {tuple(found.shape)}" if isinstance(found, Tensor) else repr(found)
            raise TypeError(f"the stage returned {shown}; it returns what becomes of x, {self.shape.numel()} values")
        return found.view(self.shape)

    @torch.no_grad()
    def land_(self, x: Tensor) -> Tensor:
        """Wait for the result and add the stage's change to `x`. Changes of `x` during the flight are kept.

        Values of `x` that equal the launched value become the result. All other values become
        x + (result − launched value). `x` may be another tensor than the launched tensor. Call this once.

        Raises:
            TypeError: `x` is not a dense floating tensor.
            ValueError: `x` has another shape or device than was launched, or is `result()`; or the flight has landed.
        """
        check_averageable(x)
        if self.before is None:
            raise ValueError("this flight has landed, and a second time would count twice; take flight.result()")
        if x.shape != self.shape or x.device != self.before.device:
            raise ValueError(
                f"a tensor {tuple(self.shape)} on {self.before.device} was launched, and x, on which it lands, is one "
                f"of the same shape and device, not {tuple(x.shape)} on {x.device}; take flight.result()"
            )
        result = self.result().to(x.dtype)
        if x.numel() and x.data_ptr() == result.data_ptr():
            raise ValueError("this tensor is the result of the flight itself; land it on the one that is trained on")
        mixing_ops.land_(x, result, self.before.view(self.shape).to(x.dtype), None)
        self.before = self.held = None
        return x


def launch(
    stage: Callable[[Tensor, dict[str, Any], Comm], Tensor], x: Tensor, comm: Comm, state: dict[str, Any] | None = None
) -> LaunchedFlight:
    """Start `stage` on a copy of `x`, on a lane beside the training loop, and return its flight.

        flight = launch(Mean(), x, comm)
        ...                                  # x may be trained on meanwhile
        if flight.done():
            flight.land_(x)

    All ranks of the group launch the same stages in the same order; the flights of a group run one after another. Do
    not use the group for anything else during a flight.

    Args:
        stage: the stage, such as `stages.Mean()`.
        x: a dense floating tensor (else a TypeError). It is only read.
        comm: the group, at the round to use: `comm.at(round)`.
        state: the state of the stage, as its `init(Bucket.of(x), comm)` returned it; None: a new state.
    """
    check_averageable(x)
    check_comm(comm)
    if not callable(stage) or not hasattr(stage, "init") or isinstance(stage, type):
        raise TypeError(message("stage", "a stage such as Mean()", stage))
    if state is not None:
        instance("state", state, dict, "a dict, as stage.init returned it")
    flat = x.detach().reshape(-1).clone()
    before = flat.clone()
    remembered = stage.init(Bucket.of(flat), comm) if state is None else state
    lane = lane_of(comm.group, x.device, comm._by_host(x.device))
    lane.uses((flat, remembered))
    flying = as_chosen(stage)
    flight = lane.run(lambda: flying(flat, remembered, comm))
    return LaunchedFlight(flight, x.shape, before, (flat, remembered))
