"""How the parameters of a group are stepped, and when that is to be thought over."""

from collections.abc import Container, Sequence
from dataclasses import dataclass
from operator import gt, is_

from torch import Tensor

from .division import LONG, divide, shared_storage
from .flat import Flat
from .members import local
from .memory import State

TORN = 4  # steps of the kind after which flat tensors are given up for a while


@dataclass(eq=False)
class Layout:
    """The parameters of a group, as its optimizer steps them.

    Attributes:
        params: all, as they were when this was laid out.
        met: which of them have had a gradient up to then.
        flats: those that are stepped as one.
        apart: the others, which torch steps as always.
        present: which had a gradient in the latest step.
        storages: where gradients have been found to lie together.
        patience: for how many steps the same must have gradients until it is worth while to bring together those whose
            single values have come to differ in the meantime.
        rest: for how many steps all are stepped apart, because others have gradients at every step; 0 is for good.
    """

    params: list[Tensor]
    met: list[bool]
    flats: list[Flat]
    apart: list[Tensor]
    present: list[bool]
    storages: frozenset[int] = frozenset()
    patience: int = 16
    rest: int = 0
    calm: int = 0  # steps since others had gradients
    torn: int = 0  # steps at which others had gradients than before, and hardly two had been stepped as one
    age: int = 0

    def fits(self, params: Sequence[Tensor], state: State) -> bool:
        """Whether nothing has changed that decides who can be stepped with whom."""
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
        """Whether gradients have come to lie in one place, so that another order may spare copying them."""
        first_two = [local(p.grad) for p in flat.members.params[:2] if p.grad is not None]
        return shared_storage(first_two) not in self.storages

    def anew(self, params: Sequence[Tensor], state: State, fused: bool) -> "Layout":
        """The layout to take the place of this one."""
        met = {p for p, met in zip(self.params, self.met, strict=True) if met}
        if self.torn == TORN:
            return self._resting(params, met)
        new = lay_out(params, state, fused, met)
        new.storages |= self.storages
        new.patience = self.patience * 2 if self.calm == self.patience else self.patience
        return new

    def _resting(self, params: Sequence[Tensor], met: Container[Tensor]) -> "Layout":
        present = [p.grad is not None for p in params]
        return Layout(
            params=list(params),
            met=[here or p in met for here, p in zip(present, params, strict=True)],
            flats=[],
            apart=list(params),
            present=present,
            storages=self.storages,
            patience=self.patience * 2,
            rest=self.patience * 4,
        )


def lay_out(params: Sequence[Tensor], state: State, fused: bool, met: Container[Tensor] = ()) -> Layout:
    """A layout for parameters that have a gradient or have been `met` with one; the others are stepped apart."""
    present = [p.grad is not None for p in params]
    known = [here or p in met for here, p in zip(present, params, strict=True)]
    flats = divide([p for p, wanted in zip(params, known, strict=True) if wanted], state, fused)
    taken = {p for flat in flats for p in flat.members.params}
    storages = frozenset({0, *(flat.storage for flat in flats)})
    return Layout(list(params), known, flats, [p for p in params if p not in taken], present, storages)
