"""Setups of attachments and handles. All ranks compare their setups before anything is sent.

`plain_names` removes the parts of parameter names that wrappers add: `torch.compile` adds `_orig_mod`, DDP `module`,
FSDP `_fsdp_wrapped_module`, and activation checkpointing `_checkpoint_wrapped_module`. States are saved under plain
names, so that a model with other wrappers, or without wrappers, can load them.
"""

import hashlib
import json
import sys
import uuid
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import zip_longest
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from ..arguments import instance, message
from ..buckets import local
from ..comm import FLAT, HOSTS, Comm, number
from ..hashing import digest
from ..lanes import CpuLane
from ..lanes.cpu import CpuFlight
from ..monitor import Collective, Monitor
from ..rules import Rule
from ..tensors import bytes_of, plain

LONGEST = timedelta(days=365)  # to wait for a flight


@dataclass(frozen=True, eq=False)
class Setup:
    rules: tuple[Rule, ...]
    names: dict[Tensor, str]  # of the parameters, or of tensors that stand for them, without wrappers
    frozen: tuple[str, ...]  # the names of the model's other parameters
    device: torch.device
    timeout: timedelta  # the age at which a flight is given up
    scaler: Any  # the GradScaler in use, or None
    lines: tuple[str, ...]  # text that must be the same on all ranks; never contains a callable
    kinds: tuple[str, ...] = field(default=(), kw_only=True)  # of the devices of all ranks; only rank 0 knows them
    weight: Any = field(default=None, kw_only=True)  # of this rank in means: None, a number, or a function

    def loss_scale(self) -> Tensor | None:
        """Return the scale factor of the loss, if a scaler is enabled, else None."""
        return self.scaler._scale if self.scaler is not None and self.scaler.is_enabled() else None

    def groups(self, channel: int) -> frozenset[str]:
        """Return the kinds of groups that the work on a channel uses.

        Channel 0 also sends messages that belong to no rule. Such messages, and flags of gradients, use the flat group.
        """
        rules = [rule for rule in self.rules if channel_of(rule) == channel]
        flat = channel == 0 or any(rule.what == "grad" for rule in rules)
        return frozenset([FLAT] if flat else []).union(*(rule.stage.wants_groups() for rule in rules))


AnySetup = TypeVar("AnySetup", bound=Setup)


def on_mesh(setup: AnySetup, comm: Comm) -> AnySetup:
    """Return the setup with lines about the groups before its own, so that ranks compare their groups, too."""
    mesh: Any = comm.mesh
    said = f"mesh={mesh!r}" if mesh is None or mesh == HOSTS else f"mesh {mesh.mesh_dim_names} {mesh.mesh.tolist()}"
    parts = (comm, comm.intra, comm.inter) if comm.hierarchical else (comm,)
    sent = [f"messages by {'NCCL' if part._by_nccl(setup.device) else 'gloo'}" for part in parts]
    return replace(setup, lines=(said, *sent, f"kernels={comm.kernels}", *setup.lines))


def channel_of(rule: Rule) -> int:
    """Return the number of the channel for the flights of a rule: 1 if they outlast a step, else 0."""
    return int(bool(rule.delay) or rule.window == "free_running")


def agrees(rule: Rule) -> bool:
    """Return whether ranks agree on each flight of the rule, since they make steps of their own and it has them all."""
    return rule.window == "free_running" and not rule.stage.one_sided


def check_weight(weight: Any, rules: Sequence[Rule]) -> str:
    """Return a line about `weight`, which ranks compare. Raise a TypeError or ValueError if it does not fit."""
    if not callable(weight):
        return f"weight={'None' if weight is None else type(number(weight)).__name__}"
    for stage in (each for rule in rules for each in rule.stage.whole() if getattr(each, "constant_weights", False)):
        raise ValueError(f"the state of {stage!r} depends on the weights of ranks; weight is a number, not a function")
    return "weight=a function"


