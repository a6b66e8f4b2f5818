"""The computation of a training step on one rank: its time, and the time at which each gradient is ready."""

import statistics
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..arguments import check_fields, checked
from ..lanes import between, moment

WARM_UP, REPEATS = 2, 5


@dataclass(frozen=True)
class Compute:
    """A step without communication, in seconds.

    Attributes:
        forward, backward, optimizer: its parts; forward is everything before backward.
        ready: of each trainable parameter, in the model's order, the share of backward after which its gradient is
            ready. Empty: backward goes through the parameters from the last to the first, and each takes time in
            proportion to its size.
    """

    forward: float
    backward: float
    optimizer: float = 0.0
    ready: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self)
        if min(self.forward, self.backward, self.optimizer) < 0 or not all(0 <= r <= 1 for r in self.ready):
            raise ValueError(f"seconds are 0 or more and shares of backward from 0 to 1, unlike those of {self!r}")

    @property
    def seconds(self) -> float:
        """Return the seconds of the whole step."""
        return self.forward + self.backward + self.optimizer

    @checked
    def gradients(self, params: Sequence[Tensor]) -> dict[Tensor, float]:
        """Return the time at which each gradient is ready, in seconds since backward began."""
        if self.ready and len(self.ready) != len(params):
            raise ValueError(f"this Compute tells of {len(self.ready)} gradients, and the model has {len(params)}")
        if self.ready:
            return {p: self.backward * share for p, share in zip(params, self.ready, strict=True)}
        total, done, found = sum(p.numel() for p in params), 0, {}
        for p in reversed(params):
            done += p.numel()
            found[p] = self.backward * done / max(1, total)
        return found


def as_compute(step: "float | Compute | Callable[[], Any] | None", model: nn.Module) -> Compute:
    """Return the computation of a step: its parts, or its seconds, of which forward takes a third; or measure it.

    Raises:
        TypeError, ValueError: it is none of these.
    """
    if step is None:
        return Compute(0.0, 0.0)
    if isinstance(step, Compute):
        return step
    if callable(step):
        return measured(step, model)
    if isinstance(step, bool) or not isinstance(step, int | float):
        raise TypeError(
            "step_seconds is the seconds of a step without communication, a bk.tune.Compute, or a function that makes "
            f"one such step; not {step!r}"
        )
    return Compute(step / 3, 2 * step / 3)


def measured(step: Callable[[], Any], model: nn.Module) -> Compute:
    """Make some steps, time them, and return the median of each part.

    `step()` is one step of training without communication: forward, backward, and the optimizer's step.

    Raises:
        ValueError: it called no forward or no backward of the model.
    """
    params = [p for p in model.parameters() if p.requires_grad]
    with closing(Watch(model, params)) as watch:
        for _ in range(WARM_UP):
            step()
        timings = [watch.timed(step) for _ in range(REPEATS)]
    ready = tuple(map(statistics.median, zip(*(each.ready for each in timings), strict=True)))
    forward, backward, optimizer = (
        statistics.median(getattr(each, part) for each in timings) for part in ("forward", "backward", "optimizer")
    )
    return Compute(forward, backward, optimizer, ready)


class Watch:
    """Hooks that record when forward has ended and when each gradient is ready; `close()` removes them."""

    def __init__(self, model: nn.Module, params: Sequence[Tensor]) -> None:
        self.params, self.device = params, params[0].device if params else torch.device("cpu")
        self.forward_ended: Any = None
        self.arrivals: dict[Tensor, Any] = {}
        self._hooks: list[Any] = [model.register_forward_hook(self._forward)]
        self._hooks += [p.register_post_accumulate_grad_hook(self._arrived) for p in params]

    def timed(self, step: Callable[[], Any]) -> Compute:
        """Make one step and return its times."""
        self.forward_ended, self.arrivals = None, {}
        began = moment(self.device)
        step()
        ended = moment(self.device)
        if self.forward_ended is None or not self.arrivals:
            raise ValueError("step_seconds=… must call the model and its backward: one step of training, alone")
        spans = [between(self.forward_ended, at) for at in self.arrivals.values()]
        backward = max(1e-9, *spans)
        last = list(self.arrivals.values())[spans.index(max(spans))]
        shares = dict(zip(self.arrivals, (max(0.0, span / backward) for span in spans), strict=True))
        forward, rest = between(began, self.forward_ended), between(last, ended)
        return Compute(forward, backward, rest, tuple(shares.get(p, 1.0) for p in self.params))

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    def _forward(self, *_: Any) -> None:
        self.forward_ended = moment(self.device)

    def _arrived(self, p: Tensor) -> None:
        self.arrivals[p] = moment(self.device)
