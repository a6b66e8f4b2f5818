"""Decisions: whether the flights of a backward keep what they would remember. They decide together."""

from collections import deque
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ..comm import Comm
from ..keeping import Joint
from ..monitor import Collective, PeerError
from .gradients import FAILED, GradientRunner
from .runner import RuleRunner

REST = 1.0  # seconds that a lane may still compute; if it does so for longer, it waits for a rank that is lost


class Decisions:
    """The decisions after backward passes, in their order. Only delayed gradients have several under way.

    Args:
        alike: stages that agree give all ranks the same results, so that ranks need not ask each other.

    Attributes:
        joint: holds what the flights of a backward would keep; None where no decision is needed.
    """

    def __init__(self, joint: Joint | None = None, alike: bool = True) -> None:
        self.joint, self.alike = joint, alike
        self._under_way: deque[tuple[RuleRunner, Collective]] = deque()

    def begin(self, runners: Sequence[RuleRunner]) -> None:
        """Begin to decide for the flights of these runners: on the lane, behind them. Nobody waits for it."""
        joint = self.joint
        if joint is None or not runners:
            return
        flags = {runner: runner.flags for runner in runners if isinstance(runner, GradientRunner)}
        agree = not (self.alike and all(runner.rule.stage.same_on_all_ranks for runner in runners))

        def settle(comm: Comm) -> None:
            def on_all_ranks(ok: Tensor) -> Tensor:
                return comm.all_reduce(ok.to(torch.uint8), dist.ReduceOp.MIN).bool()

            def of_used(whose: tuple[GradientRunner, int] | None, state: Tensor) -> Tensor | None:
                return None if whose is None else whose[0].used(flags[whose[0]], whose[1], state)

            for each in flags.values():
                if each.rows is not None:
                    joint.note(each.rows[:, 0] != FAILED)  # the backward has failed on no rank
            joint.settle(on_all_ranks if agree else None, of_used)

        self._under_way.append((runners[0], runners[0].channel.begin("the decision on what to keep", settle)))

    def settle(self, but: int = 0) -> None:
        """Wait for all decisions `but` the latest so many: with 0, states are then as after the latest backward."""
        while len(self._under_way) > but:
            runner, collective = self._under_way.popleft()
            runner.channel.monitor.wait_for(collective)

    def settle_all(self, but: int) -> None:
        """Settle as `settle` does; if the network fails, as this rank alone would decide."""
        lanes = {runner.channel.lane for runner, _ in self._under_way}
        try:
            self.settle(but)
        except PeerError:
            for lane in lanes:
                lane.rest(REST)
            self._under_way.clear()
            if self.joint is not None:
                self.joint.settle()

    def forget(self) -> None:
        """Drop what the flights of a failed backward would keep."""
        if self.joint is not None:
            self.joint.forget()
