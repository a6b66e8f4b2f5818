"""Parallel connections: messages are divided into shares, for networks that limit the bandwidth of one TCP flow.

Each flow has its own process group, and so its own connections. Its share s_i of a message follows the bandwidth of
the flow: with T_i the time that flow i took, summed over messages and ranks since the last agreement,

    s_i ← s_i / T_i,  scaled so that Σ s_i = 1

The fixed point is that all flows end at the same time. All ranks agree on the T_i, and so on the shares, in one small
all-reduce per `PERIOD` messages.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..lanes import CpuLane

SMALLEST = 1 << 18  # bytes of the smallest message that is divided
PERIOD = 16  # messages between two agreements
LEAST = 1 / 8  # of an equal share: the smallest share of a flow, so that its recovery is measured
LINE = 64  # shares are multiples of this many values, so that they are aligned to cache lines

Begin = Callable[[Tensor, Any], Any]
"""A function that begins to send or receive a tensor in a group, and returns the work to wait for."""


class Flows:
    """Process groups of the same ranks, over which messages are divided.

    Args:
        groups: one for each flow; the first also carries the messages that are too small to divide.
    """

    def __init__(self, groups: Sequence[Any]) -> None:
        self.groups: list[Any] = list(groups)
        self.shares: list[float] = [1 / len(self.groups)] * len(self.groups)
        self.seconds: list[float] = [0.0] * len(self.groups)  # since the last agreement
        self._lanes = [CpuLane("baguakit flow") for _ in self.groups[1:]]
        self._settled = 0

    def parts(self, n: int, nbytes: int) -> list[slice]:
        """Return the part of `n` values for each flow, equal on all ranks; one part for a small message."""
        if nbytes < SMALLEST:
            return [slice(0, n)]
        ends, total = [], 0.0
        for share in self.shares:
            total += share
            ends.append(min(n, round(total * n / LINE) * LINE))
        ends[-1] = n
        return [slice(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]

    def begin(self, x: Tensor, begin: Begin) -> "Shares":
        """Begin to send or receive a flat tensor, each part over its flow."""
        if x.is_cuda:
            raise ValueError(
                "flows divide messages over gloo; for NCCL, set the number of connections with baguakit.net"
            )
        parts = self.parts(x.numel(), x.nbytes)
        works = [
            (i, begin(x[s], group))
            for i, (s, group) in enumerate(zip(parts, self.groups, strict=False))
            if x[s].numel()
        ]
        return Shares(self, works)

    def all_gather(self, out: Tensor, x: Tensor, gather: Callable[..., Any]) -> None:
        """Gather the flat `x` of all ranks into the rows of `out`."""
        rows, parts = out.view(self.groups[0].size(), x.numel()), self.parts(x.numel(), x.nbytes)
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
        """Sum the rows of `x` over the ranks, and write this rank's row to the flat `out`."""
        rows, parts = x.view(self.groups[0].size(), out.numel()), self.parts(out.numel(), out.nbytes)
        works = [
            (i, scatter(out[s], rows[:, s].reshape(-1), group=self.groups[i], async_op=True))
            for i, s in enumerate(parts)
            if s.stop > s.start
        ]
        Shares(self, works).wait()

    def settle(self, before: Callable[[], None]) -> None:
        """Agree on new shares in every `PERIOD`-th call, after `before()`. Collective: all call it equally often."""
        self._settled += 1
        if self._settled % PERIOD:
            return
        before()
        taken = torch.tensor(self.seconds, dtype=torch.float64)
        dist.all_reduce(taken, group=self.groups[0])
        self.seconds = [0.0] * len(self.groups)
        if (taken > 0).all():  # otherwise no message was divided
            self.shares = reweighed(self.shares, taken.tolist())

    def wait_all(self, works: Sequence[tuple[int, Any]], began: float) -> None:
        """Wait for the work of all flows at the same time, and record the time of each."""

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
    """The work of a divided message."""

    def __init__(self, flows: Flows, works: Sequence[tuple[int, Any]]) -> None:
        self._flows, self._works, self._began = flows, works, time.perf_counter()

    def wait(self) -> None:
        """Wait for all shares."""
        works, self._works = self._works, []
        self._flows.wait_all(works, self._began)


def reweighed(shares: Sequence[float], seconds: Sequence[float]) -> list[float]:
    """Return s_i / T_i, at least `LEAST` of an equal share, scaled to the sum 1."""
    rates = [share / taken for share, taken in zip(shares, seconds, strict=True)]
    even, total = 1 / len(rates), sum(rates)
    floored = [max(rate / total, LEAST * even) for rate in rates]
    return [share / sum(floored) for share in floored]
