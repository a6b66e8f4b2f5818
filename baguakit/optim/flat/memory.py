"""The state of an optimizer whose parameters are stepped as one: flat for it, by parameter for its user.

The user's `optimizer.state` is authoritative. A tensor as long as the flat one is *elementwise*: the user sees pieces
of it. One with a *single* value (`step`) is equal for all that are stepped as one: each parameter has a tensor of its
own, because torch loads such tensors as they are and then increments each. *Numbers* are equal, too.
"""

from collections.abc import Container, MutableMapping
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from .members import PLAIN, Members, shard_of, storage_of

OptimizerState = MutableMapping[Any, dict[str, Any]]
NUMBERS = (bool, int, float, complex, str, type(None))


class CannotFuse(TypeError):
    """Raised if an optimizer cannot step parameters as one; the message calls it "it"."""


def is_elementwise(value: Tensor, like: Tensor) -> bool:
    """Return whether a tensor of the user's state has a value for each value of `like`, a parameter."""
    return (type(value) in PLAIN) == (type(like) in PLAIN) and value.shape == like.shape


@dataclass(eq=False)
class Segment:
    """Members that follow each other in a flat tensor and are stepped as one.

    Attributes:
        at: which members.
        param: what the optimizer steps; its gradient is set for each step.
        known: the state that the optimizer knew after its latest step; None if it has had none.
    """

    at: slice
    param: nn.Parameter
    known: dict[str, Any] | None


