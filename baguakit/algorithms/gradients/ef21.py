"""EF21: each rank sends what has changed since its last estimate, so that with any compressor the error vanishes.

For g_r the gradient of rank r at the common weights x, h_r its estimate, which all ranks could compute from what was
sent, ⟨·⟩ the mean over ranks and Q the compressor, h_r = 0 at first:

    v_r ← μ v_r + (1 − μ) g_r                         v_r = g_r without momentum
    q_r ← Q(v_r − h_r);    h_r ← h_r + q_r
    h   ← h + ⟨q_r⟩;       x ← x − γ h                h = ⟨h_r⟩, the same on all ranks

If ‖Q(y) − y‖² ≤ (1 − α) ‖y‖², gradients that stay as they are have ‖g_r − h_r‖² ≤ (1 − α)ᵗ ‖g_r‖² after t steps, and
where they settle, h is the exact mean. Top-k has α = ratio. Error feedback (`top_k`), in contrast, sends Q(g + e): all
that was ever computed arrives, and a noise of the size of e remains.

A rank keeps h_r and h, and v_r with momentum. The q_r of all ranks are gathered, and added one rank after another, so
that h is the mean of the h_r. To compress a mean again, as `CompressedMean` does, sends less where ranks are many and Q
is dense: `TrackedMean(CompressedMean(Q))` has h = ⟨h_r⟩ as well, since the owner of a shard takes the second loss on
itself, but n-fold, and its error shrinks only if (1 − α)(1 + n) < 1, as with 8 bits.

Richtárik, Sokolov and Fatkhullin 2021, "EF21: A New, Simpler, Theoretically Better, and Practically Faster Error
Feedback", arXiv:2106.05203; with momentum, Fatkhullin, Tyurin and Richtárik 2023, "Momentum Provably Improves Error
Feedback!", arXiv:2305.15155.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ...arguments import check_fields, checked, real
from ...buckets import Bucket
from ...comm import Comm
from ...compressors import Compressor, TopK
from ...costs import Cost, Load, Place
from ...keeping import finite, update_if_finite_
from ...lanes import New, temporaries
from ...rules import Rule, during_backward
from ...stages import SparseMean, State, cost
from ...stages.base import Carry
from ...stages.wrappers import Around


@dataclass(frozen=True, repr=False)
class TrackedMean(Around):
    """h_r ← h_r + q_r and h ← h + ⟨q_r⟩ for q_r the part of v_r − h_r that `inner` sends; x ← h.

    All that it remembers is fp32 for any dtype of x. A result that is not finite is passed on, and all ranks then keep
    what they remember. With one rank, x ← v.

    Args:
        inner: a lossy average, such as `SparseMean(TopK(0.01))`.
        momentum: μ, from 0 to less than 1.

    Raises:
        TypeError: `inner` loses nothing, or loses it between nodes only.
        ValueError: `momentum` is anything else.
    """

    momentum: float = 0.0
    averages: ClassVar[bool] = False  # to h, which is no mean of these gradients, a second backward cannot add its own
    elementwise: ClassVar[Mapping[str, Carry]] = {"own": "zero", "mean": "zero", "v": "keep"}  # else h ≠ ⟨h_r⟩

    def __post_init__(self) -> None:
        check_fields(self)
        object.__setattr__(self, "momentum", real("momentum", self.momentum, 0, below=1))
        if not self.inner.lossy:
            raise TypeError(
                f"TrackedMean tracks what a stage loses, and {self.inner!r} loses nothing here; "
                "try SparseMean(TopK(0.01)), and Hierarchical around all"
            )

    def init(self, bucket: Bucket, comm: Comm) -> State:
        names = ["own", "mean", *(["v"] if self.momentum else [])]
        state: State = {name: torch.zeros_like(bucket.flat, dtype=torch.float32) for name in names}
        return state | {"inner": self.inner.init(bucket, comm)}

    def __call__(self, x: Tensor, state: State, comm: Comm) -> Tensor:
        own, mean = state["own"], state["mean"]
        with temporaries() as new:
            v = self._momentum(x, state, new)
            if comm.size == 1:
                sent = self.inner(v, state["inner"], comm)
                return self._kept(x, sent, {"v": sent} if self.momentum else {}, state)
            change = torch.sub(v, own, out=new(own))
            lost = new(own)
            sent = self.inner(new(own).copy_(change), state["inner"], comm, residual=lost)  # type: ignore[call-arg]
            found = {"own": change.sub_(lost).add_(own), "mean": sent.add_(mean)}
            return self._kept(x, sent, found | ({"v": v} if self.momentum else {}), state)

    def _momentum(self, x: Tensor, state: State, new: New) -> Tensor:
        """Return v after this step."""
        if not self.momentum:
            return x
        return torch.mul(state["v"], self.momentum, out=new(state["v"])).add_(x, alpha=1 - self.momentum)

    def _kept(self, x: Tensor, result: Tensor, found: State, state: State) -> Tensor:
        """Return the result in `x`, and keep what was found if it is finite."""
        ok = finite(result)
        for name, value in found.items():
            update_if_finite_(state[name], value, where=ok)
        return x.copy_(result)

    def cost(self, load: Load, place: Place) -> Cost:
        """Return the cost of `inner` in fp32 and of 10 copies, and 3 more with momentum."""
        momentum = place.copies(3 if self.momentum else 0, load.fp32.size)
        if place.ranks == 1:
            return cost(self.inner, load, place) + momentum
        return cost(self.inner, load.fp32, place) + place.copies(10, load.fp32.size) + momentum


@checked
def ef21(compressor: Compressor = TopK(0.01), momentum: float = 0.0) -> Rule:
    """Average gradients of which ranks send compressed changes, with an error that vanishes (EF21).

    Sends (n − 1) times the packed gradients, by default (n − 1) · 0.055 bytes a value; costs two fp32 copies of
    the gradients, and one more with momentum. Gradients of mini-batches never settle: give it momentum, or large
    batches. Attach it to a plain SGD, or to any optimizer.

    Args:
        compressor: any, sparse or dense.
        momentum: μ, of each rank's own momentum, which is sent in place of the gradient; 0 for none, 0.9 for
            mini-batches. It is the optimizer's: leave its own at 0.

    Raises:
        TypeError: `compressor` is not a compressor.
        ValueError: `momentum` is not in [0, 1).
    """
    return during_backward(TrackedMean(SparseMean(compressor), momentum))
