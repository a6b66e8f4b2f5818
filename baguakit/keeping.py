"""Update the states of stages after a flight, unless a result is not finite.

    state ← new    if all results are finite
    state ← state  otherwise

A single flight tests its own result. The flights of one backward share one test (`Joint`), because an optimizer that
finds one non-finite gradient skips the step for all gradients. The device makes the test, without a synchronisation.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .arguments import message, tensor

Kept = tuple[Tensor, Tensor, Tensor, Any]
"""A tensor of a state, its new value, its old value, and the argument `whose` of `Joint.flight`."""

_deciding: "ContextVar[_Held | None]" = ContextVar("baguakit deciding", default=None)  # of the current flight


def finite(x: Tensor) -> Tensor:
    """Return whether every value of `x` is finite: a bool tensor on the device of `x`, without a synchronisation."""
    if tensor("x", x).numel() == 0 or not x.is_floating_point():
        return torch.isfinite(x).all()
    if x.is_cuda:
        return finite_in_two(x)
    low, high = torch.aminmax(x if x.itemsize > 1 else x.float())  # both are NaN if one value is
    return torch.isfinite(torch.maximum(high, -low))


def finite_in_two(x: Tensor) -> Tensor:
    """Return `finite(x)` for floating values, with only two kernel launches on a GPU. On CPUs `finite` is faster."""
    largest: Tensor = torch.linalg.vector_norm(x, torch.inf)  # NaN if one value is, which is not less
    return largest < torch.inf


def update_if_finite_(state: Tensor, new: Tensor, where: Tensor) -> Tensor:
    """Set `state` to `new`, of its shape, if the one bool `where` is true, and return it. A `Joint` sets it later."""
    if where.numel() != 1:
        raise ValueError(message("where", "one bool, such as stages.finite returns", where))
    if new.shape != state.shape:
        raise ValueError(message("new", f"a tensor of the shape of state, {tuple(state.shape)}", new))
    if hold(state, new, where):
        return state
    if where.is_cpu:  # to ask waits for nothing
        return state.copy_(new) if where else state
    return torch.where(where, new, state, out=state)


def hold(state: Tensor, new: Tensor, where: Tensor | None = None) -> bool:
    """Register `new` as the next value of `state`, which `Joint.settle` will set; return False if there is no `Joint`.

    Args:
        where: a bool tensor; if it is False, `settle` changes no state. With None, another test of this flight must
            fail if `new` is not finite. On a GPU `new` is then not copied, and nobody may write to it afterwards.
    """
    held = _deciding.get()
    if held is None:
        return False
    if where is not None or state.is_cpu:
        copy = held.joint.copy_of(state)
        new = copy if new is copy else copy.copy_(new)
    held.new.append((state, new, state, held.whose))
    held.flags += [] if where is None else [where]
    return True


def room_for(state: Tensor, new: Callable[[Tensor], Tensor]) -> Tensor:
    """Return a tensor in which a stage computes the next value of `state`. Use it in this flight only.

    Pass it to `update_if_finite_`. It is `new(state)`, or with a `Joint` the tensor to which `hold` would copy a value.
    """
    held = _deciding.get()
    return new(state) if held is None else held.joint.copy_of(state)


def wide_copy(x: Tensor) -> Tensor:
    """Return a copy of `x` in fp32 or wider, so that small changes are not lost to rounding."""
    return x.to(torch.promote_types(x.dtype, torch.float32), copy=True)


def restored(x: Tensor, kept: Tensor) -> Tensor:
    """Return `x` in the dtype of `kept`, plus the rounding error of `kept` in that of `x`; `x` if they are equal."""
    return x if x.dtype == kept.dtype else x.to(kept.dtype).add_(kept - kept.to(x.dtype))


def tensors_of(state: Any, at: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield (path, tensor) for the tensors of a nested dict; paths begin with `at`."""
    if isinstance(state, Tensor):
        yield at, state
    elif isinstance(state, Mapping):
        for name, value in state.items():
            yield from tensors_of(value, f"{at}.{name}")


