"""Who steps the flat tensors of an optimizer."""

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from .memory import State

Groups = list[dict[str, Any]]
Stepper = Callable[[Groups, State], Groups]
"""Steps what it can of groups whose parameters are flat, keeping their state in the optimizer's own terms, and
returns the groups with what is left for the optimizer's own code."""


def own_code(groups: Groups, state: State) -> Groups:
    """Leave all to the optimizer's own `step`."""
    return groups


def stepper(kind: type[Optimizer]) -> Stepper:
    """The stepper for optimizers of a class. A kernel that steps all flat tensors in one launch is chosen here."""
    return own_code
