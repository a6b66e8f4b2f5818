"""A flat tensor: the weights, gradients and state of small parameters, one after another while the optimizer steps.

The user's `optimizer.state` is authoritative. A tensor as long as the flat one is *elementwise*: the user sees pieces
of it. One with a *single* value (`step`) is equal for all that are stepped as one: each parameter has a tensor of its
own, because torch loads such tensors as they are and then increments each. *Numbers* are equal, too.
"""

from collections.abc import MutableMapping, Sequence
from functools import cached_property
from itertools import accumulate
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from ..buckets import pieces

OptimizerState = MutableMapping[Any, dict[str, Any]]
PLAIN = (Tensor, nn.Parameter)
NUMBERS = (bool, int, float, complex, str, type(None))


class CannotFuse(TypeError):
    """Raised if an optimizer cannot step parameters as one; the message calls it "it"."""


def shard_of(x: Tensor) -> Tensor:
    """Return this rank's part of `x`: its shard if `x` is distributed (a DTensor, as FSDP2 makes them), else `x`."""
    return x if type(x) in PLAIN else x.to_local()  # type: ignore[attr-defined]


def storage_of(x: Tensor) -> int:
    """Return the address of the storage of `x`."""
    return x.untyped_storage().data_ptr()


def is_elementwise(value: Tensor, like: Tensor) -> bool:
    """Return whether a tensor of the user's state has a value for each value of `like`, a parameter."""
    return (type(value) in PLAIN) == (type(like) in PLAIN) and value.shape == like.shape


