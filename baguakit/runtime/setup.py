"""Setups: each rank makes its own, and all ranks compare theirs before anything is sent.

`plain_names` leaves out of the names of parameters the components that wrappers of modules add:
`torch.compile` calls a module `_orig_mod`, DDP `module`, FSDP `_fsdp_wrapped_module`, and activation checkpointing
`_checkpoint_wrapped_module`. A state is saved under names without them, and so loads with other wrappers or without.
"""

import sys
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from ..arguments import message
from ..comm import FLAT, HOSTS, Comm
from ..rules import Rule

LONGEST = timedelta(days=365)  # to wait for a flight


@dataclass(frozen=True, eq=False)
class Setup:
    """The setup of an attachment or a handle."""

    rules: tuple[Rule, ...]
    names: dict[Tensor, str]  # of the parameters, or of tensors that stand for them, without wrappers
    frozen: tuple[str, ...]  # the names of the model's other parameters
    device: torch.device
    timeout: timedelta  # the age at which a flight is given up
    scaler: Any  # the GradScaler in use, or None
    lines: tuple[str, ...]  # text that must be the same on all ranks; never contains a callable

    def loss_scale(self) -> Tensor | None:
        """Return the factor of the loss, if a scaler is enabled."""
        return self.scaler._scale if self.scaler is not None and self.scaler.is_enabled() else None

    def groups(self, channel: int) -> frozenset[str]:
        """Return the kinds of groups that the work on a channel uses.

        Channel 0 also carries what no rule sends, and with gradients travel their flags.
        """
        rules = [rule for rule in self.rules if channel_of(rule) == channel]
        flat = channel == 0 or any(rule.what == "grad" for rule in rules)
        return frozenset([FLAT] if flat else []).union(*(rule.stage.wants_groups() for rule in rules))


AnySetup = TypeVar("AnySetup", bound=Setup)


def on_mesh(setup: AnySetup, comm: Comm) -> AnySetup:
    """Return a setup whose lines begin with the mesh of the ranks, which must be the same on all."""
    mesh: Any = comm.mesh
    said = f"mesh={mesh!r}" if mesh is None or mesh == HOSTS else f"mesh {mesh.mesh_dim_names} {mesh.mesh.tolist()}"
    return replace(setup, lines=(said, *setup.lines))


def channel_of(rule: Rule) -> int:
    """Return the number of the channel on which a rule flies: 1 if its flights outlast a step, else 0."""
    return int(bool(rule.delay) or rule.window == "free_running")


def check_scaler(scaler: Any, rules: Sequence[Rule]) -> None:
    """Raise a TypeError or ValueError unless `scaler` can be used with the rules."""
    if scaler is None:
        return
    if not isinstance(scaler, torch.amp.GradScaler):
        raise TypeError(message("scaler", "a torch.amp.GradScaler", scaler))
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    for rule in rules:
        if rule.window in ("between_steps", "after_step") and not isinstance(scaler, ShardedGradScaler):
            raise ValueError(
                f"with a plain GradScaler a rank skips a step alone, and {rule!r} would wait for it; "
                "use torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler, with which all ranks skip together"
            )


def as_time(timeout: Any) -> timedelta:
    """Return the time after which a flight is given up, from the argument of the user."""
    if timeout is None:
        return timedelta(minutes=10)
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    wanted = "a timedelta or a number of seconds"
    if isinstance(seconds, bool) or not isinstance(seconds, int | float | np.integer | np.floating):
        raise TypeError(message("timeout", wanted, timeout))
    if not 0 < seconds <= LONGEST.total_seconds():
        raise ValueError(message("timeout", f"{wanted}, greater than 0 and at most {LONGEST}", timeout))
    return timedelta(seconds=float(seconds))


WRAPPERS = frozenset({"_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})


def named(model: nn.Module) -> dict[Tensor, str]:
    """Return the parameters of a model and their plain names."""
    params: dict[str, Tensor] = dict(model.named_parameters())
    plain = plain_names(params)
    return {p: plain[name] for name, p in params.items()}


def plain_names(names: Collection[str]) -> dict[str, str]:
    """Map each name to its name without wrappers, or to itself where two names would become the same."""
    plain = {}
    for name in names:
        *modules, own = name.split(".")
        plain[name] = ".".join([*(each for each in modules if each not in WRAPPERS), own])
    count = Counter(plain.values())
    return {name: short if count[short] == 1 else name for name, short in plain.items()}


def reshard(model: nn.Module) -> None:
    """Reshard an FSDP2 model, whose parameters a forward may have left unsharded."""
    for _, module in fsdp_modules(model):
        module.reshard()


def fsdp_modules(model: nn.Module) -> list[tuple[str, Any]]:
    """Return the modules on which `fully_shard` has been called, by name."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # importing it takes seconds; a user of it has done so
    return [] if fsdp is None else [(name, m) for name, m in model.named_modules() if isinstance(m, fsdp.FSDPModule)]
