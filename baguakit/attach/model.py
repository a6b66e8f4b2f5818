"""The setup of an attachment, made from the arguments of `attach`, and the checks of them."""

from collections.abc import Collection, Sequence
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..arguments import instance, integer, message, several
from ..buckets import check_averaged, split
from ..comm import Comm, check_device
from ..rules import Rule, rules_of
from ..runtime import as_time, check_scaler, named, reshard
from .setup import (
    AttachSetup,
    check_dense,
    check_optimizers,
    check_shards,
    check_wrappers,
    in_order,
    is_divided,
    is_sharded,
)


def make_setup(
    model: Any,
    optimizer: Any,
    algorithms: Sequence[Any],
    comm: Comm,
    bucket_bytes: Any,
    timeout: Any,
    scaler: Any,
    broadcast: Any,
    ever: Collection[Tensor],
    order: Sequence[str] = (),
) -> AttachSetup:
    """Check everything that one rank can check alone, and divide the parameters into buckets.

    Parameters in `ever` take part although they may be frozen now. `order` are the names of parameters in the order of
    their gradients; (): the reverse of that of the model.
    """
    instance("model", model, nn.Module, "an nn.Module")
    rules, optimizers = rules_of(*algorithms), optimizers_of(optimizer)
    if not rules:
        raise ValueError("attach needs at least one algorithm, such as bk.algorithms.gradient_allreduce()")
    check_wrappers(model, rules)
    reshard(model)
    check_optimizers(optimizers, model)
    names: dict[Tensor, str] = {p: name for name, p in model.named_parameters() if p.requires_grad or p in ever}
    if not names:
        raise ValueError("the model has no trainable parameter; set requires_grad before attach")
    integer("bucket_bytes", bucket_bytes, 1)
    device = one_device(names)
    check_device(comm.group, device)
    if comm.flows > 1 and device.type == "cuda":
        raise ValueError(
            f"Comm(flows={comm.flows}) divides what travels over gloo, and these parameters travel by NCCL"
        )
    params_of_rules: list[list[Tensor]] = []
    for rule in rules:
        chosen = rule.choose({name: p for p, name in names.items()})
        if not chosen:
            raise ValueError(f"where= of {rule!r} selects none of the {len(names)} trainable parameters")
        params_of_rules.append([p for p, name in names.items() if name in chosen])
    check_rules(rules, params_of_rules, names, optimizers)
    check_dense(rules, params_of_rules, model)
    check_shards(rules, names, comm)
    for rule in rules:
        rule.stage.check(comm)
    check_scaler(scaler, rules)
    plain = named(model)
    names, frozen = {p: plain[p] for p in names}, tuple(name for p, name in plain.items() if p not in names)
    steppers = {p: i for i, each in enumerate(optimizers) for group in each.param_groups for p in group["params"]}
    buckets_of_rules = []
    for rule, params in zip(rules, params_of_rules, strict=True):
        ordered = in_order(params, names, order) if rule.what == "grad" else params
        # Optimizers have buckets of their own where what is remembered of one must not depend on the others.
        apart = len(optimizers) > 1 and rule.what == "grad" and rule.stage.remembers()
        buckets_of_rules.append(tuple(map(tuple, split(ordered, bucket_bytes, steppers if apart else {}))))
    lines = [f"bucket_bytes={bucket_bytes}", f"optimizers={len(optimizers)}"]
    lines += [f"scaler={scaler is not None}", f"broadcast={bool(broadcast)}"]
    for each in optimizers:
        sizes = [len(group["params"]) for group in each.param_groups]
        lines.append(f"{type(each).__name__} with groups of {sizes} parameters")
    for rule, buckets in zip(rules, buckets_of_rules, strict=True):
        lines.append(f"rule {rule!r}")
        lines += rule.schedule()
        for i, bucket in enumerate(buckets):
            lines += [f"  bucket {i}: {names[p]} {tuple(p.shape)} {p.dtype}" for p in bucket]
    common = rules, names, frozen, device, as_time(timeout), scaler, tuple(lines)
    cut = tuple(buckets_of_rules)
    return AttachSetup(*common, model, optimizers, cut, bucket_bytes, tuple(order), bool(broadcast))


def optimizers_of(optimizer: Any) -> tuple[Optimizer, ...]:
    """Return the optimizers that the user gave: one, several, or None; raise if one is not usable."""
    wanted = "a torch.optim.Optimizer, a sequence of them, or None"
    if optimizer is None:
        return ()
    found = (optimizer,) if isinstance(optimizer, Optimizer) else tuple(several("optimizer", optimizer, wanted))
    if not found:
        raise ValueError(message("optimizer", wanted, optimizer))
    for each in found:
        if not isinstance(each, Optimizer):
            raise TypeError(message("optimizer", wanted, each if each is not None else optimizer))
        if not hasattr(each, "_optimizer_step_pre_hooks"):  # torch.optim.Optimizer.__init__ makes them
            raise TypeError(
                f"{type(each).__name__} wraps another optimizer without being one itself (it never called "
                "Optimizer.__init__); give attach the one inside, often its .optimizer"
            )
        if isinstance(each, torch.optim.LBFGS):
            raise TypeError(
                "LBFGS evaluates the model several times in a step; with rules on gradients give None for the "
                "optimizer, which trains as DDP does, and with rules on weights use another optimizer"
            )
    return found


def one_device(names: dict[Tensor, str]) -> torch.device:
    """Return the device of all trainable parameters; raise if they have none in common, or one cannot be averaged."""
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
            raise TypeError(
                f"parameter {name} is a {type(p.data).__name__} of layout {p.layout}; attach takes plain dense tensors"
            )
    return first.device


def check_rules(
    rules: Sequence[Rule],
    params_of_rules: Sequence[list[Tensor]],
    names: dict[Tensor, str],
    optimizers: tuple[Optimizer, ...],
) -> None:
    """Raise a ValueError if two rules contradict each other, or a rule on weights has no optimizer."""
    for rule in rules:
        if rule.what == "data" and not optimizers:
            raise ValueError(f"{rule!r} acts on weights when the optimizer steps; give attach the optimizer")
        if rule.what == "data" and (shared := next(filter(is_divided, optimizers), None)):
            raise ValueError(
                f"{type(shared).__name__} steps each parameter on one rank and sends it to all, with the gradient of "
                f"that rank alone under {rule!r}; use rules on gradients, or another optimizer"
            )
    for (a, of_a), (b, of_b) in combinations(zip(rules, params_of_rules, strict=True), 2):
        if not a.overlaps(b):
            continue
        if "free_running" in (a.window, b.window):
            raise ValueError(
                f"{a!r} and {b!r} act in the same steps; a free-running rule shares none: use start= and stop="
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
