"""The setup of an attachment, its conflicts with other users of the model, and the order of its buckets.

In sharded models (FSDP2), rules on weights act on this rank's shards of the parameters. Ranks that hold the same shards
average them. Such ranks form one dimension of a mesh, and the ranks of an FSDP group form another.

`better_order` compares two orders of buckets: the reverse of the order in which parameters are registered, and the
order in which gradients arrive in a first backward. Buckets are launched in order, each when it has all gradients. Let
a_p be the share of all gradient bytes that have arrived when the gradient of parameter p arrives. Bucket i has bytes_i
bytes, and is launched at the time t_i, the largest a_p in the buckets up to i. The mean time of launch is

    T = Σ_i bytes_i t_i / Σ_i bytes_i.

If modules are registered in the order in which they run, T ≈ ½; if they are registered in the reverse order, T ≈ 1.
"""

import sys
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, combinations, product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ..arguments import instance, integer, message, several, truth
from ..buckets import What, check_averaged, split
from ..comm import Comm, check_device, members_of
from ..costs import Sizes, sizes_of
from ..rules import Rule, rules_of
from ..runtime.agreement import Setup, as_time, check_scaler, check_weight, named, reshard
from ..topology.chosen import chooses
from .aside import standing_aside

OfRules = list[tuple[Rule, list[Tensor]]]  # each rule with its parameters


@dataclass(frozen=True, eq=False)
class AttachSetup(Setup):
    model: nn.Module
    optimizers: tuple[Optimizer, ...]
    buckets_of_rules: tuple[tuple[tuple[Tensor, ...], ...], ...]  # the parameters of each bucket of each rule
    sizes: dict[What, Sizes]
    order: tuple[str, ...]  # names of parameters in the order of their gradients; (): the default order
    broadcast: bool  # begin with the model and optimizers of rank 0

    @property
    def bucket_bytes(self) -> int:
        return self.sizes["grad"].most


def make_setup(
    model: Any,
    optimizer: Any,
    algorithms: Sequence[Any],
    comm: Comm,
    timeout: Any,
    scaler: Any,
    broadcast: Any,
    ever: Collection[Tensor],
    weight: Any,
    bucket_bytes: Any,
    order: Sequence[str] = (),
) -> AttachSetup:
    """Return the setup of this rank: check what one rank can check alone, and divide parameters into buckets.

    Parameters in `ever` take part even if they are frozen now. `order` has the names of parameters in the order of
    launch; with (), this order is the reverse of the model's order.
    """
    truth("broadcast", broadcast)
    instance("model", model, nn.Module, "an nn.Module")
    rules, optimizers = rules_of(*algorithms), optimizers_of(optimizer)
    if not rules:
        raise ValueError("attach needs at least one algorithm, such as bk.algorithms.gradient_allreduce()")
    reshard(model)
    check_optimizers(optimizers, model)
    names: dict[Tensor, str] = {p: name for name, p in model.named_parameters() if p.requires_grad or p in ever}
    if not names:
        raise ValueError("the model has no trainable parameter; set requires_grad before attach")
    asked = None if bucket_bytes is None else integer("bucket_bytes", bucket_bytes, 1)
    device = one_device(names)
    check_device(comm.group, device, comm.flows)
    of_rules: OfRules = []
    for rule in rules:
        chosen = rule.choose({name: p for p, name in names.items()})
        if not chosen:
            raise ValueError(f"where= of {rule!r} selects none of the {len(names)} trainable parameters")
        of_rules.append((rule, [p for p, name in names.items() if name in chosen]))
    check_rules(of_rules, names, optimizers)
    check_modules(model, of_rules, comm)
    check_shards(rules, names, comm)
    for rule in rules:
        rule.stage.check(comm)
    check_scaler(scaler, rules)
    weighing = check_weight(weight, rules)
    plain = named(model)
    names, frozen = {p: plain[p] for p in names}, tuple(name for p, name in plain.items() if p not in names)
    steppers = {p: i for i, each in enumerate(optimizers) for group in each.param_groups for p in group["params"]}
    sizes, buckets_of_rules = sizes_of(of_rules, asked), []
    for rule, params in of_rules:
        ordered = in_order(params, names, order) if rule.what == "grad" else params
        # If the rule keeps state, each optimizer has separate buckets, so that no state depends on two optimizers.
        apart = len(optimizers) > 1 and rule.what == "grad" and rule.stage.remembers()
        cut = split(ordered, *sizes[rule.what], steppers if apart else {})
        buckets_of_rules.append(tuple(map(tuple, cut)))
    lines = [f"bucket_bytes={sizes['grad'].most}", f"optimizers={len(optimizers)}", weighing]
    lines += [f"scaler={scaler is not None}", f"broadcast={bool(broadcast)}"]
    for each in optimizers:
        counts = [len(group["params"]) for group in each.param_groups]
        lines.append(f"{type(each).__name__} with groups of {counts} parameters")
    for rule, buckets in zip(rules, buckets_of_rules, strict=True):
        lines.append(f"rule {rule!r}")
        lines += rule.schedule()
        for i, bucket in enumerate(buckets):
            lines += [f"  bucket {i}: {names[p]} {tuple(p.shape)} {p.dtype}" for p in bucket]
    common = rules, names, frozen, device, as_time(timeout), scaler, tuple(lines)
    cuts = tuple(buckets_of_rules)
    return AttachSetup(*common, model, optimizers, cuts, sizes, tuple(order), bool(broadcast), weight=weight)


