"""The user's optimizer seen through other glasses: everything it has, but flat parameters."""

from types import new_class
from typing import Any, Protocol

from torch.optim import Optimizer

from .memory import State
from .steppers import Groups


class Flattened(Protocol):
    """Whoever knows the flat groups and their state; asked each time, so that nothing is gathered too early."""

    def groups(self) -> Groups: ...

    def state(self) -> State: ...


def twin_of(optimizer: Optimizer, flattened: Flattened) -> Optimizer:
    """An optimizer whose `step` acts on flat parameters.

    It shares its attributes with the user's (what one sets, the other has), and its class is derived from the user's;
    only `param_groups` and `state` are its own.
    """
    kind = type(optimizer)
    body: dict[str, Any] = {
        "param_groups": property(lambda _: flattened.groups()),
        "state": property(lambda _: flattened.state()),
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
    }
    twin: Optimizer = object.__new__(new_class(kind.__name__, (kind,), None, lambda names: names.update(body)))
    twin.__dict__ = optimizer.__dict__
    return twin