@dataclass(eq=False)
class _Held:
    """The new states that one flight has computed, and bools that tell whether they are finite."""

    joint: "Joint"
    whose: Any
    new: list[Kept] = field(default_factory=list)
    flags: list[Tensor] = field(default_factory=list)


class Joint:
    """The new states of several flights, held until it is known whether the results of all flights are finite.

    A `Joint` has one copy of each tensor of a state. On the CPU, a state and its copy swap their memory, so that
    nothing is copied back. All flights run on one lane, and `settle` is called on this lane after the last flight.
    """

    def __init__(self) -> None:
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}  # {id(state): (state, its copy)}
        self._new: list[Kept] = []
        self._flags: list[Tensor] = []

    @contextlib.contextmanager
    def flight(
        self, state: Mapping[str, Any], guarded: bool, result: Callable[[], Tensor], whose: Any = None
    ) -> Iterator[None]:
        """Hold the new state of the flight that runs in the body of this context.

        Args:
            state: the state of the stage.
            guarded: whether the stage changes the state with `update_if_finite_` only. If not, `state` is copied first.
            result: returns the result of the flight. It is called after the body, unless the stage has tested a result.
            whose: any object that identifies this state. The function `where` of `settle` is called with it.
        """
        before = [] if guarded else [(tensor, self.copy_of(tensor).copy_(tensor)) for _, tensor in tensors_of(state)]
        outer, held = _deciding.get(), _Held(self, whose)
        mine = held if guarded else None
        _deciding.set(mine)
        try:
            yield
        finally:
            if _deciding.get() is mine:  # False if the flight was given up, and is closed in another context
                _deciding.set(outer)
        self._new += held.new + [(tensor, tensor, copy, whose) for tensor, copy in before]
        self._flags += held.flags or [finite(result())]

    def note(self, ok: Tensor) -> None:
        """Add a tensor of bools to the flags of the flights. If one bool is False, `settle` restores all states."""
        self._flags.append(ok)

    def settle(
        self,
        agreed: Callable[[Tensor], Tensor] | None = None,
        where: Callable[[Any, Tensor], Tensor | None] = lambda whose, state: None,
    ) -> None:
        """Set all states to their new values if all flags are true. Else leave them at their old values.

        Args:
            agreed: a function that takes this rank's bool (True if all its flags are true) and returns the AND of the
                bools of all ranks. None: the bool of this rank is used.
            where: a function (whose, state) that returns a mask of the values to set, or None for all values.
        """
        new, flags = self._new, self._flags
        states = {id(state) for state, _, _, _ in new}
        self._copies = {at: pair for at, pair in self._copies.items() if at in states}
        if not new:  # then all ranks return, because their states are alike
            flags.clear()
            return
        device, ok = flags[0].device, flags[0].view(-1)
        if len(flags) > 1:
            ok = torch.cat([flag.to(device).view(-1) for flag in flags])
        ok = ok[0] if len(ok) == 1 else ok.all()
        if agreed is not None:
            ok = agreed(ok)  # if this raises, all is still held, so that `settle` can be called again
        self._new, self._flags = [], []
        for state, kept, old, whose in new:
            if (changed := where(whose, state)) is not None:
                torch.where(changed, kept, old, out=kept)
            if ok.is_cpu:
                chosen = kept if ok else old
                if state._is_view() and chosen is not state:
                    state.copy_(chosen)
                elif chosen is not state:
                    memory = state.detach()  # stays where the state was
                    state.set_(chosen)  # type: ignore[call-overload]
                    chosen.set_(memory)  # type: ignore[call-overload]
            else:
                torch.where(ok.to(state.device), kept, old, out=state)

    def forget(self) -> None:
        """Drop the new states after a backward has failed. Each state has its value from before the backward again."""
        for state, _, old, _ in self._new:
            if old is not state:
                state.copy_(old)
        self._new, self._flags = [], []

    def copy_of(self, state: Tensor) -> Tensor:
        """Return this `Joint`'s spare tensor with the shape of `state`. The first call allocates the tensor."""
        if id(state) not in self._copies:
            self._copies[id(state)] = (state, torch.empty_like(state))
        return self._copies[id(state)][1]
