"""Optimizers that train an attached model and are not attached: the attachment does not see their steps."""

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...buckets import local
from .landings import params_of

MANY = 32  # backward passes without a step: more than a GradScaler skips when it sets out


class OtherOptimizers:
    """A watch for optimizers that train the model and are not attached. Warns once.

    Args:
        model: the model.
        attached: its optimizers; with none, any may step.
    """

    def __init__(self, model: nn.Module, attached: Sequence[Optimizer]) -> None:
        self.model, self.attached = model, attached
        self.ours = False  # an attached optimizer steps: one that steps within it is a part of it
        self.found = ""  # the class of another optimizer
        self._warned = False

    def _trains(self, optimizer: Optimizer) -> bool:
        parameters = {id(p) for p in self.model.parameters()}
        return any(id(p) in parameters for p in params_of(optimizer))

    def steps(self, optimizer: Optimizer, *_: Any) -> None:
        """Check an optimizer that is about to step: any of this process.

        Raises:
            RuntimeError: it is attached, or none is, and it steps the model within a backward.
        """
        ours = optimizer in self.attached
        if torch._C._current_graph_task_id() != -1 and (ours or not self.attached) and self._trains(optimizer):
            raise within_backward(f"{type(optimizer).__name__} steps")
        if self.found or self.ours or not self.attached or ours:
            return
        if self._trains(optimizer):
            self.found = type(optimizer).__name__
            self._warn(
                f"{self.found} steps parameters of the attached model and is not the optimizer that was attached: the "
                "attachment does not see its steps, and ranks may drift apart; give attach the optimizer that trains"
            )

    def landed(self, passes: int) -> None:
        """Warn if many backward passes have landed since the last step."""
        if passes == MANY:
            self._warn(
                f"{MANY} backward passes have been averaged since the attached optimizer stepped: give attach the "
                "optimizer that trains, or use att.no_sync() while gradients are accumulated"
            )

    def waits(self, optimizer: Optimizer) -> None:
        """Warn that rules on weights do not fly: they do when the optimizer steps."""
        self._warn(
            f"backward passes have come, and {type(optimizer).__name__} has not stepped: no rule on weights flies "
            "before, and each rank trains alone if something else steps; step the optimizer that is attached"
        )

    def ended(self, step: int, flown: bool, waiting: Optimizer | None) -> None:
        """Raise a RuntimeError if another optimizer has trained the model and no rule ever flew.

        Warn if there was no step for rules on weights, and `waiting` had gradients for one.
        """
        if self.found and step == 0 and not flown:
            raise RuntimeError(
                f"{self.found} has trained the model and is not the optimizer that was attached, so that no rule ever "
                "flew: each rank has trained alone; give attach the optimizer that trains"
            )
        if step == 0 and waiting is not None:
            self.waits(waiting)

    def sample(self, optimizer: Optimizer) -> tuple[Tensor, Tensor] | None:
        """Return a parameter that an optimizer is about to step, and a copy of it; None if all are zero."""
        chosen = (p for p in params_of(optimizer) if p.requires_grad and local(p).any())
        return None if (p := next(chosen, None)) is None else (p, local(p).clone())

    def look_for_copies(self, optimizer: Optimizer, sample: tuple[Tensor, Tensor] | None) -> None:
        """Warn if an optimizer that has stepped remembers the weights, and may step from what it remembers."""
        if sample is None:
            return
        p, before = sample
        for key, value in optimizer.state.get(p, {}).items():
            if not isinstance(value, Tensor) or value.shape != p.shape:
                continue
            copy = local(value).to(before.dtype)
            if torch.equal(copy, before) or torch.equal(copy, local(p)):
                self._warn(
                    f"{type(optimizer).__name__} keeps a copy of the weights in its state, {key!r}, which rules on "
                    "weights do not average: what an exchange brings is lost where the optimizer steps from its copy; "
                    "use rules on gradients, or an optimizer without one"
                )

    def _warn(self, sentence: str) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(sentence, stacklevel=3)


def within_backward(what: str) -> RuntimeError:
    """Return the error of a step that does not wait for the gradients of all ranks."""
    return RuntimeError(
        f"{what} within a backward, before the gradients of all ranks have landed; step when backward has returned"
    )
