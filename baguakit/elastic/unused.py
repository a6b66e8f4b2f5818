"""A warning for a program that joins a group, and attaches nothing to it: each of its ranks would train alone."""

import atexit
import warnings
from collections.abc import Callable
from typing import Any

from torch.optim.optimizer import register_optimizer_step_pre_hook


def warn_if_unused(is_used: Callable[[], bool]) -> None:
    """Warn at the first step of an optimizer, or at the end of the process, unless `is_used()` is true by then."""

    over = False

    def end() -> None:
        nonlocal over
        over = True  # the hook stays: torch iterates over the hooks while it calls this one
        atexit.unregister(warn)

    def warn() -> None:
        end()
        if not is_used():
            warnings.warn(
                "bk.elastic.join has returned a group, and nothing is attached to it: this rank trains alone; "
                "pass comm= to bk.attach",
                stacklevel=3,
            )

    def stepped(optimizer: Any, *_: Any) -> None:
        if over:
            return
        if is_used():
            end()
        elif any(float(group["lr"]) for group in optimizer.param_groups if "lr" in group):  # checkpoints step with 0
            warn()

    register_optimizer_step_pre_hook(stepped)
    atexit.register(warn)
