"""The runner of a rule in the buckets of DDP or FSDP2, which come one by one and may change at any time."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ..arguments import message
from ..buckets import Bucket
from ..comm import Comm
from ..flights import RuleRunner, load_bucket, save_runner, whole_of
from ..keeping import Joint
from ..rules import Rule, during_backward, rules_of
from ..stages import Stage, State
from ..topology.chosen import chooses


def rules_on_gradients(stage: Any) -> tuple[Rule, ...]:
    """Return the rules of a stage, or of an algorithm on gradients such as `bytegrad()`.

    Raises:
        TypeError: it is neither, or acts on weights.
        ValueError: it has a delay, acts on some of the parameters only, or two rules act in one step.
    """
    if isinstance(stage, Stage):
        stage = during_backward(stage)
    elif not isinstance(stage, Rule | tuple | list) or not stage:
        raise TypeError(message("stage", "a stage such as Mean(), or an algorithm on gradients", stage))
    rules = rules_of(stage, name="stage")
    for i, rule in enumerate(rules):
        if rule.what == "data":
            raise TypeError(
                f"{rule!r} acts on weights, and a gradient hook never sees them; use bk.attach(model, optimizer, …)"
            )
        if rule.delay:
            raise ValueError(
                f"{rule!r} lands gradients in a later backward, and a hook returns those of its own; use bk.attach, or "
                "omit delay="
            )
        if rule.where is not None:
            raise ValueError(
                f"{rule!r} acts on some parameters, and a hook is given whole buckets; use bk.attach, or omit where="
            )
        if chooses(rule.stage):
            raise ValueError(
                f"{rule!r} takes what is chosen when the first bucket is launched, and a hook does not say which is "
                "the first; use bk.attach"
            )
        for other in rules[:i]:
            if rule.overlaps(other):
                raise ValueError(f"{other!r} and {rule!r} act in the same steps; separate them with start= and stop=")
    return rules


@dataclass(eq=False)
class HookRunner(RuleRunner):
    """A runner of a rule in the buckets of a hook. Its state follows the parameters when buckets change.

    Attributes:
        names: of the parameters in the buckets, or of tensors that stand for them.
        places: the number of a bucket here, by its number in the hook: buckets are numbered as they first come.
        memory: from `save_runner`, for buckets that have not come since.
        same_ranks: `memory` is from as many ranks.
        remembers_any: its flights depend on the flights before them.
    """

    names: dict[Tensor, str] = field(default_factory=dict)
    places: dict[int, int] = field(default_factory=dict)
    memory: Mapping[str, Any] | None = None
    same_ranks: bool = True
    remembers_any: bool = False

    def fit(self, called: int, flat: Tensor, params: Sequence[Tensor]) -> int:
        """Return the number here of bucket `called` of the hook: now `flat`, with `params` one after another."""
        i = self.places.get(called, len(self.buckets))
        if i < len(self.buckets):
            held = self.buckets[i].params
            if len(held) == len(params) and all(p is q for p, q in zip(held, params, strict=True)):
                self.buckets[i] = Bucket.of(flat, params)
                return i
            self.forget_from(i)
        self.places[called] = i
        self.add(Bucket.of(flat, params))
        return i

    def add(self, bucket: Bucket) -> None:
        """Add a bucket, with the state that is remembered of its parameters."""
        i = len(self.buckets)
        comm = self.channel.comm.for_flight(self.round, None, self.number(i), {})
        state = self.channel.together("new buckets", lambda _: self.rule.stage.init(bucket, comm))
        self.buckets.append(bucket)
        self.states.append(state)
        self.remembers_any = self.remembers()
        self.ledgers.append(self.new_ledger(i))
        if self.memory is not None:
            load_bucket(self, i, self.names, self.memory, self.same_ranks)

    def forget_from(self, i: int) -> None:
        """Drop the buckets from `i` on, and keep the state of their parameters in `memory`."""
        self.memory, self.same_ranks = self.saved(), True
        for by_bucket in (self.buckets, self.states, self.ledgers):
            del by_bucket[i:]
        self.places = {called: place for called, place in self.places.items() if place < i}

    def saved(self) -> dict[str, Any]:
        """Return the state, as `attach` saves it."""
        self.drop()
        saved = save_runner(self, self.names)
        names: dict[str, Any] = {name: {} for name in self.names.values()}  # nothing is missing of one that never came
        before = {} if self.memory is None else self.memory["parameters"]  # of parameters that have not come since
        saved["parameters"] = {**names, **before, **saved["parameters"]}
        if self.memory is not None:
            if whole := whole_of(self.memory, self.names) | set(saved.get("whole", ())):
                saved["whole"] = sorted(whole)
            if not self.buckets:
                saved["cut"], saved["own"] = self.memory["cut"], self.memory["own"]
        return saved

    def recall(self, saved: Mapping[str, Any], same_ranks: bool) -> None:
        """Load what `saved` returned."""
        if self.buckets:
            self.forget_from(0)
        self.memory, self.same_ranks = saved, same_ranks
        self.round, self.to_average = int(saved["round"]), []

    def take_off(
        self, i: int, step: int, work: Callable[[Stage, Tensor, State, Comm], Any], joint: Joint | None
    ) -> None:
        """Launch bucket `i`: do `work(stage, x, state, comm)` with it; `joint` decides what the flight keeps."""
        if i in self.air:  # of a backward that an exception ended: its result is dropped
            self.arrive(i)
        stage, state = self.rule.stage, self.states[i]

        def fly(flat: Tensor, comm: Comm) -> Any:
            with contextlib.nullcontext() if joint is None else joint.flight(state, stage.guards(), lambda: flat):
                return work(stage, flat, state, comm)

        self.launch(i, step, fly)

    def land(self) -> None:
        """End the round: wait for every flight in the air."""
        self.drop()
        self.round += 1
        if len(self.params()) == len(self.names):  # all have come
            self.memory = None