def check_scaler(scaler: Any, rules: Sequence[Rule]) -> None:
    if scaler is None:
        return
    instance("scaler", scaler, torch.amp.GradScaler, "a torch.amp.GradScaler")
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    for rule in rules:
        if rule.window in ("between_steps", "after_step") and not isinstance(scaler, ShardedGradScaler):
            raise ValueError(
                f"with a plain GradScaler a rank skips a step alone, and {rule!r} would wait for it; "
                "use torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler, with which all ranks skip together"
            )


def as_time(timeout: Any) -> timedelta:
    """Return the user's `timeout` as a timedelta; None means 10 minutes. Raise if it is invalid."""
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
    """Return {parameter: plain name} for all parameters of a model."""
    params: dict[str, Tensor] = dict(model.named_parameters())
    plain = plain_names(params)
    return {p: plain[name] for name, p in params.items()}


def plain_names(names: Collection[str]) -> dict[str, str]:
    """Map each name to its name without wrappers, or to itself if two names would become equal."""
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
    """Return (name, module) for each module on which `fully_shard` has been called."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # importing it takes seconds; a user of it has done so
    return [] if fsdp is None else [(name, m) for name, m in model.named_modules() if isinstance(m, fsdp.FSDPModule)]


Written = tuple[str | None, Sequence[str]]  # the error of a rank, or None, and the lines of its setup
ERROR = "error"  # in place of the digest of a rank that could not make its setup


def agree(monitor: Monitor, make: Callable[[], AnySetup], label: str = "attach()", verb: str = "attach") -> AnySetup:
    """Make and return this rank's setup, after a comparison of all ranks' setups through the store. Collective.

    If two differ, or `make` has raised on another rank, all raise a ValueError; if a rank does not come in time, a
    PeerError. Errors name this call by `label`, and the action of the ranks by `verb`.
    """
    collective = Collective(label=label)
    key = f"agree/{monitor.launched(0, collective).number}"

    def compared(error: str | None, lines: Sequence[str], kind: str = "") -> tuple[str, tuple[str, ...]]:
        found = asked(monitor, collective, lambda: _compared(monitor, key, (error, lines), kind, verb))
        return found[0], found[1]

    try:
        setup = make()
    except Exception as error:
        if monitor.size > 1:
            compared(f"{type(error).__name__}: {error}", ())
        raise
    if monitor.size == 1:
        return setup
    found, kinds = compared(None, setup.lines, setup.device.type)
    if found:
        raise ValueError(found)
    return replace(setup, kinds=kinds)


def first_said(monitor: Monitor, label: str, text: str) -> str:
    """Return the `text` of the rank that calls first; wait for no rank. All ranks make these calls in one order."""
    if monitor.size == 1:
        return text
    collective = Collective(label=label)
    key = f"first/{monitor.launched(0, collective).number}"
    return str(asked(monitor, collective, lambda: monitor.store.compare_set(key, "", text).decode()))


def asked(monitor: Monitor, collective: Collective, ask: Callable[[], Any]) -> Any:
    """Run `ask`, which queries the store, as the flight of `collective`. Wait for its result and return it."""
    collective.flight = beside(ask, collective.label)
    return monitor.wait_for(collective)


def beside(work: Callable[[], Any], label: str) -> CpuFlight:
    """Run `work` on a thread that is not joined, because a store that does not answer blocks it; return its flight."""
    lane = CpuLane("baguakit start")
    flight = lane.run(work, label)
    lane.close(wait=False)
    return flight


def _compared(monitor: Monitor, key: str, written: Written, kind: str, verb: str) -> tuple[str, tuple[str, ...]]:
    """Write a digest of this rank's error or lines, and return the difference that rank 0 finds; "" for none.

    Rank 0 also returns the kinds of devices that all ranks have; `kind` is that of this rank. Only the first rank that
    differs writes its error or lines. If no rank differs, each rank except rank 0 makes four requests, for any number
    of ranks, and one more each time it asks whether rank 0 has compared.
    """
    store, mine, verdict, told = monitor.store, f"{key}/{monitor.rank}", f"{key}/verdict", f"{key}/told"
    text = json.dumps(written).encode()
    store.set(mine, ERROR if written[0] is not None else f"{hashlib.sha256(text).hexdigest()} {kind}")
    store.add(f"{key}/came", 1)
    kinds: tuple[str, ...] = ()
    if monitor.rank == 0:
        monitor.wait_until(lambda: int(store.add(f"{key}/came", 0)) == monitor.size)
        written_by_all = store.multi_get([f"{key}/{rank}" for rank in range(monitor.size)])
        pairs = [each.decode().partition(" ") for each in written_by_all]
        kinds = tuple(dict.fromkeys(of for _, _, of in pairs))
        store.set(verdict, str(odd_one([digest for digest, _, _ in pairs])))
    odd = int(_awaited(monitor, verdict))
    store.delete_key(mine)
    if odd < 0:
        return "", kinds
    if monitor.rank == odd:
        store.set(told, zlib.compress(text))
    if monitor.rank == 0:
        theirs = json.loads(zlib.decompress(_awaited(monitor, told)))
        store.set(f"{key}/difference", difference(odd, written, theirs, verb))
    return _awaited(monitor, f"{key}/difference").decode(), ()


def _awaited(monitor: Monitor, key: str) -> bytes:
    monitor.wait_until(lambda: bool(monitor.store.check([key])))
    return bytes(monitor.store.get(key))


def odd_one(digests: Sequence[str]) -> int:
    """Return the first rank with an error, else the first whose digest differs from rank 0's; -1 if there is none."""
    if ERROR in digests:
        return digests.index(ERROR)
    return next((rank for rank, digest in enumerate(digests) if digest != digests[0]), -1)


