"""Flat tensors join the weights, gradients and state of small parameters while the optimizer steps.

The user's `optimizer.state` is authoritative. *Elementwise* state has a value for each weight: the user's state has
views of a flat tensor. A *single* value (`step`) is equal for all parameters of a flat tensor. Each parameter still has
a separate tensor with this value, because torch increments each tensor. Python numbers in the state are equal, too.
"""

from collections import defaultdict
from collections.abc import Hashable, MutableMapping, Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from ..buckets import pieces
from ..tensors import sharing

OptimizerState = MutableMapping[Any, dict[str, Any]]
PLAIN = (Tensor, nn.Parameter)
NUMBERS = (bool, int, float, complex, str, type(None))

# On each device: a parameter with more values than the first number is stepped alone; a flat tensor has at most the
# second number. Measured on a CPU with 1,000 parameters: copies cost as much as they save at about 14,000 values per
# parameter with AdamW in torch's loop, at 4,000 with SGD, and at 3,000 with torch's fused AdamW. Flat tensors of more
# than 2^18 values do not fit in the cache. A GPU starts a kernel in the time that it streams about a million values.
CPU, GPU = (1 << 12, 1 << 18), (1 << 20, 1 << 26)


def shard_of(x: Tensor) -> Tensor:
    """Return this rank's part of `x`: its shard if `x` is distributed (a DTensor, as FSDP2 makes them), else `x`."""
    return x if type(x) in PLAIN else x.to_local()  # type: ignore[attr-defined]


def storage_of(x: Tensor) -> int:
    """Return the address of the storage of `x`."""
    return x.untyped_storage().data_ptr()


def is_elementwise(value: Tensor, p: Tensor) -> bool:
    """Return whether `value`, a state tensor of `p`, has a value for each value of `p`."""
    return (type(value) in PLAIN) == (type(p) in PLAIN) and value.shape == p.shape


