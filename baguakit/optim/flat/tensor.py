"""A flat tensor: the weights and gradients of small parameters, adjacent while the optimizer steps."""

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from .members import Members, shard_of, storage_of
from .memory import Memory, OptimizerState, Segment


class Flat:
    """Members, and the segments of them that the optimizer steps.

    The user's weights stay in place: they are copied into a flat tensor before a step and back after it, unless they
    are already adjacent. So are the gradients, unless they are adjacent, as pieces of a bucket are. Members without a
    gradient are not stepped; they divide the others into segments.

    Attributes:
        segments: as of the latest step.
        storage: the address of the storage that held all gradients when this was laid out; 0 if there was none.
    """

    def __init__(self, members: Members, state: OptimizerState, storage: int = 0) -> None:
        self.members, self.storage = members, storage
        self.memory = Memory(members, state)
        self.segments: list[Segment] = []
        self._pointers = [x.data_ptr() for x in members.locals]
        run = members.run(members.locals)
        self._in_place = run is not None
        self._weights = members.empty(members.locals[0]) if run is None else run
        self._weight_views = [] if self._in_place else members.cut(self._weights)
        self._grads: Tensor | None = None  # where gradients are copied to
        self._grad_views: list[Tensor] = []
        self._version = 0
        self._present: list[bool] | None = None  # which members have a gradient, now and with these segments
        self._lent: list[Tensor] = []  # the gradients of this step

    def fits(self, state: OptimizerState) -> bool:
        """Return whether weights and state are still where they were when this was laid out."""
        params = self.members.params
        shards = [shard_of(p) for p in params] if self.members.distributed else params
        return self._pointers == [x.data_ptr() for x in shards] and self.memory.agrees(state)

    def load(self) -> bool:
        """Copy weights and gradients into the segments; return whether gradients had to be copied."""
        found = [p.grad for p in self.members.params]
        grads = [g for g in found if g is not None]
        self._lent = [shard_of(g) for g in grads] if self.members.distributed else grads
        self._divide([g is not None for g in found])
        if not self.segments:
            return False
        if not self._in_place:
            torch._foreach_copy_(self._chosen(self._weight_views), self._chosen(self.members.locals))
        flat = self.members.run(self._lent, self._present)
        copied = flat is None
        if flat is None:
            if self._grads is None:
                self._grads = self.members.empty(self._weights)
                self._grad_views = self.members.cut(self._grads)
            torch._foreach_copy_(self._chosen(self._grad_views), self._lent)
            flat, self._version = self._grads, self._grads._version
        else:
            self._grads, self._grad_views = None, []
        for segment in self.segments:
            segment.param.grad = flat[self.members.place(segment.at)]
        return copied

    def _divide(self, present: list[bool]) -> None:
        """Make segments of members that have a gradient and equal single values."""
        if present == self._present:
            for segment in self.segments:
                weights = self._weights[self.members.place(segment.at)]
                if segment.param.data_ptr() != weights.data_ptr():  # the optimizer has put its weights elsewhere
                    segment.param = nn.Parameter(weights)
            return
        self._present, self.segments, start = present, [], 0
        for (wanted, _), run in groupby(zip(present, self.memory.rows(), strict=True)):
            at = slice(start, start := start + len(list(run)))
            if wanted:
                param = nn.Parameter(self._weights[self.members.place(at)])
                self.segments.append(Segment(at, param, self.memory.of(at)))

    def _chosen(self, tensors: list[Tensor]) -> list[Tensor]:
        """Return the tensors of the members that have a gradient."""
        if self._present is None or len(self._lent) == len(tensors):
            return tensors
        return [x for x, wanted in zip(tensors, self._present, strict=True) if wanted]

    def store(self, unscaled: bool) -> None:
        """Copy the weights back, and the gradients if the step wrote to them, as it does when it unscales them."""
        for segment in self.segments:
            weights = self._weights[self.members.place(segment.at)]
            if segment.param.data_ptr() != weights.data_ptr():
                weights.copy_(segment.param.detach())
        if not self.segments:
            return
        theirs = self._chosen(self.members.locals)
        if self._in_place:  # autograd must see that the weights have changed
            torch.autograd.graph.increment_version(theirs)
        else:
            torch._foreach_copy_(theirs, self._chosen(self._weight_views))
        if self._grads is not None and (unscaled or self._grads._version != self._version):
            torch._foreach_copy_(self._lent, self._chosen(self._grad_views))

    def remember(self, found: Sequence[dict[str, Any] | None], state: OptimizerState) -> None:
        """Update the memory with the segments' states after the step, and drop the gradients."""
        for segment, each in zip(self.segments, found, strict=True):
            borrowed = {storage_of(x) for x in (self._weights, segment.param.grad) if x is not None}
            self.memory.update(segment, each, state, borrowed)
            segment.param.grad = None
        self._lent = []
