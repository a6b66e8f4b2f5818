"""The contenders: algorithms of this package, torch's own DDP with its hooks, and hivemind if it is installed."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import baguakit as bk
from baguakit.compare.contenders import RANK, with_hook
from baguakit.compressors import BFloat16, MinMaxUInt8, TopK, UInt4
from baguakit.topology import OnePeerExact, Ring

from . import formulas, hivemind_peer
from .formulas import Shapes

RATIO, LOCAL, OUTER = 0.01, 8, 8
PAPER: dict[str, Any] = {"lr": 0.7, "momentum": 0.9, "nesterov": True}  # the outer step of DiLoCo's paper
PAUSE = 0.5  # seconds between two asynchronous averages, as Bagua has it by default
WARM_UP = 5  # steps before the measurement; qadam's own warm-up and that of PowerSGD are over by then


@dataclass(frozen=True)
class Contender:
    """A way to train on several hosts.

    Attributes:
        name: as it stands in tables.
        sends: bytes for a step, of shapes and the number of hosts; None where there is no telling.
        algorithm: for `bk.attach`; None for torch's DDP and hivemind.
        hook: of DDP; see `with_hook`.
        hivemind: its averager, once in every `period` steps.
        lr, momentum: of the optimizer, the same for all that average gradients.
        period: a step is the mean over so many, since not all are alike.
    """

    name: str
    sends: Callable[[Shapes, int], float] | None
    algorithm: bk.rules.Algorithm | None = None
    hook: str | None = None
    hivemind: bool = False
    lr: float = 0.02
    momentum: float = 0.9
    period: int = 1

    @contextlib.contextmanager
    def train(self, model: nn.Module, optimizer: Any) -> Iterator[tuple[nn.Module, Any]]:
        """Let it work on a model: what to call for the forward pass, and the attachment if there is one."""
        if self.hivemind:
            with hivemind_peer.averaging(model, optimizer, self.period):
                yield model, None
        elif self.algorithm is None:
            yield with_hook(model, self.hook or "none"), None
        else:
            with bk.attach(model, optimizer, self.algorithm) as attachment:
                yield model, attachment


ALONE = "no communication"
BYTE = MinMaxUInt8()
a = bk.algorithms

CONTENDERS = (
    Contender(ALONE, lambda s, n: 0.0, a.local_sgd(every=1_000_000_000)),
    Contender("DDP", formulas.all_reduce),
    Contender("DDP, bf16 hook", lambda s, n: formulas.all_reduce(s, n, 2), hook="bf16"),
    Contender("DDP, PowerSGD hook", lambda s, n: formulas.low_rank_where_it_pays(s, n, RANK), hook="PowerSGD"),
    Contender("gradient_allreduce", formulas.all_reduce, a.gradient_allreduce()),
    Contender("bytegrad", lambda s, n: formulas.compressed_all_reduce(s, n, BYTE), a.bytegrad()),
    Contender(
        "bytegrad, BFloat16", lambda s, n: formulas.compressed_all_reduce(s, n, BFloat16()), a.bytegrad(BFloat16())
    ),
    Contender(
        "qadam",
        lambda s, n: formulas.compressed_all_reduce(s, n, BYTE),
        a.qadam(warmup_steps=WARM_UP),
        lr=0.0003,
        momentum=0,
    ),
    Contender("power_sgd", lambda s, n: formulas.low_rank(s, n, RANK), a.power_sgd(rank=RANK)),
    Contender("top_k", lambda s, n: formulas.sparse(s, n, TopK(RATIO)), a.top_k(ratio=RATIO)),
    Contender("decentralized, AWC", lambda s, n: formulas.gossip(s, n, OnePeerExact()), a.decentralized(order="awc")),
    Contender("decentralized, ATC", lambda s, n: formulas.gossip(s, n, OnePeerExact()), a.decentralized(order="atc")),
    Contender(
        "low_precision_decentralized", lambda s, n: formulas.gossip(s, n, Ring(), BYTE), a.low_precision_decentralized()
    ),
    Contender("choco", lambda s, n: formulas.gossip(s, n, Ring(), BYTE), a.choco()),
    Contender(
        "choco, one peer",
        lambda s, n: formulas.gossip(s, n, OnePeerExact(), BYTE),
        a.choco(OnePeerExact(), gamma=1.0),
    ),
    Contender("local_sgd", lambda s, n: formulas.all_reduce(s, n) / LOCAL, a.local_sgd(every=LOCAL), period=LOCAL),
    Contender("diloco", lambda s, n: formulas.all_reduce(s, n) / OUTER, a.diloco(every=OUTER, **PAPER), period=OUTER),
    Contender("async_model_average", None, a.async_model_average()),
    Contender("async_model_average, 0.5 s", None, a.async_model_average(interval=PAUSE), period=12),
)
if hivemind_peer.INSTALLED:
    CONTENDERS += (Contender("hivemind", lambda s, n: formulas.all_reduce(s, n) / LOCAL, hivemind=True, period=LOCAL),)

# What a rotation costs in a step; the planner's page, which predicts the others, leaves them out.
FOUR_BITS = tuple(
    Contender(
        f"bytegrad, UInt4{told}",
        lambda s, n, format=format: formulas.compressed_all_reduce(s, n, format),
        a.bytegrad(format, error_feedback=True),
    )
    for told, format in ((", rotated", UInt4()), ("", UInt4(rotate=False)))
)


def contender(name: str) -> Contender:
    """The contender of a name.

    Raises:
        ValueError: there is none.
    """
    for each in (*CONTENDERS, *FOUR_BITS):
        if each.name == name:
            return each
    raise ValueError(f"there is no contender called {name!r}; there are {', '.join(each.name for each in CONTENDERS)}")


def parameters_shapes(model: nn.Module) -> list[torch.Size]:
    """Return the shapes of the parameters that are trained, for the formulas."""
    return [p.shape for p in model.parameters() if p.requires_grad]
