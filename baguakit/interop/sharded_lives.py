"""Stages at work in FSDP2's hooks: between ranks with the same shards, or among those that shard.

A `Unit` has the parameters that FSDP2 reduces together. No other module reads FSDP2's own objects: torch documents how
to hook a module, but neither the modules that share one reduction (`fully_shard([a, b])`) nor the layout of parameters
in the tensor that a hook gets. Both are read here, as torch 2.13 has them.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ReduceOp

from ..buckets import real
from ..comm import Comm, SentFormat, members_of
from ..compressors import Compressor
from ..flights import Ledger
from ..primitives import compressed_all_gather
from ..report import Row, row_of
from ..runtime import Setup, broadcast_tensors, fsdp_modules, plain_names
from ..stages import Mean
from .handle import HookLife
from .scatter import scatter


@dataclass(frozen=True, eq=False)
class Unit:
    """The parameters of one `fully_shard` call.

    Attributes:
        name: of the module, or the first of several.
        module: takes the hooks.
        group: the process group over which FSDP shards; ranks reduce and gather in it.
        replicated: FSDP averages over a second dimension of its mesh as well.
        names, shards: of every trainable parameter its name, and the shape of a rank's padded shard of it; a complex
            one is real pairs.
    """

    name: str
    module: Any
    group: Any
    replicated: bool
    names: tuple[str, ...]
    shards: tuple[torch.Size, ...]

    @property
    def ranks(self) -> list[int]:
        """Return the ranks over which it is sharded."""
        return members_of(self.group)

    def scattered(self) -> dict[Tensor, str]:
        """Return the layout of its scattered gradients: a stand-in without memory for each shard, and its name."""
        return {
            torch.empty(shape, dtype=torch.float32, device="meta"): name
            for name, shape in zip(self.names, self.shards, strict=True)
        }

    def unscattered(self) -> dict[Tensor, str]:
        """Return the layout before: the shards of the first rank, then those of the second, and so on."""
        n = len(self.ranks)
        return {shard: f"{name}[{r}/{n}]" for r in range(n) for shard, name in self.scattered().items()}


def units_of(model: nn.Module) -> list[Unit]:
    """Return the units of a model, in the order of its modules.

    Raises:
        TypeError: `fully_shard` has not been called on any of its modules.
        ValueError: a module's parameters are sharded over several meshes.
    """
    units, seen = [], set()
    module_names = {module: name for name, module in model.named_modules()}
    plain = plain_names([name for name, _ in model.named_parameters()])
    for name, module in fsdp_modules(model):
        state = module._get_fsdp_state()
        if id(state) in seen:  # one of several that were sharded together
            continue
        seen.add(id(state))
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:  # earlier versions knew one mesh a module
            groups = [state._fsdp_param_group] if state._fsdp_param_group else []
        if len(groups) > 1:
            raise ValueError(f"the parameters of {name or 'the model'} are sharded over {len(groups)} meshes; use one")
        if groups:
            units.append(_unit(name, module, groups[0], module_names, plain))
    if not units:
        raise TypeError(
            f"no module of this model, a {type(model).__name__}, has been given to torch.distributed.fsdp.fully_shard"
        )
    return units


def _unit(name: str, module: Any, group: Any, module_names: dict[nn.Module, str], plain: dict[str, str]) -> Unit:
    trainable = [p for p in group.fsdp_params if p.sharded_param.requires_grad]
    names = []
    for p in trainable:
        at = module_names[p._module_info.module]
        full = f"{at}.{p._module_info.param_name}" if at else p._module_info.param_name
        names.append(plain.get(full, full))
    shards = [torch.Size([*p.padded_sharded_param_size, *[2] * p.sharded_param.is_complex()]) for p in trainable]
    mesh = group.mesh_info
    shard_group = getattr(mesh, "shard_process_group", None)
    if shard_group is None:
        raise ValueError(f"{name or 'the model'} is replicated and not sharded; use bk.interop.ddp or bk.attach")
    replicated = getattr(mesh, "replicate_process_group", None) is not None
    return Unit(name, module, shard_group, replicated, tuple(names), tuple(shards))


hooked: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()  # modules with a stage in their hooks


class ShardedLife(HookLife):
    """The life of stages in the hooks of an FSDP2 model.

    Args:
        make, comm, timeout: as of a life.
        units: of the model.
        layouts: for each unit, stand-ins for the shards in its gradients, in order.
        weights: a compressor of the weights that FSDP gathers, or None.
        begin: a model whose weights and buffers begin as on rank 0, or None.
    """

    def __init__(
        self,
        make: Callable[[], Setup],
        comm: Comm,
        timeout: Any,
        units: list[Unit],
        layouts: Sequence[dict[Tensor, str]],
        weights: Compressor | None,
        begin: nn.Module | None,
    ) -> None:
        super().__init__(make, comm, timeout)
        self.units, self.layouts, self.weights = units, [list(layout) for layout in layouts], weights
        self.gathers: list[AllGather] = []
        with self.or_abandon():
            for i, unit in enumerate(units):
                hooked.add(unit.module)
                self.unhook.append(partial(hooked.discard, unit.module))
                self.hook(i, unit.module)
            if begin is not None and comm.size > 1:
                tensors, device = [*begin.parameters(), *begin.buffers()], self.setup.device
                self.together("broadcast", lambda own: broadcast_tensors(tensors, own, device))

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
        stage = runner.rule.stage
        layout = self.layouts[i] if stage.remembers() or stage.wants_shapes() else []
        if layout and sum(shard.numel() for shard in layout) != x.numel():
            raise RuntimeError(
                f"some parameters of {self.units[i].name or 'the model'} got no gradient, and {stage!r} wants all of "
                "them every time; call set_reduce_scatter_unused_params(True) on the model (torch 2.13), or shard "
                "those that may go unused in a module of their own"
            )
        runner.arrive(self.launch(runner, i, x, layout, *how, self.show_fault))
        return True


class AcrossShards(ShardedLife):
    """Stages between ranks that hold the same shards, in FSDP's all-reduce hooks."""

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

    def scatter(self, i: int, out: Tensor, x: Tensor) -> None:
        """Fill `out` with this rank's shard of the mean of `x`: the exact mean in steps in which no rule acts."""
        out, x = real(out).view(-1), real(x).view(-1)
        if not self.fly(i, x, scatter, out):
            self.together("gradients", lambda comm: self.show_fault(out.copy_(scatter(Mean(), x, {}, comm))))


class Allocator:
    """An allocator of the tensors that FSDP sends and receives."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a new tensor."""
        return torch.empty(*size, dtype=dtype, device=device)


class ReduceScatter(Allocator):
    """FSDP's reduce-scatter of unit `i`, done by a life."""

    def __init__(self, life: WithinShards, i: int) -> None:
        self.life, self.i = life, i

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        """Fill the output, on the current stream. There is nothing to wait for."""
        if op not in (ReduceOp.AVG, ReduceOp.SUM):
            raise RuntimeError(
                "set_gradient_divide_factor asks FSDP for a weighted sum, and a stage makes means; "
                "divide the loss instead"
            )
        self.life.scatter(self.i, output_tensor, input_tensor)
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
