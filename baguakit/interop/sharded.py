"""Stages in FSDP2 (`torch.distributed.fsdp.fully_shard`), one hook for each FSDP module.

    `comm` has ranks with the same shards       FSDP scatters gradients; then the stage averages shards over `comm`
    `comm` is None, or the group of the shards  the first half of the stage averages and scatters gradients

The first case allows any stage between nodes, with sharding within nodes. FSDP runs its reductions and their hooks on
a separate stream, which waits for the flight of a hook, so that backward continues. On a CPU, backward waits.

Let x_q be the gradients of rank q, one of n ranks. The first half of a stage gives rank r its shard s_r of the mean:

    s_r ← (1/n) Σ_q shard r of x_q       Mean()
    s_r ← (1/n) Σ_q Q(shard r of x_q)    CompressedMean(Q): one compression; an all-reduce has two

`ErrorFeedback(CompressedMean(Q), decay=β)` averages y_q = x_q + β e_q instead, and keeps the error e_q ← y_q − Q(y_q).
"""

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ReduceOp

from ..arguments import instance, message, truth
from ..buckets import real
from ..comm import Comm, SentFormat, Weight, check_comm, members_of, weighed
from ..compressors import Compressor
from ..flights import Ledger, Weighing
from ..keeping import finite
from ..primitives import compressed_all_gather, compressed_reduce_scatter, scattered_mean
from ..report import Row, row_of
from ..runtime.agreement import Setup, as_time, broadcast_tensors, fsdp_modules, named, plain_names, reshard
from ..runtime.runtime import or_abandon
from ..stages import CompressedMean, ErrorFeedback, Mean, State
from .handle import Handle, HookLife, rules_on_gradients

_hooked: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()  # modules with a stage in their hooks


def fsdp(
    model: nn.Module,
    stage: Any,
    comm: Comm | None = None,
    *,
    weights: Compressor | None = None,
    broadcast: bool = True,
    scaler: Any = None,
    timeout: float | timedelta | None = None,
    weight: Weight = None,
) -> Handle:
    """Let a stage average the gradients of an FSDP2 model.

        mesh = init_device_mesh("cuda", (nodes, ranks_of_a_node), mesh_dim_names=("inter", "intra"))
        fully_shard(model, mesh=mesh["intra"])
        handle = bk.interop.fsdp(model, bk.stages.CompressedMean(), comm=bk.Comm(mesh.get_group("inter")))

    Collective. The stage has a separate state for each FSDP module. `set_requires_gradient_sync(False)` still
    accumulates gradients without reducing them. The `Handle` is as that of `bk.interop.ddp`.

    Args:
        model: a model whose modules have been given to `fully_shard`, on one mesh dimension.
        stage: with `comm`, any stage, or an algorithm on gradients such as `bk.algorithms.power_sgd()`. Without `comm`,
            `Mean()`, `CompressedMean()` or `ErrorFeedback(CompressedMean())`: 8 bits send 1/4 of the bytes of fp32.
        comm: the ranks that hold the same shards; None means the ranks over which FSDP shards.
        weights: a compressor of the weights that FSDP gathers (only without `comm`). All ranks then compute with the
            same rounded weights; the optimizer's weights are not rounded. A report has a row for each module's weights.
        broadcast: with `comm`, begin with the weights and buffers of rank 0 of `comm`.
        scaler: the `ShardedGradScaler` in use; stages then get unscaled gradients.
        timeout: seconds (or a timedelta) after which a flight fails and the rank at fault is named; None: 600.
        weight: as in `bk.attach`. A function is called once in each backward that averages. With `comm`, give all ranks
            over which FSDP shards the same weight: FSDP itself averages over them.

    Raises:
        TypeError, ValueError: arguments cannot work together, or differ between ranks. Raised on every rank.
    """
    instance("model", model, nn.Module, "an nn.Module")
    reshard(model)
    if comm is not None:
        check_comm(comm)
    units = units_of(model, comm)
    comm = Comm(units[0].group) if comm is None else comm
    across = members_of(comm.group) != units[0].ranks

    def make() -> Setup:
        truth("broadcast", broadcast)
        rules = rules_on_gradients(stage)
        check_units(units, comm, across)
        device = next(model.parameters()).device
        if comm._home(device) != device:
            raise ValueError(
                f"flights of tensors on {device} compute on the CPU, and FSDP's hooks where its shards are; use "
                "bk.attach with a model that is not sharded"
            )
        if weights is not None and (across or not isinstance(weights, Compressor)):
            wanted = "a compressor such as MinMaxUInt8(), and only without comm="
            raise TypeError(message("weights", wanted, weights))
        for whole in (rule.stage for rule in rules if not across):
            if not isinstance(whole.inner if isinstance(whole, ErrorFeedback) else whole, Mean | CompressedMean):
                raise TypeError(
                    f"a sharded model needs only its own shard of the mean, and {whole!r} has no half that makes one; "
                    "use Mean(), CompressedMean() or ErrorFeedback(CompressedMean()), or shard within nodes and give "
                    "comm=bk.Comm(mesh.get_group('inter')) for any stage between them"
                )
        names = {shard: name for unit in units for shard, name in unit.shards.items()}
        frozen = tuple(name for p, name in named(model).items() if not p.requires_grad)
        lines = (f"weights={weights!r}", *(f"{name} {tuple(shard.shape)}" for shard, name in names.items()))
        return Setup(rules, names, frozen, device, as_time(timeout), scaler, lines, weight=weight)

    life = ShardedLife(make, comm, timeout, units, across, weights)
    if across and broadcast and comm.size > 1:
        tensors, device = [*model.parameters(), *model.buffers()], life.setup.device
        with or_abandon(life):
            life.together("broadcast", lambda own: broadcast_tensors(tensors, own, device))
    return Handle(life)


