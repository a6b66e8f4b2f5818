"""The plan of an attachment, found out on each rank alone, before anything is sent."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import combinations
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..arguments import instance, said, several, whole
from ..buckets import split
from ..comm import FLAT, Comm, check_device
from ..rules import Rule, rules_of
from .conflicts import check_dense, check_optimizers, check_wrappers
from .sharding import check_shards, is_sharded, reshard

LONGEST = timedelta(days=365)  # to wait for a flight


@dataclass(frozen=True, eq=False)
class Plan:
    """The rules of an attachment, and the parameters that each acts on, cut into buckets."""

    model: nn.Module
    optimizers: tuple[Optimizer, ...]
    rules: tuple[Rule, ...]
    names: dict[Tensor, str]  # of the trainable parameters
    cuts: tuple[tuple[tuple[Tensor, ...], ...], ...]  # by rule and bucket
    device: torch.device
    bucket_bytes: int
    timeout: timedelta
    scaler: Any
    broadcast: bool

    def described(self) -> list[str]:
        """The plan in lines of text that must be the same on all ranks. Never contains a callable."""
        lines = [
            f"bucket_bytes={self.bucket_bytes}",
            f"optimizers={len(self.optimizers)}",
            f"scaler={self.scaler is not None}",
            f"broadcast={self.broadcast}",
        ]
        for optimizer in self.optimizers:
            sizes = [len(group["params"]) for group in optimizer.param_groups]
            lines.append(f"{type(optimizer).__name__} with groups of {sizes} parameters")
        for rule, cut in zip(self.rules, self.cuts, strict=True):
            lines.append(f"rule {rule!r}")
            for i, bucket in enumerate(cut):
                lines += [f"  bucket {i}: {self.names[p]} {tuple(p.shape)} {p.dtype}" for p in bucket]
        return lines


def make_plan(
    model: Any,
    optimizer: Any,
    algorithms: Sequence[Any],
    comm: Comm,
    bucket_bytes: Any,
    timeout: Any,
    scaler: Any,
    broadcast: Any,
) -> Plan:
    """Check everything that one rank can check alone, and decide what goes into which bucket."""
    instance("model", model, nn.Module, "an nn.Module")
    rules, optimizers = rules_of(*algorithms), optimizers_of(optimizer)
    if not rules:
        raise ValueError("attach needs at least one algorithm, such as bk.algorithms.gradient_allreduce()")
    check_wrappers(model, rules)
    reshard(model)
    check_optimizers(optimizers, model)
    names: dict[Tensor, str] = {p: name for name, p in model.named_parameters() if p.requires_grad}
    if not names:
        raise ValueError("the model has no trainable parameter; set requires_grad before attach")
    whole("bucket_bytes", bucket_bytes, 1)
    device = one_device(names)
    check_device(comm.group, device)
    if comm.flows > 1 and device.type == "cuda":
        raise ValueError(
            f"Comm(flows={comm.flows}) divides what travels over gloo, and these parameters travel by NCCL"
        )
    claims = [claimed(rule, names) for rule in rules]
    check_rules(rules, claims, names, optimizers)
    check_dense(rules, claims, model)
    check_shards(rules, names, comm)
    for rule in rules:
        rule.stage.check(comm)
    check_scaler(scaler, rules)
    cuts = tuple(tuple(tuple(bucket) for bucket in split(claim, bucket_bytes)) for claim in claims)
    return Plan(model, optimizers, rules, names, cuts, device, bucket_bytes, as_time(timeout), scaler, bool(broadcast))


def track_of(rule: Rule) -> int:
    """Return the number of the track on which a rule flies: 1 if its flights outlast a step, else 0."""
    return int(bool(rule.delay) or rule.window == "free_running")


def parts_of(plan: Plan, track: int) -> frozenset[str]:
    """Return which groups the work on a track uses; the first one also carries what no rule sends."""
    used = [rule.stage.wants_groups() for rule in plan.rules if track_of(rule) == track]
    return frozenset([] if track else [FLAT]).union(*used)


def optimizers_of(optimizer: Any) -> tuple[Optimizer, ...]:
    """The optimizers in what the user gave: one, several, or None."""
    wanted = "a torch.optim.Optimizer, a sequence of them, or None"
    one = () if optimizer is None else (optimizer,) if isinstance(optimizer, Optimizer) else None
    found = tuple(several("optimizer", optimizer, wanted)) if one is None else one
    if one is None and not found:
        raise ValueError(said("optimizer", wanted, optimizer))
    for each in found:
        if not isinstance(each, Optimizer):
            raise TypeError(said("optimizer", wanted, each if each is not None else optimizer))
        if not hasattr(each, "_optimizer_step_pre_hooks"):  # torch.optim.Optimizer.__init__ makes them
            raise TypeError(
                f"{type(each).__name__} wraps another optimizer without being one itself (it never called "
                "Optimizer.__init__); give attach the one inside, often its .optimizer"
            )
        if isinstance(each, torch.optim.LBFGS):
            raise TypeError(
                "LBFGS evaluates the model several times in a step, at other weights on each rank; use another one"
            )
    return found


def one_device(names: dict[Tensor, str]) -> torch.device:
    """The device of all trainable parameters."""
    first = next(iter(names))
    for p, name in names.items():
        if not p.is_floating_point():
            raise TypeError(
                f"parameter {name} is of dtype {p.dtype}, which cannot be averaged; set requires_grad=False on it"
            )
        if p.device != first.device:
            raise ValueError(
                f"all trainable parameters must be on one device; {names[first]} is on {first.device} "
                f"and {name} on {p.device}"
            )
        if p.layout is not torch.strided or not (type(p.data) is torch.Tensor or is_sharded(p)):
            raise TypeError(
                f"parameter {name} is a {type(p.data).__name__} of layout {p.layout}; attach takes plain dense tensors"
            )
    return first.device


def claimed(rule: Rule, names: dict[Tensor, str]) -> list[Tensor]:
    """The parameters that a rule acts on."""
    names_chosen = rule.choose({name: p for p, name in names.items()})
    chosen = [p for p, name in names.items() if name in names_chosen]
    if not chosen:
        raise ValueError(f"where= of {rule!r} selects none of the {len(names)} trainable parameters")
    return chosen


def check_rules(
    rules: Sequence[Rule],
    claims: Sequence[list[Tensor]],
    names: dict[Tensor, str],
    optimizers: tuple[Optimizer, ...],
) -> None:
    """Raise if two rules contradict each other, or lack the optimizer that they count the steps of."""
    for rule in rules:
        if rule.what == "data" and not optimizers:
            raise ValueError(f"{rule!r} acts on weights when the optimizer steps; give attach the optimizer")
    for (a, of_a), (b, of_b) in combinations(zip(rules, claims, strict=True), 2):
        if not a.meets(b):
            continue
        if "free_running" in (a.window, b.window):
            raise ValueError(
                f"{a!r} and {b!r} act in the same steps; a free-running rule shares none: use start= and stop="
            )
        both = set(of_a) & set(of_b)
        if a.window == b.window and both:
            name = next(name for p, name in names.items() if p in both)
            raise ValueError(
                f"{a!r} and {b!r} both act on {name} in the same window and steps; "
                "separate them with where=, or start= and stop="
            )


def check_scaler(scaler: Any, rules: Sequence[Rule]) -> None:
    """Raise unless `scaler` can be used with the rules."""
    if scaler is None:
        return
    if not isinstance(scaler, torch.amp.GradScaler):
        raise TypeError(said("scaler", "a torch.amp.GradScaler", scaler))
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    for rule in rules:
        if rule.window in ("between_steps", "after_step") and not isinstance(scaler, ShardedGradScaler):
            raise ValueError(
                f"with a plain GradScaler a rank skips a step alone, and {rule!r} would wait for it; "
                "use torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler, with which all ranks skip together"
            )


def as_time(timeout: Any) -> timedelta:
    """The time after which a flight is given up."""
    if timeout is None:
        return timedelta(minutes=10)
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if isinstance(seconds, bool) or not isinstance(seconds, int | float | np.integer | np.floating):
        raise TypeError(said("timeout", "a timedelta or a number of seconds", timeout))
    if not 0 < seconds <= LONGEST.total_seconds():
        raise ValueError(
            said("timeout", f"a timedelta or a number of seconds, greater than 0 and at most {LONGEST}", timeout)
        )
    return timedelta(seconds=float(seconds))