class Flat:
    """Parameters of one dtype and device, all with a gradient and equal keys of state, that are stepped as one.

    The user's weights stay in place: they are copied into a flat tensor before a step and back after it, unless they
    are already adjacent. So are the gradients, unless they are adjacent, as pieces of a bucket are.

    Args:
        params: as the user holds them.
        locals: what this rank holds of each: plain tensors.
        state: the optimizer's, by parameter.

    Attributes:
        param: what the optimizer steps; its gradient is set for each step.
        known: the state that the optimizer knew after its latest step; None if it has had none.
    """

    def __init__(self, params: list[Tensor], locals: list[Tensor], state: OptimizerState) -> None:
        self.params, self._locals = params, locals
        self._distributed = type(params[0]) not in PLAIN
        *self._starts, self._total = [0, *accumulate(x.numel() for x in locals)]
        self._strides = [x.stride() for x in locals]
        self._pointers = [x.data_ptr() for x in locals]
        run = self._run(locals)
        self._weights = self._empty(locals[0]) if run is None else run
        self._weight_views = [] if run is not None else self._cut(self._weights)  # []: the weights are in place
        self.param = nn.Parameter(self._weights)
        self._grads: Tensor | None = None  # where gradients are copied to
        self._grad_views: list[Tensor] = []
        self._version = 0
        self._lent = self._gradients()  # during a step
        self._together = self._lie_together()
        self.known: dict[str, Any] | None = None
        self._gather(state)

    # Weights and gradients

    def fits(self, state: OptimizerState) -> bool:
        """Return whether weights and state are where they were, and the gradients do not share a storage only now."""
        shards = [shard_of(p) for p in self.params] if self._distributed else self.params
        self._lent = self._gradients()
        moved = self._pointers != [x.data_ptr() for x in shards]
        return not moved and (self._together or not self._lie_together()) and self._agrees(state)

    def load(self) -> bool:
        """Copy weights and gradients into the flat tensors; return whether gradients had to be copied."""
        self._lent = self._gradients()
        if self.param.data_ptr() != self._weights.data_ptr():  # the optimizer has put its weights elsewhere
            self.param = nn.Parameter(self._weights)
        if self._weight_views:
            torch._foreach_copy_(self._weight_views, self._locals)
        flat = self._run(self._lent)
        copied = flat is None
        if flat is None:
            if self._grads is None:
                self._grads = self._empty(self._weights)
                self._grad_views = self._cut(self._grads)
            torch._foreach_copy_(self._grad_views, self._lent)
            flat, self._version = self._grads, self._grads._version
        else:
            self._grads, self._grad_views = None, []
        self.param.grad = flat
        return copied

    def store(self, unscaled: bool) -> None:
        """Copy the weights back, and the gradients if the step wrote to them, as it does when it unscales them."""
        if self.param.data_ptr() != self._weights.data_ptr():
            self._weights.copy_(self.param.detach())
        if self._weight_views:
            torch._foreach_copy_(self._locals, self._weight_views)
        else:  # autograd must see that the weights have changed
            torch.autograd.graph.increment_version(self._locals)
        if self._grads is not None and (unscaled or self._grads._version != self._version):
            torch._foreach_copy_(self._lent, self._grad_views)

    def _gradients(self) -> list[Tensor]:
        grads = [p.grad for p in self.params if p.grad is not None]
        return [shard_of(g) for g in grads] if self._distributed else grads

    def _lie_together(self) -> bool:
        """Return whether the first two gradients share a storage, so that their order may save copies."""
        first = [storage_of(g) for g in self._lent[:2]]
        return len(first) == 2 and first[0] == first[1]

    def _cut(self, flat: Tensor) -> list[Tensor]:
        """Return views of a flat tensor with the shapes and strides of the parameters."""
        return pieces(flat, self._locals)

    def _empty(self, like: Tensor) -> Tensor:
        return torch.empty(self._total, dtype=like.dtype, device=like.device)

    def _run(self, tensors: Sequence[Tensor]) -> Tensor | None:
        """Return the flat tensor of which `tensors` are already the pieces; None if they are not."""
        first = tensors[0]
        base, itemsize, begin = first.data_ptr(), first.element_size(), first.storage_offset()
        if [x.data_ptr() for x in tensors] != [base + itemsize * start for start in self._starts]:
            return None
        # Two allocations may touch by chance.
        if begin + self._total > first.untyped_storage().nbytes() // itemsize:
            return None
        if [x.stride() for x in tensors] != self._strides or not self._dense:
            return None
        return first.detach().as_strided((self._total,), (1,), begin)

    @cached_property
    def _dense(self) -> bool:
        """Return whether pieces of a flat tensor have the strides of the parameters."""
        return [x.stride() for x in self._cut(self._empty(self._locals[0]))] == self._strides

    # State

    def remember(self, found: dict[str, Any] | None, state: OptimizerState) -> None:
        """Show the user the state of the flat tensor after the optimizer's step, and drop the gradients.

        Raises:
            CannotFuse: it keeps something that cannot be divided among parameters.
        """
        borrowed = {storage_of(x) for x in (self._weights, self.param.grad) if x is not None}
        self.param.grad, self._lent = None, []
        if found is None:
            return
        for key, value in found.items():
            _check(key, value, self._total)
            if isinstance(value, Tensor) and storage_of(value) in borrowed:  # until the next step only
                found[key] = value.clone()
        known = self.known
        if known is not None and known.keys() == found.keys() and all(_alike(known[k], found[k]) for k in known):
            found.update({key: self._advance(key, value, known[key]) for key, value in found.items()})
        else:
            self._begin(found, state)
        self.known = found

    def release(self, state: OptimizerState) -> None:
        """Give the parameters tensors of their own for what the user still sees as pieces of a flat one."""
        for key, seen in self._seen.items():
            for p, d, value in zip(self.params, self._dicts or (), seen, strict=True):
                if isinstance(value, Tensor) and state.get(p) is d and key in d and d[key] is value:
                    d[key] = value.clone()

    def _gather(self, state: OptimizerState) -> None:
        """Take over the state of the parameters, which have the same keys and equal single values."""
        self._dicts = [state[p] for p in self.params if p in state]
        self._rows: dict[str, Tensor] = {}  # of single values: one for each parameter
        self._versions: dict[str, int] = {}
        self._seen: dict[str, list[Any]] = {}  # what the user sees of anything
        if not self._dicts:
            return
        self.known = {}
        for key, value in list(self._dicts[0].items()):
            values = [d[key] for d in self._dicts]
            if not isinstance(value, Tensor):
                self._seen[key], self.known[key] = values, value
            elif is_elementwise(value, self.params[0]):
                flat = self.known[key] = self._empty(shard_of(value))
                torch._foreach_copy_(self._cut(flat), [shard_of(v) for v in values])
                self._show_flat(key, flat)
            else:
                self._show_rows(key, torch.stack([v.detach() for v in values]))
                self.known[key] = self._rows[key][0].clone()

    def _agrees(self, state: OptimizerState) -> bool:
        """Return whether the user's state is still the one that is shown."""
        dicts = self._dicts
        if not dicts:
            return not any(p in state for p in self.params)
        return (
            all(map(is_, map(state.get, self.params), dicts))
            and all(len(d) == len(self._seen) for d in dicts)
            and all(all(map(is_, [d.get(key) for d in dicts], seen)) for key, seen in self._seen.items())
            and all(rows._version == self._versions[key] for key, rows in self._rows.items())
        )

    def _advance(self, key: str, value: Any, before: Any) -> Any:
        if not isinstance(value, Tensor):
            if value is not before:
                self._show(key, [value] * len(self.params))
        elif key in self._rows:
            self._rows[key][:] = value.detach()
            self._versions[key] = self._rows[key]._version
        elif value is not before:
            return before.copy_(value)
        return value

    def _begin(self, found: dict[str, Any], state: OptimizerState) -> None:
        """Make the state again, because it has other keys or kinds than before."""
        for p in self.params:
            state[p] = state.get(p, {})
            state[p].clear()
        self._dicts = [state[p] for p in self.params]
        self._rows, self._versions, self._seen = {}, {}, {}
        for key, value in found.items():
            if not isinstance(value, Tensor):
                self._show(key, [value] * len(self.params))
            elif value.shape == (self._total,):
                found[key] = value.detach().contiguous()
                self._show_flat(key, found[key])
            else:
                self._show_rows(key, value.detach().expand(len(self.params), *value.shape).clone())

    def _show_flat(self, key: str, flat: Tensor) -> None:
        views = self._cut(flat)
        self._show(key, list(map(_like, self.params, views)) if self._distributed else views)

    def _show_rows(self, key: str, rows: Tensor) -> None:
        self._rows[key], self._versions[key] = rows, rows._version
        self._show(key, list(rows.unbind(0)))

    def _show(self, key: str, values: list[Any]) -> None:
        self._seen[key] = values
        for d, value in zip(self._dicts, values, strict=True):
            d[key] = value


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


def _like(p: Any, shard: Tensor) -> Tensor:
    # The class comes with the parameter: a plain model must not load torch.distributed.tensor.
    return type(p).from_local(  # type: ignore[no-any-return]
        shard, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
    )
