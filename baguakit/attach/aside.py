"""A `DistributedDataParallel` stands aside while an attachment over the same ranks communicates in its place.

Trainers such as accelerate wrap the model themselves. The wrapper gets a subclass of its class, under which it neither
averages gradients nor broadcasts buffers, and its `no_sync` is that of the attachment. When the last attachment has
detached, the wrapper has its own class again, and averages.
"""

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..comm import Comm, members_of
from ..flights import Clock

_clocks: "weakref.WeakKeyDictionary[nn.Module, list[Clock]]" = weakref.WeakKeyDictionary()


class Aside(DistributedDataParallel):
    """The class of a wrapper that stands aside. Its own attributes keep their values for later."""

    require_forward_param_sync = property(lambda self: False, lambda self, value: None)
    # With static_graph=True the first backward would reduce all gradients even under `no_sync`.
    _static_graph_delay_allreduce_enqueued = property(lambda self: True, lambda self, value: None)

    @property
    def require_backward_grad_sync(self) -> bool:
        """Return False, which DDP asks for. Loops that accumulate set it: what they set is for the attachments."""
        return False

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        for clock in _clocks.get(self, ()):  # a copy has none
            clock.synchronising = value

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for clock in _clocks.get(self, ()):
                stack.enter_context(clock.no_sync())
            yield

    def join_hook(self, **kwargs: Any) -> Any:
        raise ValueError(
            "an attachment communicates in place of this DistributedDataParallel; use att.join() for uneven inputs"
        )


def standing_aside(module: nn.Module, comm: Comm) -> bool:
    """Return whether `module` stands aside for attachments on `comm`: without a communication hook, over its ranks."""
    if not isinstance(module, DistributedDataParallel) or module._comm_hooks:
        return False
    return members_of(module.process_group) == members_of(comm.group)


def stand_aside(model: nn.Module, comm: Comm, clock: Clock, unhook: contextlib.ExitStack) -> None:
    for module in [each for each in model.modules() if standing_aside(each, comm)]:
        if not _clocks.setdefault(module, []):
            own = type(module)
            module.__class__ = type(own.__name__, (Aside, own), {"__module__": own.__module__})
        _clocks[module].append(clock)
        unhook.callback(step_back, module, clock)


def step_back(module: nn.Module, clock: Clock) -> None:
    """Have a wrapper communicate again, if `clock` is that of the last attachment in its place."""
    _clocks[module].remove(clock)
    if not _clocks[module]:
        module.__class__ = type(module).__mro__[2]
