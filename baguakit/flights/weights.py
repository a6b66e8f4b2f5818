"""The runner of a rule on weights: all its buckets are launched together, and landed together."""

from ..kernels.operators import land_, mix_
from .runner import RuleRunner


class WeightRunner(RuleRunner):
    """A runner of a rule on weights."""

    def launch_all(self, step: int | None, keep: bool, factor: float = 1.0) -> None:
        """Launch every bucket with the weights as they are, times `factor`.

        With `keep` a copy is kept, and at landing only what the flight has changed is added.
        """
        for i, bucket in enumerate(self.buckets):
            flat = bucket.load("data")
            before = flat.clone() if keep else None
            if factor != 1:
                flat.mul_(factor) if factor else flat.zero_()  # 0 · inf would not be 0
            self.launch(i, step, before=before)
        if self.in_phases:
            self.channel.lane.flush()
        self.round += 1

    def land_all(self) -> None:
        """Wait for every bucket in the air, and bring its result into the weights.

        x ← result  where `x` equals `before`, and  x ← x + (result − before)  where it has changed since the launch.
        Values are compared on the device: a version counter would not see writes through `p.data`. A rule with
        `mix=α` has no `before`:  x ← α x + (1 − α) result. On a GPU x stays where an abort has ended the flight.
        """
        mix, fault = self.rule.mix, self.channel.monitor.fault
        arrived = [
            (self.buckets[i], self.air[i].before, self.arrive(i)) for i in sorted(self.air)
        ]  # all, or none lands
        for bucket, before, result in arrived:
            flat = bucket.flat
            x = bucket.now() if fault or mix or before is not None else flat
            if mix:
                result = flat.copy_(result) if result is not flat else flat
                mix_(result, [x], [1 - mix, mix])
            if fault:
                fault.choose_(flat, result, x if before is None else before)
                result = flat
            if before is not None:
                land_(x, result, before)
                result = x
            if result is not flat:
                flat.copy_(result)
            bucket.store("data")

    def arrived(self) -> bool:
        """Return True if every flight in the air is done."""
        return all(flight.flight.done() for flight in self.air.values())
