"""Flights in the air, saved as their results.

flight.result, flight.before    of weights
flight.k.result, flight.k.used  of gradients that land in the k-th backward from here, counted from 0: without the
                                loss scale; and whether some rank had a gradient of the parameter
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...lanes import Flight
from ..runners.gradients import GradientRunner
from ..runners.runner import BucketFlight, RuleRunner
from .pieces import Names, gathered, save_pieces


class Arrived(Flight):
    """A flight that has ended: loaded from a checkpoint."""

    def __init__(self, value: Tensor) -> None:
        self._value = value

    def done(self) -> bool:
        return True

    def result(self) -> Any:
        return self._value


def save_flights(runner: RuleRunner, names: Names, saved: dict[str, Any]) -> None:
    """Save the results of the flights in the air, which have ended, in `saved` by parameter name."""
    if not isinstance(runner, GradientRunner):
        for i, flight in runner.air.items():
            bucket = runner.buckets[i]
            save_pieces(saved, bucket, names, "flight.result", flight.flight.result())
            if flight.before is not None and not torch.equal(flight.before, bucket.now()):
                save_pieces(saved, bucket, names, "flight.before", flight.before)
        return
    for k, delayed in enumerate(runner.ring):
        for bucket in delayed.buckets:
            save_pieces(saved, bucket, names, f"flight.{k}.result", bucket.flat)
        for p, used in zip(runner.params(), delayed.flags.of_all(), strict=True):
            saved[names[p]][f"flight.{k}.used"] = torch.tensor(used)


def load_flight(runner: RuleRunner, i: int, parameters: Mapping[str, Any], names: Names) -> None:
    """Load the result of the flight of weights of bucket `i`, if one was saved."""
    bucket = runner.buckets[i]
    result = gathered(parameters, bucket, names, "flight.result", bucket.flat)
    if result is not None:
        before = gathered(parameters, bucket, names, "flight.before", bucket.flat)
        if before is None and runner.rule.mix is None:
            before = bucket.now()
        runner.air[i] = BucketFlight(
            label=f"{runner.label}, bucket {i}, from a checkpoint",
            flight=Arrived(result),
            launched=0.0,
            runner=runner,
            bucket=i,
            round=runner.round - 1,
            before=before,
        )


def load_delayed(runner: RuleRunner, names: Names, parameters: Mapping[str, Any], same_ranks: bool) -> None:
    """Load the delayed gradients, or zeros where none were saved or each rank had its own and ranks have changed."""
    if not isinstance(runner, GradientRunner):
        return
    known = parameters if same_ranks or runner.rule.stage.agrees else {}
    for k, delayed in enumerate(runner.ring):
        for bucket in delayed.buckets:
            result = gathered(known, bucket, names, f"flight.{k}.result", bucket.flat.zero_())
            if result is not None:
                bucket.flat.copy_(result)
        used = [known.get(names[p], {}).get(f"flight.{k}.used", True) for p in runner.params()]
        delayed.flags.mine, delayed.flags.rows = [int(each) for each in used], None