@dataclass(frozen=True, eq=False)
class Unit:
    """The parameters of one `fully_shard` call, which FSDP2 reduces together.

    Torch documents how to hook a module, but not which modules share one reduction (`fully_shard([a, b])`), nor the
    layout of parameters in the tensor that a hook gets. `units_of` alone reads both from FSDP2's internal objects.
    """

    name: str
    module: Any  # that takes the hooks: the first if the call was given several
    group: Any  # in which FSDP shards the parameters
    ranks: list[int]  # of the group
    # {meta tensor: name}. The meta tensors have the shapes of the padded shards of trainable parameters, in the order
    # of the gradients that a hook gets; complex shards have pairs of real values. If FSDP has not scattered the
    # gradients, the shards of the first rank come first, then all shards of the second, and so on.
    shards: dict[Tensor, str]


def units_of(model: nn.Module, comm: Comm | None) -> list[Unit]:
    """Return the units of a model, in module order; each lists one rank's shards unless `comm` is the shards' group."""
    units, seen = [], set()
    module_names = {module: name for name, module in model.named_modules()}
    plain = plain_names([name for name, _ in model.named_parameters()])
    for name, module in fsdp_modules(model):
        state, whose = module._get_fsdp_state(), name or "the model"
        if id(state) in seen:  # one of several that were sharded together
            continue
        seen.add(id(state))
        if (groups := getattr(state, "_fsdp_param_groups", None)) is None:  # earlier versions knew one mesh a module
            groups = [state._fsdp_param_group] if state._fsdp_param_group else []
        if len(groups) > 1:
            raise ValueError(f"the parameters of {whose} are sharded over {len(groups)} meshes; use one")
        for group in groups:
            shapes = {}
            for p in (p for p in group.fsdp_params if p.sharded_param.requires_grad):
                full = f"{module_names[p._module_info.module]}.{p._module_info.param_name}".removeprefix(".")
                pairs = [2] if p.sharded_param.is_complex() else []
                shapes[plain.get(full, full)] = [*p.padded_sharded_param_size, *pairs]
            shard_group = getattr(group.mesh_info, "shard_process_group", None)
            if shard_group is None:
                raise ValueError(f"{whose} is replicated and not sharded; use bk.interop.ddp or bk.attach")
            ranks = members_of(shard_group)
            scattered = comm is not None and members_of(comm.group) != ranks
            if scattered and getattr(group.mesh_info, "replicate_process_group", None) is not None:
                raise ValueError(
                    "this model is sharded over a mesh of two dimensions, and FSDP averages over the first itself "
                    'before any hook; shard over the second alone: fully_shard(module, mesh=mesh["intra"])'
                )
            shards = {
                torch.empty(shape, dtype=torch.float32, device="meta"): own if scattered else f"{own}[{r}/{len(ranks)}]"
                for r in range(1 if scattered else len(ranks))
                for own, shape in shapes.items()
            }
            units.append(Unit(name, module, shard_group, ranks, shards))
    if not units:
        raise TypeError(
            f"model, a {type(model).__name__}, has no module that torch.distributed.fsdp.fully_shard was given"
        )
    return units


def check_units(units: list[Unit], comm: Comm, across: bool) -> None:
    first, ours = units[0], members_of(comm.group)
    for unit in units:
        if unit.ranks != first.ranks:
            raise ValueError(
                f"{unit.name} is sharded over the ranks {unit.ranks} and {first.name or 'the model'} over "
                f"{first.ranks}; call bk.interop.fsdp for each part of the model"
            )
        if unit.module in _hooked:
            raise ValueError("this model has a stage already: call detach() on its handle before giving it another")
    both = sorted(set(ours) & set(first.ranks))
    if across and both != [dist.get_rank()]:
        raise ValueError(
            f"ranks {both} of this group hold shards of the same parameters; shard within one dimension of a mesh and "
            'average over another: comm=bk.Comm(mesh.get_group("inter"))'
        )


