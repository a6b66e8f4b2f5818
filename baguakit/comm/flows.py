"""Several connections side by side: a message travels in shares, for networks that cap what one TCP flow may carry.

Every share has a process group of its own, and so its own connections. Shares follow what the flows turn out to carry:
for T_i the time that flow i took for its share s_i, summed over messages and ranks since the last agreement,

    s_i ← s_i / T_i,  scaled so that Σ s_i = 1

which stays where it is once all flows end together. All ranks agree on the T_i, and so on the shares, in one small
all-reduce after every so many messages.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..lanes import CpuLane

SMALLEST = 1 << 18  # bytes of a message that is worth dividing
PERIOD = 16  # divided messages between two agreements
LEAST = 1 / 8  # of an even share: what a flow carries at least, so that its recovery is seen
LINE = 64  # shares are multiples of so many values, so that they begin on whole lines of memory

Begin = Callable[[Tensor, Any], Any]
"""Begins to move a piece over a group, and returns the work to wait for."""


class Flows:
    """Process groups of the same ranks, over which messages are divided.

    Args:
        groups: one for each flow; the first also carries what is too small to be divided.
    """

    def __init__(self, groups: Sequence[Any]) -> None:
        self.groups = list(groups)
        self.shares = [1 / len(self.groups)] * len(self.groups)
        self.seconds = [0.0] * len(self.groups)  # since the last agreement
        self._lanes = [CpuLane("baguakit flow") for _ in self.groups[1:]]
        self._settled = 0

    def cut(self, n: int, nbytes: int) -> list[slice]:
        """The part of `n` values that each flow carries: alike on all ranks. Only the first if the message is small."""
        if nbytes < SMALLEST:
            return [slice(0, n)]
        ends, total = [], 0.0
        for share in self.shares:
            total += share
            ends.append(min(n, round(total * n / LINE) * LINE))
        ends[-1] = n
        return [slice(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]

    def begin(self, x: Tensor, begin: Begin) -> "Shares":
        """Begin to move a flat tensor, each part over its flow."""
        if x.is_cuda:
            raise ValueError(
                "flows divide what travels over gloo; NCCL has connections of its own: see baguakit.net for how many"
            )
        parts = self.cut(x.numel(), x.nbytes)
        works = [
            (i, begin(x[s], group))
            for i, (s, group) in enumerate(zip(parts, self.groups, strict=False))
            if x[s].numel()
        ]
        return Shares(self, works)

    def all_gather(self, out: Tensor, x: Tensor, gather: Callable[..., Any]) -> None:
        """Gather the flat `x` of all ranks into the rows of `out`."""
        rows, parts = out.view(self.groups[0].size(), x.numel()), self.cut(x.numel(), x.nbytes)
        landed = [x.new_empty(len(rows), s.stop - s.start) for s in parts]
        works = [
            (i, gather(landed[i].view(-1), x[s], group=self.groups[i], async_op=True))
            for i, s in enumerate(parts)
            if landed[i].numel()
        ]
        Shares(self, works).wait()
        for s, piece in zip(parts, landed, strict=True):
            rows[:, s] = piece

    def reduce_scatter(self, out: Tensor, x: Tensor, scatter: Callable[..., Any]) -> None:
        """Sum the rows of `x` over the ranks, each rank's own into the flat `out`."""
        rows, parts = x.view(self.groups[0].size(), out.numel()), self.cut(out.numel(), out.nbytes)
        works = [
            (i, scatter(out[s], rows[:, s].reshape(-1), group=self.groups[i], async_op=True))
            for i, s in enumerate(parts)
            if s.stop > s.start
        ]
        Shares(self, works).wait()

    def settle(self) -> None:
        """Every so many messages, let all ranks agree on new shares. Collective: every rank calls it as often."""
        self._settled += 1
        if self._settled % PERIOD:
            return
        taken = torch.tensor(self.seconds, dtype=torch.float64)
        dist.all_reduce(taken, group=self.groups[0])
        self.seconds = [0.0] * len(self.groups)
        if (taken > 0).all():  # otherwise nothing was divided
            self.shares = reweighed(self.shares, taken.tolist())

    def wait_all(self, works: Sequence[tuple[int, Any]], began: float) -> None:
        """Wait for the work of each flow, all of them at once, and note how long each took."""

        def wait(flow: int, work: Any) -> None:
            work.wait()
            if len(works) > 1:
                self.seconds[flow] += time.perf_counter() - began

        others = [self._lanes[flow - 1].run(lambda f=flow, w=work: wait(f, w)) for flow, work in works[1:]]  # type: ignore[misc]
        for flow, work in works[:1]:
            wait(flow, work)
        for other in others:
            other.result()

    def close(self) -> None:
        """End the threads."""
        for lane in self._lanes:
            lane.close(wait=False)


class Shares:
    """A divided message under way."""

    def __init__(self, flows: Flows, works: Sequence[tuple[int, Any]]) -> None:
        self._flows, self._works, self._began = flows, works, time.perf_counter()

    def wait(self) -> None:
        """Wait until all of it has arrived."""
        works, self._works = self._works, []
        self._flows.wait_all(works, self._began)


def reweighed(shares: Sequence[float], seconds: Sequence[float]) -> list[float]:
    """s_i ← s_i / T_i, none less than `LEAST` of an even share, scaled so that their sum is 1."""
    rates = [share / taken for share, taken in zip(shares, seconds, strict=True)]
    even, total = 1 / len(rates), sum(rates)
    floored = [max(rate / total, LEAST * even) for rate in rates]
    return [share / sum(floored) for share in floored]
