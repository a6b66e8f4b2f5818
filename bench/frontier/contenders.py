"""The contenders: every algorithm of this package that is worth having, torch's own DDP with its hooks, and peers."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer

import baguakit as bk
from baguakit.compare.contenders import DDP, KNOWN, Contender
from bench.network import hivemind_peer

from . import torchft_peer

MUON, SGD = "muon", "sgd"
LOCAL, OUTER = 8, 30  # steps between averages, of local SGD and of DiLoCo


@dataclass(frozen=True)
class Library(Contender):
    """Another library: `peer` is "hivemind" or "torchft"."""

    @property
    def installed(self) -> bool:
        """Return whether it can be measured here; what others have measured of it is shown all the same."""
        return hivemind_peer.INSTALLED if self.peer == "hivemind" else torchft_peer.INSTALLED

    @contextlib.contextmanager
    def train(
        self, model: nn.Module, optimizers: Sequence[Optimizer], comm: bk.Comm
    ) -> Iterator[tuple[nn.Module, Any]]:
        """Yield the model to call for the forward pass, and None, as there is no attachment. Collective."""
        averaging = hivemind_peer.averaging if self.peer == "hivemind" else torchft_peer.diloco
        with averaging(model, optimizers[0], self.period):
            yield model, None


SPARSE = "ErrorFeedback(SparseMean(TopK(1 / 64, values=UInt2())), decay=0.95)"
FOUR_BITS = "ErrorFeedback(CompressedMean(UInt4()))"
TWO_BITS = "ErrorFeedback(CompressedMean(UInt2()))"
PAIRS = "NeighborMean(RandomMatching(0))"
STREAMING = "fragments=3, delay=1, mix=0.5, lr=0.4, momentum=0.9, nesterov=True, inner=CompressedMean(UInt4())"
PAPER = "lr=0.7, momentum=0.9, nesterov=True"  # the outer step of DiLoCo's paper, and torchft's
MULOCO = "lr=0.7, momentum=0.6, nesterov=True"

ALONE = Contender("no communication", "local_sgd(every=10**9)")
CONTENDERS: tuple[Contender, ...] = (
    DDP,
    KNOWN["bf16_hook"],
    KNOWN["powersgd_hook"],
    Contender("bytegrad", "bytegrad()"),
    Contender("bytegrad, 4 bits", "bytegrad(UInt4(), error_feedback=True)"),
    Contender("bytegrad, one step late", "bytegrad(delay=1)"),
    Contender("bytegrad, 2 bits", "bytegrad(UInt2(), error_feedback=True)"),
    Contender("power_sgd", "power_sgd(rank=4)"),
    Contender("top_k", "top_k()"),
    Contender("top_k, 2 bits", "top_k(1 / 64, values=UInt2())"),
    Contender("ef21", "ef21()"),
    Contender("DeMo", "decoupled_momentum()", SGD),
    Contender("signum", "signum()", SGD, lr=3e-4),
    Contender("lion_vote", "lion_vote()", SGD, lr=3e-4),
    Contender("qadam", "qadam(warmup_steps=50)", SGD),
    Contender("local_sgd", f"local_sgd(every={LOCAL})", period=LOCAL),
    Contender("diloco", f"diloco(every={OUTER}, {PAPER})", period=OUTER),
    Contender("diloco, 10 steps", f"diloco(every=10, {PAPER})", period=10),
    Contender("diloco, 4 bits", f"diloco(every={OUTER}, {PAPER}, inner={FOUR_BITS})", period=OUTER),
    Contender("SparseLoCo", f"diloco(every={OUTER}, lr=1.0, inner={SPARSE})", period=OUTER),
    Contender("SparseLoCo, 10 steps", f"diloco(every=10, lr=1.0, inner={SPARSE})", period=10),
    Contender("MuLoCo", f"diloco(every={OUTER}, {MULOCO}, inner={TWO_BITS})", MUON, period=OUTER),
    Contender("DDP, Muon", "gradient_allreduce()", MUON),
    Contender("NoLoCo", f"diloco(every={OUTER}, lr=0.7, momentum=0.5, inner={PAIRS})", period=OUTER),
    Contender("Streaming DiLoCo", f"diloco(every={OUTER}, {STREAMING})", period=OUTER),
    Contender("decentralized", "decentralized()"),
    Contender("low_precision_decentralized", "low_precision_decentralized()"),
    Contender("choco, one peer", "choco(OnePeerExact(), gamma=1.0)"),
    Contender("quasi_global_momentum", "quasi_global_momentum()", SGD, lr=0.05),
    Contender("exact_diffusion", "exact_diffusion()", SGD, lr=0.05),
    Contender("gradient_tracking", "gradient_tracking()", SGD, lr=0.05),
    Contender("async_model_average", "async_model_average()", free=True),
    Contender("async_gossip", "async_gossip()", free=True),
    Library("hivemind", peer="hivemind", period=LOCAL),
    Library("torchft, DiLoCo", peer="torchft", period=OUTER),
)  # fmt: skip


def contender(name: str) -> Contender:
    """Return the contender of a name.

    Raises:
        ValueError: there is none.
    """
    for each in (ALONE, *CONTENDERS):
        if each.name == name:
            return each
    raise ValueError(f"there is no contender {name!r}; there are {', '.join(each.name for each in CONTENDERS)}")