def optimizers_of(optimizer: Any) -> tuple[Optimizer, ...]:
    """Return a tuple of the optimizers that the user gave (one, several, None). Raise an error if one is unusable."""
    wanted = "a torch.optim.Optimizer, a sequence of them, or None"
    if optimizer is None:
        return ()
    given = (optimizer,) if isinstance(optimizer, Optimizer) else tuple(several("optimizer", optimizer, wanted))
    if not given:
        raise ValueError(message("optimizer", wanted, optimizer))
    made = "_optimizer_step_pre_hooks"  # by torch.optim.Optimizer.__init__, which what only wraps one does not call
    found = tuple(each if hasattr(each, made) else getattr(each, "optimizer", each) for each in given)  # accelerate's
    for each in found:
        if not isinstance(each, Optimizer):
            raise TypeError(message("optimizer", wanted, each if each is not None else optimizer))
        if not hasattr(each, made):
            raise TypeError(
                f"{type(each).__name__} wraps another optimizer without being one itself (it never called "
                "Optimizer.__init__); give attach the one inside"
            )
        if isinstance(each, torch.optim.LBFGS):
            raise TypeError(
                "LBFGS evaluates the model several times in a step; with rules on gradients give None for the "
                "optimizer, which trains as DDP does, and with rules on weights use another optimizer"
            )
    return found


def one_device(names: dict[Tensor, str]) -> torch.device:
    """Return the device of all parameters. Raise an error if devices differ, or a parameter cannot be averaged."""
    first = next(iter(names))
    for p, name in names.items():
        if isinstance(p, nn.parameter.UninitializedParameter):
            raise TypeError(f"parameter {name} has no shape yet; run a forward pass of the model before attach")
        check_averaged(f"parameter {name}", p)
        if p.device != first.device:
            raise ValueError(
                f"all trainable parameters must be on one device; {names[first]} is on {first.device} "
                f"and {name} on {p.device}"
            )
        if p.layout is not torch.strided or not (type(p.data) is torch.Tensor or is_sharded(p)):
            raise TypeError(f"parameter {name} is a {type(p.data).__name__} of layout {p.layout}, not a dense tensor")
    return first.device


