"""The runner of a rule in a hook of DDP or FSDP2. The hook passes buckets one by one, and may change the buckets."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ..buckets import Bucket
from ..comm import Comm
from ..keeping import Joint
from ..lanes import Phases
from ..stages import Stage
from ..stages.base import init_stage
from .checkpoint import load_bucket, save_runner, whole_of
from .runner import RuleRunner


@dataclass(eq=False)
class HookRunner(RuleRunner):
    """A runner of a rule on the buckets of a hook. When buckets change, each parameter keeps its part of the state."""

    names: dict[Tensor, str] = field(default_factory=dict)  # of parameters, or of tensors that stand for them
    # {bucket number in the hook: bucket number in this runner}. The runner numbers buckets in order of first launch.
    places: dict[int, int] = field(default_factory=dict)
    memory: Mapping[str, Any] | None = None  # from `save_runner`, for buckets that have not come since
    same_ranks: bool = True  # `memory` is from as many ranks
    remembers_any: bool = False  # its flights depend on the flights before them

    def fit(self, called: int, flat: Tensor, params: Sequence[Tensor]) -> int:
        """Use `flat`, which holds `params` in order, as the hook's bucket `called`. Return its number in the runner."""
        i = self.places.get(called, len(self.buckets))
        if i < len(self.buckets):
            if [*map(id, self.buckets[i].params)] == [*map(id, params)]:
                self.buckets[i] = Bucket.of(flat, params)
                return i
            self.forget_from(i)
        self.places[called] = i
        bucket, comm = Bucket.of(flat, params), self.channel.comm.for_flight(self.round, None, self.number(i), {})
        state = self.channel.together("new buckets", lambda _: init_stage(self.rule.stage, bucket, comm))
        self.buckets.append(bucket)
        self.states.append(state)
        self.remembers_any = self.remembers()
        self.ledgers.append(self.new_ledger(i))
        if self.memory is not None:
            load_bucket(self, i, self.names, self.memory, self.same_ranks)
        return i

    def forget_from(self, i: int) -> None:
        """Drop the buckets from `i` on, and keep the state of their parameters in `memory`."""
        self.memory, self.same_ranks = self.saved(), True
        for by_bucket in (self.buckets, self.states, self.ledgers):
            del by_bucket[i:]
        self.places = {called: place for called, place in self.places.items() if place < i}

    def saved(self) -> dict[str, Any]:
        """Return the state as `save_runner` does, with the loaded state of parameters that no bucket has held since."""
        self.drop()
        saved = save_runner(self, self.names)
        names: dict[str, Any] = {name: {} for name in self.names.values()}  # nothing is missing of one that never came
        before = {} if self.memory is None else self.memory["parameters"]
        saved["parameters"] = {**names, **before, **saved["parameters"]}
        if self.memory is not None:
            if whole := whole_of(self.memory, self.names) | set(saved.get("whole", ())):
                saved["whole"] = sorted(whole)
            if not self.buckets:
                saved["cut"], saved["own"] = self.memory["cut"], self.memory["own"]
        return saved

    def take_off(
        self,
        i: int,
        step: int,
        scale: Tensor | None,
        joint: Joint | None,
        mean: Callable[..., Tensor] | None = None,
        out: Tensor | None = None,
        landed: Callable[[Tensor], Any] = lambda x: None,
    ) -> None:
        """Launch bucket `i`: divide by the loss `scale`, call the stage, and multiply the result by the scale.

        The bucket is overwritten. The result is written to `out`, by default to the bucket. `mean(stage, x, state,
        comm)`, if given, is called in place of the stage. At last `landed` is called on the lane with the result, even
        after a failure. `joint` holds changes of the state until it is decided whether to keep them.
        """
        if i in self.air:  # of a backward that an exception ended: its result is dropped
            self.arrive(i)
        state = self.states[i]

        def fly(stage: Stage, flat: Tensor, comm: Comm) -> Phases:
            target = flat if out is None else out
            try:
                with contextlib.nullcontext() if joint is None else joint.flight(state, self.guards, lambda: flat):
                    if scale is not None:
                        flat.mul_(scale.reciprocal())
                    by_stage = self.phases_of(stage, flat, state, comm)
                    result = (yield from by_stage) if mean is None else mean(stage, flat, state, comm)
                    if result is not target:
                        target.copy_(result)
                    if scale is not None:
                        target.mul_(scale)
            finally:
                landed(target)

        self.launch(i, step, fly)

    def arrive_all(self) -> bool:
        """Wait for every flight in the air, and end the round. Return False: failed backwards are not detected."""
        self.drop()
        self.round += 1
        if len(self.params()) == len(self.names):  # all have come
            self.memory = None
        return False
