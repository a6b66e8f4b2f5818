"""Contenders: algorithms of this package or of a user, and torch's own DDP with its hooks."""

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from .. import algorithms
from ..attach import Attachment, attach
from ..comm import Comm
from .names import algorithm, source_of

RANK = 4  # of the matrices of PowerSGD


@dataclass(frozen=True)
class Contender:
    """A way to train on several hosts."""

    name: str  # as it stands in tables and pictures
    algorithm: str = ""  # "module:name" or an expression, as `names.algorithm` reads them; "" for a peer
    optimizer: str = "adamw"  # one of `training.OPTIMIZERS`; "sgd" for algorithms that have their own
    lr: float | None = None  # the learning rate of the first trial; None for that of the task
    peer: str = ""  # a hook of torch's DDP (see `with_hook`); "" for an algorithm
    period: int = 1  # steps after which the exchange repeats
    free: bool = False  # ranks do not wait for each other, so that a training's result depends on the network
    source: str = ""  # the digest of the user's module

    @contextlib.contextmanager
    def train(
        self, model: nn.Module, optimizers: Sequence[Optimizer], comm: Comm
    ) -> Iterator[tuple[nn.Module, Attachment | None]]:
        """Yield the model to call for the forward pass, and the attachment if there is one. Collective."""
        if self.peer:
            yield with_hook(model, self.peer), None
        else:
            with attach(model, list(optimizers), algorithm(self.algorithm), comm=comm) as attachment:
                yield model, attachment


def with_hook(model: nn.Module, hook: str) -> DistributedDataParallel:
    """Return torch's DDP with a hook: "bf16", "PowerSGD" (with error feedback, from the third step on) or "none".

    With PowerSGD it has one bucket: the hook waits for a second all-reduce inside the callback of the first, and two
    buckets would take both of gloo's threads and wait for ever.
    """
    wrapped = DistributedDataParallel(model, bucket_cap_mb=1024 if hook == "PowerSGD" else None)
    if hook == "PowerSGD":
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=RANK, start_powerSGD_iter=2)
        wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif hook == "bf16":
        wrapped.register_comm_hook(None, _bf16_hook)
    return wrapped


def _bf16_hook(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Call torch's hook, which DDP refuses by its name on builds without CUDA."""
    return default_hooks.bf16_compress_hook(state, bucket)


DDP = Contender("DDP", peer="none")
KNOWN = {  # by their names on a command line; of algorithms, those with arguments, or an optimizer or rate of their own
    "ddp": DDP,
    "bf16_hook": Contender("DDP, bf16 hook", peer="bf16"),
    "powersgd_hook": Contender("DDP, PowerSGD hook", peer="PowerSGD"),
    "diloco": Contender("diloco", "diloco(every=30)"),
    "local_sgd": Contender("local_sgd", "local_sgd(every=8)"),
    "push_sum": Contender("push_sum", "push_sum(Exponential())"),
    "decoupled_momentum": Contender("decoupled_momentum", "decoupled_momentum()", "sgd"),
    "qadam": Contender("qadam", "qadam(warmup_steps=50)", "sgd"),
}
KNOWN |= {name: Contender(name, f"{name}()", "sgd", 3e-4) for name in ("signum", "lion_vote")}
OWN_STEP = ("quasi_global_momentum", "exact_diffusion", "gradient_tracking")
KNOWN |= {name: Contender(name, f"{name}()", "sgd", 0.05) for name in OWN_STEP}


def contender(text: str, **options: Any) -> Contender:
    """Return the contender of a name ("ddp", "bytegrad"), an expression, or "module:name"; raise a ValueError if none.

    `options` are its `optimizer` and `lr`, if they are not those of the name.
    """
    if not set(text) & set("(:") and text not in (names := {**KNOWN, **dict.fromkeys(algorithms.__all__)}):
        some = ", ".join(names)
        raise ValueError(f"there is no algorithm called {text!r}; name one of {some}, an expression, or MODULE:NAME")
    made = KNOWN.get(text) or Contender(text, f"{text}()" if text in algorithms.__all__ else text)
    if made.peer:
        return made
    rules = algorithm(made.algorithm).rules
    period = math.lcm(*(rule.every for rule in rules if isinstance(rule.every, int)))
    free = any(rule.window == "free_running" for rule in rules)
    return replace(made, period=period, free=free, source=source_of(text), **options)
