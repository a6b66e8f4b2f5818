"""Stages at work in FSDP2's hooks: between ranks with the same shards, or among the ranks that share one model.

Among these a rank gets its own shard of the mean, and sends only what the others need:

    s_r ← (1/n) Σ_q shard r of x_q                      Mean()
    s_r ← (1/n) Σ_q Q(shard r of x_q)                   CompressedMean(Q): one loss, where an all-reduce has two
    y ← x + e;  s_r ← one of these of y;  e ← y − Q(y)  ErrorFeedback(CompressedMean(Q))
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ReduceOp

from ..buckets import real
from ..comm import Comm, SentFormat
from ..compressors import Compressor
from ..flights import Ledger
from ..keeping import finite, update_if_finite_
from ..primitives import compressed_all_gather, compressed_reduce_scatter
from ..report import Row, row_of
from ..runtime import Setup, broadcast_tensors, or_abandon
from ..stages import CompressedMean, ErrorFeedback, Mean, Stage, State
from .handle import HookLife

hooked: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()  # modules with a stage in their hooks
Hooks = Sequence[tuple[str, Any, Sequence[Tensor]]]
"""For each unit its name, the module that takes hooks, and stand-ins for the shards in its gradients, in order."""


class ShardedLife(HookLife):
    """The life of stages in the hooks of an FSDP2 model."""

    def __init__(self, make: Callable[[], Setup], comm: Comm, timeout: Any, hooks: Hooks) -> None:
        super().__init__(make, comm, timeout)
        self.hooks = hooks
        with or_abandon(self):
            for i, (_, module, _) in enumerate(hooks):
                hooked.add(module)
                self.unhook.append(partial(hooked.discard, module))
                self.hook(i, module)

    def hook(self, i: int, module: Any) -> None:
        """Hook the module of unit `i`."""
        raise NotImplementedError

    def fly(self, i: int, x: Tensor, *how: Any) -> bool:
        """Let the stage that acts average `x` (n,), the gradients of unit `i`; the current stream waits for it.

        Returns:
            True if a stage acts in this step.
        """
        runner = self.begin()
        if runner is None:
            return False
        stage, (name, _, layout) = runner.rule.stage, self.hooks[i]
        if not (stage.remembers() or stage.wants_shapes()):
            layout = []
        elif sum(shard.numel() for shard in layout) != x.numel():
            raise RuntimeError(
                f"some parameters of {name or 'the model'} got no gradient, and {stage!r} wants all of them every "
                "time; call set_reduce_scatter_unused_params(True) on the model (torch 2.13), or shard those that may "
                "go unused in a module of their own"
            )
        runner.arrive(self.launch(runner, i, x, layout, *how, self.show_fault))
        return True


class AcrossShards(ShardedLife):
    """Stages between ranks that hold the same shards, in FSDP's all-reduce hooks.

    The weights and buffers of the model `begin`, if given, begin as on rank 0.
    """

    def __init__(self, make: Any, comm: Comm, timeout: Any, hooks: Hooks, begin: nn.Module | None) -> None:
        super().__init__(make, comm, timeout, hooks)
        if begin is not None and comm.size > 1:
            tensors, device = [*begin.parameters(), *begin.buffers()], self.setup.device
            with or_abandon(self):
                self.together("broadcast", lambda own: broadcast_tensors(tensors, own, device))

    def hook(self, i: int, module: Any) -> None:
        module.set_all_reduce_hook(partial(self.average, i))
        self.unhook.append(partial(module.set_all_reduce_hook, None))

    def average(self, i: int, x: Tensor) -> None:
        """Average `x` in place: this rank's shards of the gradients of unit `i`."""
        if x.is_cuda:  # FSDP may let go of it while the stream of its reductions still uses it
            x.record_stream(torch.cuda.current_stream(x.device))
        self.fly(i, real(x).view(-1), None, None)


class WithinShards(ShardedLife):
    """The first half of stages in the place of FSDP's reduce-scatter, and a compressor in that of its all-gather."""

    alike = False  # each rank has a shard of its own

    def __init__(self, make: Any, comm: Comm, timeout: Any, hooks: Hooks, weights: Compressor | None) -> None:
        self.weights, self.gathers = weights, list[AllGather]()
        super().__init__(make, comm, timeout, hooks)

    def rows(self) -> Iterable[Row]:
        return [each.row(len(self.runners)) for each in self.gathers if each.ledger.launches]

    def hook(self, i: int, module: Any) -> None:
        # Here, since it takes seconds to import; and torch says in no other way how to have its own again.
        from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

        module.set_custom_reduce_scatter(ReduceScatter(self, i))
        self.unhook.append(lambda: module.set_custom_reduce_scatter(DefaultReduceScatter()))
        if self.weights is not None:
            self.gathers.append(AllGather(self, i, self.weights))
            module.set_custom_all_gather(self.gathers[-1])
            self.unhook.append(lambda: module.set_custom_all_gather(DefaultAllGather()))