class ShardedLife(HookLife):
    """The life of stages in the hooks of an FSDP2 model.

    With `across`, stages run between ranks that hold the same shards, in FSDP's all-reduce hooks. Otherwise the first
    half of each stage replaces FSDP's reduce-scatter, and a compressor of `weights` also replaces FSDP's all-gather.
    """

    def __init__(
        self, make: Any, comm: Comm, timeout: Any, units: Sequence[Unit], across: bool, weights: Compressor | None
    ) -> None:
        self.alike = across  # else each rank has a shard of its own
        super().__init__(make, comm, timeout)
        self.units, self.gathers = units, list[AllGather]()
        with or_abandon(self):
            for i, unit in enumerate(units):
                _hooked.add(unit.module)
                self.unhook.callback(partial(_hooked.discard, unit.module))
                if across:
                    unit.module.set_all_reduce_hook(partial(self.average, i))
                    self.unhook.callback(partial(unit.module.set_all_reduce_hook, None))
                else:
                    self.hook_within(i, unit.module, weights)

    def hook_within(self, i: int, module: Any, weights: Compressor | None) -> None:
        # This import takes seconds, so it is local. Torch has no other way to restore FSDP's functions at `detach`.
        from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

        module.set_custom_reduce_scatter(ReduceScatter(self, i))
        self.unhook.callback(lambda: module.set_custom_reduce_scatter(DefaultReduceScatter()))
        if weights is not None:
            self.gathers.append(AllGather(self, i, weights))
            module.set_custom_all_gather(self.gathers[-1])
            self.unhook.callback(lambda: module.set_custom_all_gather(DefaultAllGather()))

    def rows(self) -> Iterable[Row]:
        number = len(self.runners)
        for gather in self.gathers:
            if gather.ledger.launches:
                name = f"weights={gather.compressor!r}"
                yield row_of(gather.ledger, name, number, gather.i, gather.values, gather.dtype)

    def fly(self, i: int, x: Tensor, *how: Any) -> bool:
        """Average `x` (n,), the gradients of unit `i`; the current stream waits. Return False if no stage acts now."""
        runner = self.begin()
        if runner is None:
            return False
        stage, unit = runner.rule.stage, self.units[i]
        layout = list(unit.shards)
        if not (stage.remembers() or any(each.needs_shapes for each in stage.whole())):
            layout = []
        elif sum(shard.numel() for shard in layout) != x.numel():
            raise RuntimeError(
                f"some parameters of {unit.name or 'the model'} got no gradient, and {stage!r} wants all of them every "
                "time; call set_reduce_scatter_unused_params(True) on the model (torch 2.13), or shard those that may "
                "go unused in a module of their own"
            )
        runner.arrive(self.launch(runner, i, x, layout, *how, self.show_fault))
        return True

    def average(self, i: int, x: Tensor) -> None:
        if x.is_cuda:  # FSDP may let go of it while the stream of its reductions still uses it
            x.record_stream(torch.cuda.current_stream(x.device))
        self.fly(i, real(x).view(-1), None, None)


@dataclass(eq=False)
class UnitCollective:
    """A callable that replaces FSDP's collective for unit `i`, and allocates the tensors that FSDP passes to it."""

    life: ShardedLife
    i: int

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class ReduceScatter(UnitCollective):
    """The replacement of FSDP's reduce-scatter. In a step in which no rule acts, it makes the exact mean."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        """Write this rank's shard to `output_tensor` on the current stream. Return None, so that FSDP does not wait."""
        life, out, x = self.life, real(output_tensor).view(-1), real(input_tensor).view(-1)
        if not life.fly(self.i, x, scatter, out):
            life.together("gradients", partial(self.exact, x, out, life.weights))
        if op != ReduceOp.AVG:
            # `set_gradient_divide_factor(f)` makes FSDP ask for a PREMUL_SUM, whose factor is 1 / f.
            output_tensor.mul_(group.size() * (1 if op == ReduceOp.SUM else float(op.__getstate__()[1])))

    def exact(self, x: Tensor, out: Tensor, weights: Weighing, comm: Comm) -> None:
        self.life.show_fault(out.copy_(scatter(Mean(), x, {}, comm._with(_weights=weights()))))


@dataclass(eq=False)
class AllGather(UnitCollective):
    """The replacement of FSDP's all-gather of the weights: it compresses them, and counts the bytes it sends."""

    compressor: Compressor
    values: int = 0
    dtype: str = ""
    ledger: Ledger = field(default_factory=Ledger)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> None:
        """Write the weights to `output_tensor` on the current stream. Return None, so that FSDP does not wait."""
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


def scatter(stage: Any, x: Tensor, state: State, comm: Comm) -> Tensor:
    """Average `x` (n,) over k ranks by the first half of `stage`; return this rank's shard (n / k,). k divides n."""
    if isinstance(stage, Mean):
        return scattered_mean(x, comm)
    if not isinstance(stage, ErrorFeedback):
        return compressed_reduce_scatter(x, stage.compressor, comm, average=True)
    (compressor,) = stage.inner.compressors()

    def inner(y: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        shard = compressed_reduce_scatter(y, compressor, comm, residual, average=True)
        # Only one rank sees that its shard is not finite, but then all ranks must keep their old residuals.
        return shard, comm.all_reduce(finite(shard).float(), ReduceOp.MIN) > 0

    dtype, (y, comm) = x.dtype, weighed(x, comm)
    return stage._feed_back(y, state["residual"], inner).to(dtype)