def difference(rank: int, ours: Written, theirs: Written, verb: str) -> str:
    """Return a sentence with the error of `rank`, or its first line that differs. Rank 0 wrote `ours`."""
    if theirs[0] is not None:
        return f"rank {rank} could not {verb}: {theirs[0]}"
    pairs = zip_longest(ours[1], theirs[1], fillvalue="nothing more")
    a, b = next((a.strip(), b.strip()) for a, b in pairs if a != b)
    return f"ranks must {verb} the same: rank 0 has {a} where rank {rank} has {b}"


@torch.no_grad()
def broadcast_tensors(tensors: Iterable[Tensor], comm: Comm, device: torch.device, source: int = 0) -> None:
    """Overwrite tensors, such as parameters and buffers, with the same tensors of rank `source`. Collective.

    What is frozen, or read from the same file, need not cross a slow network: where gloo sends, ranks compare digests
    with those of `source` first, and tensors that are equal on all ranks are not sent.
    """
    tensors = list(tensors)
    differ = torch.ones(len(tensors), dtype=torch.int32)
    if tensors and not comm._by_nccl(device):
        mine = [digest_of(x) for x in tensors]
        theirs = comm.broadcast_object(mine, source)
        comm.all_reduce(differ.copy_(torch.tensor([a != b for a, b in zip(mine, theirs, strict=True)])))
    for x, other in zip(tensors, differ.tolist(), strict=True):
        if other:
            broadcast_into(x, comm, device, source)


def digest_of(x: Tensor) -> str:
    """Return the digest of this rank's shard of `x`; another one in each call if `x` is sparse."""
    return digest(local(x)).hex() if x.layout is torch.strided else uuid.uuid4().hex


def broadcast_into(x: Tensor, comm: Comm, device: torch.device, source: int = 0) -> None:
    """Overwrite `x` (any dtype, device and memory layout) with `x` of rank `source`. Collective."""
    if x.layout is not torch.strided:  # its values and their places are tensors of other lengths on each rank
        there = comm.broadcast_object(x.cpu(), source)
        x.resize_as_sparse_(there).copy_(there)  # `x` itself: a detached one would have others
    elif (x := local(x)).numel():
        there = plain(x.to(device))
        comm.broadcast(bytes_of(there), source)
        if there.data_ptr() != x.data_ptr():
            x.copy_(there)
