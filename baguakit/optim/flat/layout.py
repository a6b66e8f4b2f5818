"""The layout of a group of parameters, and the reasons to lay it out again."""

from collections.abc import Container, Sequence
from dataclasses import dataclass
from operator import gt, is_

from torch import Tensor

from .division import LONG, divide, shared_storage
from .members import shard_of
from .memory import OptimizerState
from .tensor import Flat

TORN = 4  # after so many torn steps, flat tensors are given up for a while


@dataclass(eq=False)
class GroupLayout:
    """The parameters of a group, as its optimizer steps them.

    Attributes:
        params: all, as they were when this was laid out.
        met: which of them have had a gradient up to then.
        flats: those that are stepped as one.
        apart: the others, which torch steps as always.
        present: which had a gradient in the latest step.
        storages: the storages found to hold adjacent gradients.
        patience: the number of steps in which the same parameters must have gradients before those whose single values
            differ are laid out again.
        rest: the number of steps in which all are stepped apart, because the set with gradients changes at every step;
            0 means for ever.
    """

    params: list[Tensor]
    met: list[bool]
    flats: list[Flat]
    apart: list[Tensor]
    present: list[bool]
    storages: frozenset[int] = frozenset()
    patience: int = 16
    rest: int = 0
    calm: int = 0  # steps since the set with gradients changed
    torn: int = 0  # steps at which that set changed while most segments had one member
    age: int = 0

    def fits(self, params: Sequence[Tensor], state: OptimizerState) -> bool:
        """Return whether this layout is still right for the parameters."""
        self._watch([p.grad is not None for p in params])
        return (
            len(params) == len(self.params)
            and all(map(is_, params, self.params))
            and not any(map(gt, self.present, self.met))
            and not any(map(self._lie_together_now, self.flats))
            and not (self.calm == self.patience and self._segments() > 2 * len(self.flats))
            and self.torn < TORN
            and (not self.rest or self.age < self.rest)
            and all(flat.fits(state) for flat in self.flats)
        )

    def _watch(self, present: list[bool]) -> None:
        others = present != self.present
        self.calm = 0 if others else self.calm + 1
        self.torn += others and self._segments() > max(LONG, sum(self.present) // 3)
        self.age += 1
        self.present = present

    def _segments(self) -> int:
        return sum(len(flat.segments) for flat in self.flats)

    def _lie_together_now(self, flat: Flat) -> bool:
        """Return whether gradients share a storage by now, so that another order may save copies."""
        first_two = [shard_of(p.grad) for p in flat.members.params[:2] if p.grad is not None]
        return shared_storage(first_two) not in self.storages

    def anew(self, params: Sequence[Tensor], state: OptimizerState, fused: bool) -> "GroupLayout":
        """Return the layout that replaces this one."""
        met = {p for p, met in zip(self.params, self.met, strict=True) if met}
        torn = self.torn == TORN
        new = lay_out(params, state, fused, met, resting=torn)
        new.storages |= self.storages
        new.patience = self.patience * 2 if torn or self.calm == self.patience else self.patience
        new.rest = self.patience * 4 if torn else 0
        return new


def lay_out(
    params: Sequence[Tensor], state: OptimizerState, fused: bool, met: Container[Tensor] = (), resting: bool = False
) -> GroupLayout:
    """Return a layout: parameters that have had a gradient (`met`) in flat tensors unless `resting`, others apart."""
    present = [p.grad is not None for p in params]
    known = [here or p in met for here, p in zip(present, params, strict=True)]
    offered = [p for p, wanted in zip(params, known, strict=True) if wanted]
    flats = [] if resting else divide(offered, state, fused)
    taken = {p for flat in flats for p in flat.members.params}
    storages = frozenset({0, *(flat.storage for flat in flats)})
    return GroupLayout(list(params), known, flats, [p for p in params if p not in taken], present, storages)