def check_rules(of_rules: OfRules, names: dict[Tensor, str], optimizers: Sequence[Optimizer]) -> None:
    for rule, _ in of_rules:
        if rule.what == "data" and not optimizers:
            raise ValueError(f"{rule!r} acts on weights when the optimizer steps; give attach the optimizer")
        if rule.what == "data" and (shared := next(filter(is_divided, optimizers), None)):
            raise ValueError(
                f"{type(shared).__name__} steps each parameter on one rank and sends it to all, with the gradient of "
                f"that rank alone under {rule!r}; use rules on gradients, or another optimizer"
            )
    for (a, of_a), (b, of_b) in combinations(of_rules, 2):
        if not a.overlaps(b):
            continue
        if "free_running" in (a.window, b.window) and (a.window != b.window or a.start != b.start):
            raise ValueError(
                f"{a!r} and {b!r} act in the same steps; a free-running rule shares them only with free-running rules "
                "that start together: use start= and stop="
            )
        if a.what == b.what == "grad" and a.delay != b.delay:
            raise ValueError(
                f"{a!r} and {b!r} act in the same steps, and one optimizer step takes gradients of one delay; give "
                "both the same delay=, or separate them with start= and stop="
            )
        both = set(of_a) & set(of_b)
        if a.window == b.window and both:
            name = next(name for p, name in names.items() if p in both)
            raise ValueError(
                f"{a!r} and {b!r} both act on {name} in the same window and steps; "
                "separate them with where=, or start= and stop="
            )


WORTH = 0.1  # the part of a backward by which a new order must launch buckets earlier, on average


def in_order(params: Sequence[Tensor], names: dict[Tensor, str], order: Sequence[str]) -> list[Tensor]:
    """Return `params`, sorted such that `split` makes buckets in the order of the names `order`, then the others."""
    place = {name: -i for i, name in enumerate(order)}
    return sorted(params, key=lambda p: place.get(names[p], -len(order)))


def better_order(
    cuts: Sequence[Sequence[Sequence[Tensor]]], arrived: Collection[Tensor], names: dict[Tensor, str], sizes: Sizes
) -> list[str] | None:
    """Return parameter names in the order in which gradients arrived; None if buckets of it gain less than `WORTH`."""
    order = [names[p] for p in arrived if p in names]  # without parameters removed since then
    gain = 0.0
    for buckets in cuts:
        held = {p for bucket in buckets for p in bucket}
        cut = split(in_order([p for p in names if p in held], names, order), *sizes)
        gain = max(gain, mean_launch(buckets, arrived) - mean_launch(cut, arrived))
    return order if gain > WORTH else None


def mean_launch(buckets: Sequence[Sequence[Tensor]], arrived: Collection[Tensor]) -> float:
    """Return T, the mean time at which bytes are launched, from 0 to 1; see the module docstring."""
    own = {p for bucket in buckets for p in bucket}
    came = [p for p in arrived if p in own]
    total = max(1, sum(p.nbytes for p in came))
    a = dict(zip(came, accumulate(p.nbytes / total for p in came), strict=True))
    t = accumulate((max((a.get(p, 1.0) for p in bucket), default=0.0) for bucket in buckets), max)
    sizes = [sum(p.nbytes for p in bucket) for bucket in buckets]
    return sum(b * x for b, x in zip(sizes, t, strict=True)) / max(1, sum(sizes))


def is_sharded(p: Tensor) -> bool:
    return hasattr(p, "to_local")


def is_divided(optimizer: Optimizer) -> bool:
    """Return True for a ZeroRedundancyOptimizer, where each rank has the state of some parameters only."""
    return hasattr(optimizer, "consolidate_state_dict")


def check_shards(rules: Sequence[Rule], names: dict[Tensor, str], comm: Comm) -> None:
    """Raise a TypeError or ValueError if a parameter is sharded and the rules cannot act on shards."""
    sharded: list[Any] = [p for p in names if is_sharded(p)]
    if not sharded:
        return
    if comm.membership.changes:
        raise ValueError("the shards of a sharded model go with a rank that is lost; bk.elastic takes whole models")
    for rule in rules:
        if rule.what == "grad":
            raise TypeError(
                f"{rule!r} acts on gradients, and those of a sharded model are reduced by FSDP; "
                f"use bk.interop.fsdp(model, {rule.stage!r}), and attach for rules on weights"
            )
    ours = members_of(comm.group)
    for p in sharded:
        both = sorted(set(ours) & set(p.device_mesh.mesh.flatten().tolist()))
        if both != [dist.get_rank()]:
            raise ValueError(
                f"ranks {both} of this group hold shards of the same {names[p]}; shard within one dimension of a "
                'mesh and average over another: comm=bk.Comm(mesh.get_group("inter"))'
            )