class Allocator:
    """An allocator of the tensors that FSDP sends and receives."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a new tensor."""
        return torch.empty(*size, dtype=dtype, device=device)


class ReduceScatter(Allocator):
    """FSDP's reduce-scatter of unit `i`: the exact mean in steps in which no rule acts."""

    def __init__(self, life: WithinShards, i: int) -> None:
        self.life, self.i = life, i

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        """Fill the output with this rank's shard, on the current stream. There is nothing to wait for."""
        if op not in (ReduceOp.AVG, ReduceOp.SUM):
            raise RuntimeError(
                "set_gradient_divide_factor asks FSDP for a weighted sum, and a stage makes means; "
                "divide the loss instead"
            )
        life, out, x = self.life, real(output_tensor).view(-1), real(input_tensor).view(-1)
        if not life.fly(self.i, x, scatter, out):
            life.together("gradients", lambda comm: life.show_fault(out.copy_(scatter(Mean(), x, {}, comm))))
        if op == ReduceOp.SUM:
            output_tensor.mul_(group.size())


class AllGather(Allocator):
    """FSDP's all-gather of the weights of unit `i`, compressed, and what it has sent."""

    def __init__(self, life: WithinShards, i: int, compressor: Compressor) -> None:
        self.life, self.i, self.compressor = life, i, compressor
        self.values, self.dtype, self.ledger = 0, "", Ledger()

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> None:
        """Fill the output, on the current stream. There is nothing to wait for."""
        channel, formats = self.life.channel, list[SentFormat]()

        def work(comm: Comm) -> None:
            comm = comm.for_flight(0, None, 0, self.ledger.sent, formats)
            if output_tensor.is_floating_point():
                compressed_all_gather(input_tensor, self.compressor, comm, out=output_tensor)
            else:
                comm.note(self.compressor, output_tensor.dtype, "not floating-point")
                output_tensor.copy_(comm.all_gather(input_tensor))

        collective = channel.begin("weights", work)
        self.ledger.launches += 1
        channel.monitor.wait_for(collective)
        self.values, self.dtype = output_tensor.numel(), str(output_tensor.dtype).removeprefix("torch.")
        self.ledger.landed(formats)
        self.ledger.flights.append(collective)

    def row(self, number: int) -> Row:
        """Return the row of a report."""
        return row_of(self.ledger, f"weights={self.compressor!r}", number, self.i, self.values, self.dtype)


def check_scatter(stage: Stage) -> None:
    """Raise a TypeError unless `stage` has a first half."""
    inner = stage.inner if isinstance(stage, ErrorFeedback) else stage
    if not isinstance(inner, Mean | CompressedMean):
        raise TypeError(
            f"a sharded model needs only its own shard of the mean, and {stage!r} has no half that makes one; use "
            "Mean(), CompressedMean() or ErrorFeedback(CompressedMean()), or shard within nodes and give "
            "comm=bk.Comm(mesh.get_group('inter')) for any stage between them"
        )


def scatter(stage: Stage, x: Tensor, state: State, comm: Comm) -> Tensor:
    """Return this rank's shard (n / size,) of the result of `stage` for `x` (n,), n being a multiple of the ranks."""
    if not isinstance(stage, ErrorFeedback):
        return _scatter(stage, x, comm, None)
    e = state["residual"]
    lost = torch.zeros_like(e)
    shard = _scatter(stage.inner, x + e, comm, lost)
    # A shard that is not finite is known to one rank only, and all must keep what they had.
    is_finite = finite(shard).float()
    update_if_finite_(e, lost, where=comm.all_reduce(is_finite, ReduceOp.MIN) > 0)
    return shard.to(x.dtype)


def _scatter(stage: Any, x: Tensor, comm: Comm, lost: Tensor | None) -> Tensor:
    if isinstance(stage, Mean):
        return comm.reduce_scatter(x.mul_(1 / comm.size))
    return compressed_reduce_scatter(x, stage.compressor, comm, residual=lost, average=True)
