"""The computation of a training step on one rank: its time, and the time at which each gradient is ready.

The speed of this rank's machine is that of copies, compressors and lanes, and the slowdown by a second thread. Ranks of
one machine share its cores and its memory, and in training they do the same work at the same time. So all ranks begin
together and repeat the work until each rank has had turns on the cores. The result is the mean, since the median would
come from repetitions during which no other rank had a turn.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..arguments import check_fields, checked
from ..compressors import Compressor
from ..costs import Codec
from ..lanes import between, lane, moment

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
    """Return the computation of a step, from its parts, from its seconds (a third for forward), or by measuring it.

    Raises:
        TypeError: `step` is of another type.
        ValueError: the seconds are negative, or a measured step makes no forward or no backward.
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
    device = params[0].device if params else torch.device("cpu")
    forwards: list[Any] = []  # moments at which forward ended
    arrivals: dict[Tensor, Any] = {}  # and those at which gradients were ready
    hooks: list[Any] = [model.register_forward_hook(lambda *_: forwards.append(moment(device)))]
    hooks += [p.register_post_accumulate_grad_hook(lambda p: arrivals.update({p: moment(device)})) for p in params]

    def timed_step() -> Compute:
        forwards.clear()
        arrivals.clear()
        began = moment(device)
        step()
        ended = moment(device)
        if not forwards or not arrivals:
            raise ValueError("step_seconds=… must call the model and its backward: one step of training, alone")
        spans = {p: between(forwards[-1], at) for p, at in arrivals.items()}
        last = max(spans, key=spans.__getitem__)
        backward = max(1e-9, spans[last])
        shares = tuple(max(0.0, spans.get(p, backward) / backward) for p in params)
        return Compute(between(began, forwards[-1]), backward, between(arrivals[last], ended), shares)

    try:
        for _ in range(WARM_UP):
            step()
        timings = [timed_step() for _ in range(REPEATS)]
    finally:
        for hook in hooks:
            hook.remove()
    ready = tuple(map(statistics.median, zip(*(each.ready for each in timings), strict=True)))
    forward, backward, optimizer = (
        statistics.median(getattr(each, part) for each in timings) for part in ("forward", "backward", "optimizer")
    )
    return Compute(forward, backward, optimizer, ready)


VALUES, ROWS = 1 << 22, 4  # 16 MiB of fp32: more than the cache of a core
LEAST, WINDOW = 3, 0.1  # the least number of repetitions, and the least seconds of them
SIDE, PRODUCTS = 192, 16  # of matrices that fit in the cache; products long enough to be timed

Work = Callable[[], object]
Meet = Callable[[], object]
"""A function that waits for all ranks."""


def now(device: torch.device) -> float:
    """Return the time in seconds, after the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def timed(work: Work, device: torch.device, meet: Meet) -> float:
    """Return the seconds of `work()` with all ranks at it: the mean over a window. Collective."""
    return watched(work, device, meet)[0]


def watched(work: Work, device: torch.device, meet: Meet) -> tuple[float, float]:
    """Return the seconds of `work()` as `timed` does, and the seconds for which this thread had a core."""
    work()
    meet()
    cpu, began, times = time.thread_time(), now(device), 0
    while times < LEAST or now(device) - began < WINDOW:
        work()
        times += 1
    return (now(device) - began) / times, (time.thread_time() - cpu) / times


def copy_seconds(device: torch.device, meet: Meet) -> float:
    """Return the seconds to copy a byte: one read and one write."""
    x = torch.ones(VALUES, dtype=torch.float32, device=device)
    y = torch.empty_like(x)
    return timed(lambda: y.copy_(x), device, meet) / x.nbytes


def launch_seconds(device: torch.device, meet: Meet) -> float:
    """Return the seconds to put work on a lane and to get its result."""
    with closing(lane(device, "baguakit probe")) as beside:
        return timed(lambda: beside.run(lambda: None).result(), device, meet)


def codec(compressor: Compressor, device: torch.device, meet: Meet) -> Codec:
    """Return the speed of a compressor, after a warm-up."""
    rows = ROWS if compressor.dense else 1
    x = torch.randn(rows, VALUES // rows, dtype=torch.float32, device=device)
    n = x.shape[1]
    compressor.warm_up(device, x.dtype, x.numel())
    packed, out = compressor.compress(x), torch.empty_like(x)
    total = torch.zeros(n, dtype=torch.float32, device=device)

    def average() -> Tensor:
        return compressor.reduce(packed, n) if compressor.dense else compressor.add_(total, packed, [1.0])

    works: Sequence[Work] = (lambda: compressor.compress(x), lambda: compressor.decompress(packed, n, out=out), average)
    return Codec(repr(compressor), *(timed(work, device, meet) / x.numel() for work in works))


def crowding(device: torch.device, meet: Meet) -> tuple[float, float]:
    """Return κ = T₂/T₁ − 1, from 0 to 1, and the seconds that pass in a second of processor time.

    T₁ is the time of matrix products on all ranks at once, T₂ their time while each rank computes
    the same products on its lane too.
    """
    x = torch.randn(SIDE, SIDE, dtype=torch.float32, device=device)

    def products() -> None:
        for _ in range(PRODUCTS):
            x @ x

    with closing(lane(device, "baguakit probe")) as beside:

        def both() -> None:
            flight = beside.run(products)
            products()
            flight.result()

        one, had = watched(products, device, meet)
        two = timed(both, device, meet)
    return min(1.0, max(0.0, two / one - 1)), max(1.0, one / max(1e-9, had))