class Flat:
    """Parameters that are stepped as one tensor. All have a gradient, and all have the same keys of state.

    The user's weights stay in place: they are copied to a flat tensor before a step and back after it. Gradients are
    copied to a second flat tensor, and back only if the step changed them. A shard that is alone is not copied.
    """

    def __init__(self, params: list[Tensor], state: OptimizerState) -> None:
        self.params = params  # the user's
        self._locals = [shard_of(p) for p in params]
        self._pointers = [x.data_ptr() for x in self._locals]
        self._total = sum(x.numel() for x in self._locals)
        self._weights, self._views = self._joined(self._locals)
        self.param = nn.Parameter(self._weights)  # the optimizer steps this; `load` sets its gradient
        self._grads: list[Tensor] = []
        self._gradient: Tensor | None = None  # of `param`
        self._gradient_views: list[Tensor] = []
        self.known: dict[str, Any] | None = None  # the optimizer's state after its latest step, if there was one
        self._dicts: list[Any] = [None] * len(params)  # the user's state of each parameter; None before there is one
        self._seen: dict[str, list[Any]] = {}  # by key, the values in these states
        self._rows: dict[str, tuple[Tensor, int]] = {}  # by key of single values: a row for each parameter; the version
        if params[0] in state:
            self._show({key: self._together([state[p][key] for p in params]) for key in state[params[0]]}, state)

    def fits(self, state: OptimizerState) -> bool:
        """Return False if the user moved weights in memory, replaced state, or wrote to a state tensor of one value."""
        return (
            self._pointers == [shard_of(p).data_ptr() for p in self.params]
            and all(map(is_, map(state.get, self.params), self._dicts))
            and all(len(d) == len(self._seen) for d in self._dicts if d is not None)
            and all(all(map(is_, [d.get(key) for d in self._dicts], seen)) for key, seen in self._seen.items())
            and all(rows._version == version for rows, version in self._rows.values())
        )

    def load(self) -> None:
        """Copy weights and gradients into flat tensors."""
        self.param.data = self._weights
        self._grads = [shard_of(p.grad) for p in self.params if p.grad is not None]
        if self._gradient is None or not self._gradient_views:
            self._gradient, self._gradient_views = self._joined(self._grads)
        for views, own in ((self._views, self._locals), (self._gradient_views, self._grads)):
            if views:
                torch._foreach_copy_(views, own)
        self.param.grad, self._version = self._gradient, self._gradient._version

    def store(self, found: dict[str, Any] | None, state: OptimizerState, unscaled: bool) -> None:
        """Copy back the weights and the state `found`; also the gradients, if the step changed them, or if `unscaled`.

        `unscaled`: the step itself undid the loss scale. Raise a TypeError if a part of the state cannot be divided.
        """
        grad = self.param.grad
        if self.param.data_ptr() != self._weights.data_ptr():  # the optimizer has moved the weights to other memory
            self._weights.copy_(self.param.detach())
        if self._views:
            torch._foreach_copy_(self._locals, self._views)
        else:  # autograd must see that the weights have changed
            torch.autograd.graph.increment_version(self._locals)
        if self._gradient_views and (unscaled or self._gradient_views[0]._version != self._version):
            torch._foreach_copy_(self._grads, self._gradient_views)
        self.param.grad, self._grads = None, []
        if found is None:
            return
        borrowed = {storage_of(x) for x in (self._weights, self.param, grad) if isinstance(x, Tensor)}
        for key, value in found.items():
            if isinstance(value, Tensor) and storage_of(value) in borrowed:  # later steps overwrite it
                found[key] = value.clone()
        self._show(found, state)

    def release(self, state: OptimizerState) -> None:
        """Replace the state tensors that are still pieces of a flat tensor by copies, one for each parameter."""
        for key, seen in self._seen.items():
            for p, before, value in zip(self.params, self._dicts, seen, strict=True):
                d = state.get(p)
                if d is not None and d is before and d.get(key) is value and isinstance(value, Tensor):
                    d[key] = value.clone()

    def _joined(self, tensors: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Return a flat tensor for `tensors`, and its pieces; of one contiguous tensor, a view of it, and no pieces."""
        if len(tensors) == 1 and tensors[0].is_contiguous():
            return tensors[0].detach().view(-1), []
        flat = tensors[0].new_empty(self._total)
        return flat, pieces(flat, self._locals)

    def _together(self, values: list[Any]) -> Any:
        """Return one value for the flat tensor, joined from `values`, the state of all parameters under one key."""
        if not isinstance(values[0], Tensor):
            return values[0]
        if not is_elementwise(values[0], self.params[0]):
            return values[0].detach().clone()
        flat = shard_of(values[0]).new_empty(self._total)
        torch._foreach_copy_(pieces(flat, self._locals), [shard_of(v) for v in values])
        return flat

    def _show(self, found: dict[str, Any], state: OptimizerState) -> None:
        """Write the flat tensor's state `found` to the state of each parameter. Skip objects that are unchanged."""
        before = self.known or {}
        if self.known is None or before.keys() != found.keys():
            before, self._seen, self._rows = {}, {}, {}
            for p in self.params:
                state.setdefault(p, {}).clear()
            self._dicts = [state[p] for p in self.params]
        count = len(self.params)
        for key, value in found.items():
            if isinstance(value, NUMBERS):
                if key not in before or value is not before[key]:
                    self._set(key, [value] * count)
            elif not isinstance(value, Tensor):
                raise TypeError(f"it is fused and keeps {key!r}, a {type(value).__name__}: no parameter has a part")
            elif value.shape == (self._total,):
                self._rows.pop(key, None)
                if value is not before.get(key):
                    found[key] = value.detach().contiguous()
                    views = pieces(found[key], self._locals)
                    self._set(key, [_like(p, x) for p, x in zip(self.params, views, strict=True)])
            elif value.numel() == 1:
                if key not in self._rows:
                    rows = value.detach().expand(count, *value.shape).clone()
                    self._set(key, list(rows.unbind(0)))
                else:
                    rows = self._rows[key][0]
                    rows[:] = value.detach()
                self._rows[key] = rows, rows._version
            else:
                raise TypeError(
                    f"it is fused and keeps {key!r} of shape {tuple(value.shape)} for {self._total} values: neither "
                    "one for each nor one for all"
                )
        self.known = found

    def _set(self, key: str, values: list[Any]) -> None:
        self._seen[key] = values
        for d, value in zip(self._dicts, values, strict=True):
            d[key] = value


def _like(p: Any, x: Tensor) -> Any:
    # The class is taken from the parameter, because a plain model must not import torch.distributed.tensor.
    more = {"run_check": False, "shape": p.shape, "stride": p.stride()}
    return x if type(p) in PLAIN else type(p).from_local(x, p.device_mesh, p.placements, **more)


# Divide parameters into flat tensors


def divide(params: Sequence[Tensor], state: OptimizerState) -> list[Flat]:
    """Return flat tensors of the small parameters with a gradient, each of one dtype, device and kind of state."""
    kinds: dict[Hashable, list[Tensor]] = defaultdict(list)
    able = [p for p in params if _is_candidate(p)]
    shared = {i for group in sharing([shard_of(p) for p in able]) for i in group if len(group) > 1}
    for p in (p for i, p in enumerate(able) if i not in shared):  # torch must step those one after another
        if (kind := _kind(p, state)) is not None:
            kinds[kind].append(p)
    chunks = [chunk for each in kinds.values() for chunk in _chunks(each)]
    # A single plain tensor needs no flat tensor.
    return [Flat(chunk, state) for chunk in chunks if len(chunk) > 1 or type(chunk[0]) not in PLAIN]


def _is_candidate(p: Tensor) -> bool:
    """Return whether a flat tensor can hold `p`: it is small or distributed, and it and its gradient are dense."""
    # If p has no dimensions, its state `exp_avg` cannot be distinguished from `step`.
    if p.grad is None or p.dim() == 0 or not (_is_strided(p) and _is_strided(p.grad)):
        return False
    shard, grad = shard_of(p), shard_of(p.grad)
    if type(shard) not in PLAIN or (grad.shape, grad.dtype) != (shard.shape, shard.dtype):
        return False
    # A shard of any size is accepted, because no optimizer takes plain shards and distributed tensors in one call.
    return 0 < shard.numel() <= (CPU if p.is_cpu else GPU)[0] or type(p) not in PLAIN


def _is_strided(x: Tensor) -> bool:
    return x.layout is torch.strided and (type(x) in PLAIN or hasattr(x, "to_local"))


def _kind(p: Tensor, state: OptimizerState) -> Hashable:
    """Return a key that is equal for parameters that can share a flat tensor; None if the state of `p` prevents it."""
    kind: list[Any] = [p.dtype, p.device, type(p) in PLAIN, p in state]
    for key, value in sorted(state.get(p, {}).items(), key=lambda item: str(item[0])):
        if isinstance(value, NUMBERS):
            kind += [key, type(value), value]
            continue
        # State in shared memory is not joined, because other processes would not see the flat copy.
        if not isinstance(value, Tensor) or not _is_strided(value) or (value.is_cpu and shard_of(value).is_shared()):
            return None
        kind += [key, value.dtype, value.device]
        if not is_elementwise(value, p):
            if value.numel() != 1 or type(value) not in PLAIN:
                return None
            kind += [value.shape, value.item()]
    return tuple(kind)


def _chunks(params: Sequence[Tensor]) -> list[list[Tensor]]:
    """Divide parameters into lists, one for each flat tensor of limited length. A large shard is alone."""
    chunks: list[list[Tensor]] = []
    (small, most), room = CPU if params[0].is_cpu else GPU, -1
    for p in params:
        n = shard_of(p).numel()
        if n > min(room, small):
            chunks.append([])
            room = most if n <= small else n
        chunks[-1].append(p)
        room -= n
    return chunks
