"""The effect of an algorithm on training, beside DDP: read from what its stages declare.

Whether a different trajectory is as good, only a training can tell. `measured.json` has what trainings of a small GPT
have told (`python -m bench.frontier`): the steps to the loss that DDP ends with, as a multiple of DDP's.
"""

import json
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources

from ..arguments import check_fields, checked
from ..rules import Algorithm, rules_of
from ..stages import ErrorFeedback

KEPT = 8  # bits: gradients rounded to as many, or more, end with DDP's loss
COUNT = 1 << 20  # values of which the bits are counted
DIFFERENT = "different trajectory"


@dataclass(frozen=True)
class Effect:
    """The effect of an algorithm on training. Print it.

    Attributes:
        averages: in each step all ranks have the mean of the gradients of that step, but for rounding. If not, training
            takes a different trajectory: weights differ by rank, or gradients are sparse, of low rank or late, or the
            optimizer is another one.
        bits: the fewest bits a value to which gradients are rounded; None for an exact mean.
        feedback: what rounding loses is added to the gradients of the next step.
    """

    averages: bool
    bits: int | None = None
    feedback: bool = False

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def keeps_loss(self) -> bool:
        """Return whether training ends with DDP's loss without a trial: an exact mean, or one of 8 bits or more."""
        return self.averages and (self.bits is None or self.bits >= KEPT)

    @property
    def short(self) -> str:
        """Return it in a word or two, for a table."""
        if not self.averages:
            return "different"
        return "as DDP" if self.bits is None else f"{self.bits}-bit" + ", feedback" * self.feedback

    def __str__(self) -> str:
        if not self.averages:
            return DIFFERENT
        if self.bits is None:
            return "same as DDP"
        return f"same up to {self.bits}-bit rounding" + " with error feedback" * self.feedback


@checked
def effect(algorithm: Algorithm) -> Effect:
    """Return the effect of an algorithm on training, after its warm-up.

    Args:
        algorithm: a rule, or a tuple of rules.

    Raises:
        TypeError: it is neither.
    """
    rules = [rule for rule in rules_of(algorithm, name="algorithm") if rule.stop is None]
    stages = [stage for rule in rules for stage in rule.stage.whole()]
    in_time = all(rule.window == "during_backward" and not rule.delay for rule in rules)
    plain = all(stage.averages and stage.same_on_all_ranks and not stage.needs_shapes for stage in stages)
    compressors = [compressor for stage in stages for compressor in stage.compressors()]
    if not (in_time and plain and all(compressor.dense for compressor in compressors)):
        return Effect(False)
    bits = min((compressor.row_bytes(COUNT) * 8 // COUNT for compressor in compressors), default=None)
    return Effect(True, bits, any(isinstance(stage, ErrorFeedback) for stage in stages))


@lru_cache(maxsize=1)
def measured() -> dict[str, float]:
    """Return steps to DDP's last loss as a multiple of DDP's, by the expression of the algorithm."""
    text = resources.files(__package__).joinpath("measured.json").read_text()
    found: dict[str, float] = json.loads(text)["steps"]
    return found


def steps_beside_ddp(algorithm: Algorithm) -> float | None:
    """Return the steps that an algorithm took to DDP's loss for each of DDP's; None if it was not measured."""
    return measured().get(", ".join(map(repr, rules_of(algorithm))))