def check_optimizers(optimizers: Iterable[Optimizer], model: nn.Module) -> None:
    ours = set(model.parameters())
    groups = [(optimizer, i, group) for optimizer in optimizers for i, group in enumerate(optimizer.param_groups)]
    for optimizer, i, group in groups:
        for p in (p for p in group["params"] if p not in ours):
            raise ValueError(
                f"{type(optimizer).__name__} steps a tensor {tuple(p.shape)} in group {i} that is no parameter of the "
                f"model, a {type(model).__name__}; attach an nn.ModuleList of all that it steps, or, where it steps "
                "copies of the weights in fp32, give rules on gradients and None for the optimizer"
            )


def check_modules(model: nn.Module, of_rules: OfRules, comm: Comm) -> None:
    fsdp = sys.modules.get("torch.distributed.fsdp")  # not imported, which takes seconds: a user of FSDP has done so
    on_gradients = [(rule, set(of)) for rule, of in of_rules if rule.what == "grad"]
    for name, module in model.named_modules():
        if fsdp is not None and isinstance(module, fsdp.FullyShardedDataParallel):
            raise TypeError("attach knows the shards of FSDP2; use fully_shard(module) for FullyShardedDataParallel")
        for rule, params in on_gradients:
            if isinstance(module, DistributedDataParallel) and not standing_aside(module, comm):
                raise TypeError(
                    f"DistributedDataParallel averages the gradients that {rule!r} acts on, by a communication hook "
                    "or over other ranks; wrap the model anew, or give comm=bk.Comm(ddp_model.process_group)"
                )
            if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and module.weight in params:
                raise TypeError(
                    f"the gradient of {name}.weight is sparse and cannot travel in a bucket of {rule!r}; use "
                    "sparse=False, or where= to leave it to a rule on weights"
                )


def check_others(setup: AttachSetup, others: Iterable[AttachSetup]) -> None:
    """Raise a ValueError if another attachment, whose steps differ, acts on a parameter in the same window."""
    for other in others:
        ours, theirs = (zip(each.rules, each.buckets_of_rules, strict=True) for each in (setup, other))
        for (a, of_a), (b, of_b) in product(ours, theirs):
            both = set(chain(*of_a)) & set(chain(*of_b))
            if both and (a.window == b.window or "free_running" in (a.window, b.window)):
                name = min(setup.names[p] for p in both)
                raise ValueError(
                    f"{b!r} of another attachment acts on {name}, and {a!r} would, too; call detach() on that one, or "
                    "give all rules to one attach"
                )


def check_join(setup: AttachSetup, by_all: bool) -> None:
    for rule in setup.rules:
        if rule.window == "free_running":
            raise ValueError(f"{rule!r} needs no join(): leave it out, and ranks may make different numbers of steps")
        if rule.what == "grad" and not rule.stage.same_on_all_ranks:
            raise ValueError(
                f"{rule!r} gives each rank a gradient of its own, and one that has run out of batches would not step "
                "with it; give all ranks the same number of batches"
            )
        if chooses(rule.stage):
            raise ValueError(
                f"in {rule!r} each rank chooses its weights, and one that has run out of batches would choose no more; "
                "give all ranks the same number of batches"
            )
        if rule.what == "data" and not by_all:
            raise ValueError(
                f"divide_by_initial_world_size=False divides gradients by the number of ranks at work; in {rule!r} "
                "ranks that have run out take part with their weights: leave it at True"
            )
    sharding = sys.modules.get("torch.distributed.fsdp.sharded_grad_scaler")  # importing it takes seconds
    if sharding is not None and isinstance(setup.scaler, sharding.ShardedGradScaler):
        raise ValueError(
            "ShardedGradScaler asks all ranks in each step, and one that has run out of batches would not answer; "
            "train in bfloat16, or give all ranks the same number of batches"
        )
    if any(is_sharded(p) for p in setup.names):
        raise ValueError("a sharded model is gathered from all ranks in each step; give all the same number of batches")
