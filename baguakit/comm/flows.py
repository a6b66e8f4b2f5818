"""Parallel connections: messages are divided into shares, for networks that limit the bandwidth of one TCP flow.

Each flow has its own process group, and so its own connections. Its share s_i of a message follows the bandwidth of
the flow: with T_i the time that flow i took, summed over messages and ranks since the last agreement,

    s_i ← s_i / T_i,  scaled so that Σ s_i = 1

The fixed point is that all flows end at the same time. All ranks agree on the T_i, and so on the shares, in one small
all-reduce per `PERIOD` messages.
"""

import time
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..lanes import CpuLane

SMALLEST = 1 << 18  # bytes of the smallest message that is divided
PERIOD = 16  # messages between two agreements
LEAST = 1 / 8  # of an equal share: the smallest share of a flow, so that its recovery is measured
LINE = 64  # shares are multiples of this many values, so that they are aligned to cache lines


class Flows:
    """Process groups of the same ranks, over which messages are divided.

    Args:
        groups: one for each flow; the first also carries the messages that are too small to divide.
    """

    def __init__(self, groups: Sequence[Any]) -> None:
        self.groups: list[Any] = list(groups)
        self.shares: list[float] = [1 / len(self.groups)] * len(self.groups)
        self.seconds: list[float] = [0.0] * len(self.groups)  # since the last agreement
        self.lanes = [CpuLane("baguakit flow") for _ in self.groups[1:]]
        self._settled = 0

    def parts(self, n: int, nbytes: int) -> list[slice]:
        """Return the part of `n` values for each flow, equal on all ranks; one part for a small message."""
        if nbytes < SMALLEST:
            return [slice(0, n)]
        ends = [min(n, round(total * n / LINE) * LINE) for total in accumulate(self.shares[:-1])]
        return [slice(begin, end) for begin, end in pairwise([0, *ends, n])]

    def begin(self, x: Tensor, begin: Callable[[Tensor, Any], Any]) -> "Shares":
        """Begin to send or receive a flat tensor: `begin` does so with each part over the group of its flow."""
        if x.is_cuda:
            raise ValueError(
                "flows divide messages over gloo; for NCCL, set the number of connections with baguakit.net"
            )
        return Shares(self, x, lambda s, group: begin(x[s], group))

    def all_gather(self, out: Tensor, x: Tensor, gather: Callable[..., Any]) -> None:
        """Gather the flat `x` of all ranks into the rows of `out`."""
        rows, landed = out.view(self.groups[0].size(), x.numel()), list[tuple[slice, Tensor]]()

        def begin(s: slice, group: Any) -> Any:
            landed.append((s, x.new_empty(len(rows), s.stop - s.start)))
            return gather(landed[-1][1].view(-1), x[s], group=group, async_op=True)

        Shares(self, x, begin).wait()
        for s, piece in landed:
            rows[:, s] = piece

    def reduce_scatter(self, out: Tensor, x: Tensor, scatter: Callable[..., Any]) -> None:
        """Sum the rows of `x` over the ranks, and write this rank's row to the flat `out`."""
        rows = x.view(self.groups[0].size(), out.numel())
        Shares(self, out, lambda s, g: scatter(out[s], rows[:, s].reshape(-1), group=g, async_op=True)).wait()

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

    def close(self) -> None:
        """End the threads."""
        for lane in self.lanes:
            lane.close(wait=False)


class Shares:
    """The work of a message divided as the flat `x` is: `begin` returns that of a part over a group."""

    def __init__(self, flows: Flows, x: Tensor, begin: Callable[[slice, Any], Any]) -> None:
        flown = [(i, s) for i, s in enumerate(flows.parts(x.numel(), x.nbytes)) if s.stop > s.start]
        self._works = [(i, begin(s, flows.groups[i])) for i, s in flown]
        self._flows, self._began = flows, time.perf_counter()

    def wait(self) -> None:
        """Wait for the shares of all flows at the same time, and record the time of each."""
        flows, works, self._works = self._flows, self._works, []

        def wait(flow: int, work: Any) -> None:
            work.wait()
            if len(works) > 1:
                flows.seconds[flow] += time.perf_counter() - self._began

        others = [flows.lanes[i - 1].run(lambda i=i, work=work: wait(i, work)) for i, work in works[1:]]  # type: ignore[misc]
        for i, work in works[:1]:
            wait(i, work)
        for other in others:
            other.result()


def reweighed(shares: Sequence[float], seconds: Sequence[float]) -> list[float]:
    """Return s_i / T_i, at least `LEAST` of an equal share, scaled to the sum 1."""
    rates = [share / taken for share, taken in zip(shares, seconds, strict=True)]
    floored = [max(rate / sum(rates), LEAST / len(rates)) for rate in rates]
    return [share / sum(floored) for share in floored]
