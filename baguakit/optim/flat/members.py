"""Parameters that are stepped as one, and their places in a flat tensor."""

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate, compress
from typing import Any

import torch
from torch import Tensor, nn

from ...buckets import pieces

PLAIN = (Tensor, nn.Parameter)


def shard_of(x: Tensor) -> Tensor:
    """Return this rank's part of `x`: its shard if `x` is distributed (a DTensor, as FSDP2 makes them), else `x`."""
    return x if type(x) in PLAIN else x.to_local()  # type: ignore[attr-defined]


def is_strided(x: Tensor) -> bool:
    """Return whether `x` is a strided tensor: a plain one, or a distributed one with a local shard."""
    return x.layout is torch.strided and (type(x) in PLAIN or hasattr(x, "to_local"))


def storage_of(x: Tensor) -> int:
    """Return the address of the storage of `x`."""
    return x.untyped_storage().data_ptr()


class Members:
    """Parameters of one dtype and device, and their places in a flat tensor of all their values.

    Attributes:
        params: as the user holds them.
        locals: what this rank holds of each: plain tensors.
        sizes: the number of values of each; `total` is their sum.
        distributed: whether the parameters are distributed tensors.
    """

    def __init__(self, params: list[Tensor], locals: list[Tensor]) -> None:
        self.params, self.locals = params, locals
        self.sizes = [x.numel() for x in locals]
        self.total = sum(self.sizes)
        self.distributed = type(params[0]) not in PLAIN
        self._shapes, self._strides = [x.shape for x in locals], [x.stride() for x in locals]
        self._contiguous = all(x.is_contiguous() for x in locals)
        self._starts = [0, *accumulate(self.sizes)]

    def cut(self, flat: Tensor) -> list[Tensor]:
        """Return views of a flat tensor with the shapes and strides of the members."""
        if not self._contiguous:
            return pieces(flat, self.locals)
        return [part.view(shape) for part, shape in zip(flat.split(self.sizes), self._shapes, strict=True)]

    def empty(self, like: Tensor) -> Tensor:
        """Return a new flat tensor with the dtype and device of `like`."""
        return torch.empty(self.total, dtype=like.dtype, device=like.device)

    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return a new flat tensor with the values of `tensors`, which have the shapes of the members."""
        flat = self.empty(tensors[0])
        torch._foreach_copy_(self.cut(flat), list(tensors))
        return flat

    def place(self, at: slice) -> slice:
        """Return the place of the members `at` in a flat tensor."""
        return slice(self._starts[at.start], self._starts[at.stop])

    def run(self, tensors: Sequence[Tensor], present: list[bool] | None = None) -> Tensor | None:
        """Return the flat tensor of which `tensors` are already the pieces; None if they are not.

        `present` says which members have a tensor; None means all. The flat tensor also spans the places of the others.
        """
        if not tensors:
            return None
        first, starts, strides = tensors[0], self._starts[:-1], self._strides
        if present is not None and not all(present):
            starts, strides = list(compress(starts, present)), list(compress(strides, present))
        itemsize, begin = first.element_size(), first.storage_offset() - starts[0]
        base = first.data_ptr() - starts[0] * itemsize
        if [x.data_ptr() for x in tensors] != [base + itemsize * start for start in starts]:
            return None
        # Two allocations may touch by chance.
        if begin < 0 or begin + self.total > first.untyped_storage().nbytes() // itemsize:
            return None
        if [x.stride() for x in tensors] != strides or not (self._contiguous or self._dense):
            return None
        return first.detach().as_strided((self.total,), (1,), begin)

    @cached_property
    def _dense(self) -> bool:
        """Return whether pieces of a flat tensor have the strides of the members."""
        return [x.stride() for x in self.cut(self.empty(self.locals[0]))] == self._strides

    def distribute(self, views: list[Tensor]) -> list[Tensor]:
        """Return pieces of a flat tensor as the user sees them: distributed if the parameters are."""
        if not self.distributed:
            return views
        return [_like(p, view) for p, view in zip(self.params, views, strict=True)]


def _like(p: Any, shard: Tensor) -> Tensor:
    # The class comes with the parameter: a plain model must not load torch.distributed.tensor.
    return type(p).from_local(  # type: ignore[no-any-return]
        shard, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
    )
