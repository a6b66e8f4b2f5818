"""Stages at work in FSDP2's hooks: between ranks with the same shards, or among those that shard."""

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ReduceOp

from ..attach.agreement import broadcast_tensors
from ..attach.routes import through
from ..comm import Comm
from ..compressors import Compressor
from ..stages import Mean, Stage, State
from .handle import Handle, Scheme
from .scatter import gather, scatter
from .units import Unit

Layouts = Sequence[dict[Tensor, str]]
hooked: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()  # modules with a stage in their hooks


class Sharded(Handle):
    """Stages at work in the hooks of an FSDP2 model."""

    def __init__(
        self, make: Callable[[], Scheme], comm: Comm, timeout: Any, units: list[Unit], layouts: Layouts
    ) -> None:
        super().__init__(make, comm, timeout)
        self._units, self._layouts = units, [list(layout) for layout in layouts]
        with self._or_abandon():
            for i, unit in enumerate(units):
                hooked.add(unit.module)
                self._ends.append(partial(hooked.discard, unit.module))
                self._hook(i, unit.module)

    def _hook(self, i: int, module: Any) -> None:
        raise NotImplementedError

    def _fly(self, i: int, x: Tensor, work: Callable[[Stage, Tensor, State, Comm], Any]) -> bool:
        """Let the stage that acts do `work` with `x`, the gradients of unit `i`; the current stream waits for it."""
        route = self._begin()
        if route is None:
            return False
        stage = route.rule.stage
        layout = self._layouts[i] if stage.remembers() or stage.wants_shapes() else []
        if layout and sum(shard.numel() for shard in layout) != x.numel():
            raise RuntimeError(
                f"some parameters of {self._units[i].name or 'the model'} got no gradient, and {stage!r} wants all of "
                "them every time; call set_reduce_scatter_unused_params(True) on the model (torch 2.13), or shard "
                "those that may go unused in a module of their own"
            )
        place = route.fit(i, x, layout)
        route.take_off(place, self._clock.step, work, self._joint if self._remembers else None)
        route.arrive(place)
        return True


class Across(Sharded):
    """Stages between ranks that hold the same shards, in FSDP's all-reduce hooks."""

    def __init__(
        self,
        make: Callable[[], Scheme],
        comm: Comm,
        timeout: Any,
        units: list[Unit],
        layouts: Layouts,
        begin: nn.Module | None,
    ) -> None:
        super().__init__(make, comm, timeout, units, layouts)
        if begin is not None and comm.size > 1:
            tensors, device = [*begin.parameters(), *begin.buffers()], self._scheme.device
            with self._or_abandon():
                self._together("broadcast", lambda own: broadcast_tensors(tensors, own, device))

    def _hook(self, i: int, module: Any) -> None:
        module.set_all_reduce_hook(partial(self._average, i))
        self._ends.append(lambda: module.set_all_reduce_hook(None))

    def _average(self, i: int, x: Tensor) -> None:
        """Average `x` in place: this rank's shards of the gradients of unit `i`."""
        if x.is_cuda:  # FSDP may let go of it while the stream of its reductions still uses it
            x.record_stream(torch.cuda.current_stream(x.device))
        scale = self._scale()
        self._fly(i, x, lambda stage, x, state, comm: through(stage, x, state, comm, scale))


class Within(Sharded):
    """The first half of stages in the place of FSDP's reduce-scatter, and a compressor in that of its all-gather."""

    _alike = False  # each rank has a shard of its own

    def __init__(
        self,
        make: Callable[[], Scheme],
        comm: Comm,
        timeout: Any,
        units: list[Unit],
        layouts: Layouts,
        weights: Compressor | None,
    ) -> None:
        self._weights = weights
        super().__init__(make, comm, timeout, units, layouts)

    def _hook(self, i: int, module: Any) -> None:
        # Here, since it takes seconds to import; and torch says in no other way how to have its own again.
        from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

        module.set_custom_reduce_scatter(ReduceScatter(self, i))
        self._ends.append(lambda: module.set_custom_reduce_scatter(DefaultReduceScatter()))
        if self._weights is not None:
            module.set_custom_all_gather(AllGather(self, self._weights))
            self._ends.append(lambda: module.set_custom_all_gather(DefaultAllGather()))

    def _scatter(self, i: int, out: Tensor, x: Tensor) -> None:
        """Let `out` be this rank's shard of the mean of `x`: the exact one in steps in which no rule acts."""
        scale = self._scale()

        def work(stage: Stage, x: Tensor, state: State, comm: Comm) -> None:
            if scale is not None:
                x.mul_(scale.reciprocal())
            out.copy_(scatter(stage, x, state, comm))
            if scale is not None:
                out.mul_(scale)

        if not self._fly(i, x, work):
            self._together("gradients", lambda comm: out.copy_(scatter(Mean(), x, {}, comm)))


class Room:
    """Where FSDP puts what it sends and receives."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A new tensor."""
        return torch.empty(*size, dtype=dtype, device=device)


class ReduceScatter(Room):
    """FSDP's reduce-scatter of unit `i`, done by a handle."""

    def __init__(self, handle: Within, i: int) -> None:
        self.handle, self.i = handle, i

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        """The output is there when the current stream comes to it: there is nothing to wait for."""
        if op not in (ReduceOp.AVG, ReduceOp.SUM):
            raise RuntimeError(
                "set_gradient_divide_factor asks FSDP for a weighted sum, and a stage makes means; "
                "divide the loss instead"
            )
        self.handle._scatter(self.i, output_tensor, input_tensor)
        if op == ReduceOp.SUM:
            output_tensor.mul_(group.size())


class AllGather(Room):
    """FSDP's all-gather of weights, compressed."""

    def __init__(self, handle: Within, compressor: Compressor) -> None:
        self.handle, self.compressor = handle, compressor

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> None:
        """The output is there when the current stream comes to it: there is nothing to wait for."""
        self.handle._together("weights", lambda comm: gather(self.compressor, input_tensor, output_tensor, comm))