class Memory:
    """The state of `members`, gathered from `state`: all members have the same keys.

    Attributes:
        broken: members differ by now in a way that no flat state can have.
    """

    def __init__(self, members: Members, state: OptimizerState) -> None:
        self.members, self.broken = members, False
        self.flat: dict[str, Tensor] = {}  # elementwise
        self.single: dict[str, Tensor] = {}  # a row for each member
        self.versions: dict[str, int] = {}
        self.seen: dict[str, list[Any]] = {}  # what the user sees of anything
        dicts = [state.get(p) for p in members.params]
        self.dicts: list[dict[str, Any]] | None = None if dicts[0] is None else [d for d in dicts if d is not None]
        for key, value in list((dicts[0] or {}).items()):
            values = [d[key] for d in self.dicts or ()]
            if not isinstance(value, Tensor):
                self.seen[key] = values
            elif is_elementwise(value, members.params[0]):
                self._show_flat(key, members.join([shard_of(v) for v in values]))
            else:
                self._show_single(key, torch.stack([v.detach() for v in values]))

    def agrees(self, state: OptimizerState) -> bool:
        """Return whether the user's state is still the one that this memory shows."""
        dicts = self.dicts
        if dicts is None:
            return not any(p in state for p in self.members.params)
        return (
            not self.broken
            and all(map(is_, map(state.get, self.members.params), dicts))
            and all(len(d) == len(self.seen) for d in dicts)
            and all(all(map(is_, [d.get(key) for d in dicts], seen)) for key, seen in self.seen.items())
            and all(rows._version == self.versions[key] for key, rows in self.single.items())
        )

    def rows(self) -> list[tuple[Any, ...]]:
        """Return, by member, the values that must be equal for members to be stepped as one. Reads the device."""
        columns = [rows.reshape(-1).tolist() for rows in self.single.values()]
        columns += [seen for key, seen in self.seen.items() if key not in self.flat and key not in self.single]
        return list(zip(*columns, strict=True)) if columns else [()] * len(self.members.params)

    def of(self, at: slice) -> dict[str, Any] | None:
        """Return the state of a segment."""
        if self.dicts is None:
            return None
        place, known = self.members.place(at), {}
        for key, seen in self.seen.items():
            if key in self.flat:
                known[key] = self.flat[key][place]
            else:
                known[key] = self.single[key][at.start].clone() if key in self.single else seen[at.start]
        return known

    def update(
        self, segment: Segment, found: dict[str, Any] | None, state: OptimizerState, borrowed: Container[int]
    ) -> None:
        """Show the user the state of a segment after the optimizer's step.

        `borrowed` are storages that will not hold their values until the next step, such as that of the flat gradient.

        Raises:
            CannotFuse: it keeps something that cannot be divided among parameters.
        """
        if found is None:
            return
        for key, value in found.items():
            _check(key, value, segment.param.numel())
            if isinstance(value, Tensor) and storage_of(value) in borrowed:
                found[key] = value.clone()
        known = segment.known
        same = known is not None and known.keys() == found.keys()
        if same and all(_alike(known[key], value) for key, value in found.items()):  # type: ignore[index]
            for key, value in found.items():
                found[key] = self._advance(key, value, known[key], segment.at)  # type: ignore[index]
        else:
            self._begin(segment, found, state)
        segment.known = found

    def _advance(self, key: str, value: Any, before: Any, at: slice) -> Any:
        if not isinstance(value, Tensor):
            if value is not before:
                self._show(key, [value] * (at.stop - at.start), at)
        elif key in self.single:
            self.single[key][at] = value.detach()
            self.versions[key] = self.single[key]._version
        elif value is not before:
            return before.copy_(value)
        return value

    def _begin(self, segment: Segment, found: dict[str, Any], state: OptimizerState) -> None:
        """Make the state again, because it has other keys or kinds than before."""
        at, members = segment.at, self.members
        for p in members.params[at]:
            state[p] = state.get(p, {})
            state[p].clear()
        self.broken = at.stop - at.start < len(members.params)
        if self.broken:  # the others stay as they were; next time members will be chosen anew
            part = Members(members.params[at], members.locals[at])
            rest = Memory(part, state)
            rest.dicts = [state[p] for p in part.params]
            rest._show_all(found)
            return
        self.flat, self.single, self.versions, self.seen = {}, {}, {}, {}
        self.dicts = [state[p] for p in members.params]
        self._show_all(found)

    def _show_all(self, found: dict[str, Any]) -> None:
        for key, value in found.items():
            if not isinstance(value, Tensor):
                self._show(key, [value] * len(self.members.params))
            elif value.shape == (self.members.total,):
                found[key] = self._show_flat(key, value.detach().contiguous())
            else:
                self._show_single(key, value.detach().expand(len(self.members.params), *value.shape).clone())

    def _show_flat(self, key: str, flat: Tensor) -> Tensor:
        self.flat[key] = flat
        self._show(key, self.members.distribute(self.members.cut(flat)))
        return flat

    def _show_single(self, key: str, rows: Tensor) -> None:
        self.single[key], self.versions[key] = rows, rows._version
        self._show(key, list(rows.unbind(0)))

    def _show(self, key: str, values: list[Any], at: slice = slice(None)) -> None:
        assert self.dicts is not None
        if at == slice(None):
            self.seen[key] = values
        else:
            self.seen[key][at] = values
        for d, value in zip(self.dicts[at], values, strict=True):
            d[key] = value

    def release(self, state: OptimizerState) -> None:
        """Give the members tensors of their own for what the user still sees as pieces of a flat one."""
        for key, seen in self.seen.items():
            for p, d, value in zip(self.members.params, self.dicts or (), seen, strict=True):
                if isinstance(value, Tensor) and state.get(p) is d and key in d and d[key] is value:
                    d[key] = value.clone()


def _check(key: str, value: Any, n: int) -> None:
    if isinstance(value, Tensor):
        if value.shape != (n,) and value.numel() != 1:
            shape = tuple(value.shape)
            raise CannotFuse(f"it keeps {key!r} of shape {shape} for {n} values: neither one for each nor one for all")
    elif not isinstance(value, NUMBERS):
        raise CannotFuse(f"it keeps {key!r}, a {type(value).__name__}, in its state, of which no parameter has a part")


def _alike(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)
    return not isinstance(a, Tensor) and not isinstance(b, Tensor)
