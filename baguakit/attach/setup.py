"""The setup of an attachment, and the order of its buckets.

`better_order` compares two orders of buckets: that in which parameters are registered, and that in which the gradients
of a first backward come. Buckets are launched in order, each once it is complete. With a_p the share of the gradients'
bytes that have come when that of p comes, bucket i is launched at t_i = max a_p over the parameters p of the buckets up
to i, and

    T = Σ_i bytes_i t_i / Σ_i bytes_i

is the mean time of launch. Registered in the order in which they run, modules have T of about ½; in the reverse, 1.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch import Tensor, nn
from torch.optim import Optimizer

from ..buckets import split
from ..runtime import Setup


@dataclass(frozen=True, eq=False)
class AttachSetup(Setup):
    """The setup of an attachment."""

    model: nn.Module
    optimizers: tuple[Optimizer, ...]
    buckets_of_rules: tuple[tuple[tuple[Tensor, ...], ...], ...]  # the parameters of each bucket of each rule
    bucket_bytes: int
    order: tuple[str, ...]  # the names of parameters in the order of their gradients, if buckets follow that
    broadcast: bool  # begin with the model and optimizers of rank 0


WORTH = 0.1  # of backward by which launches must come earlier


def in_order(params: Sequence[Tensor], names: dict[Tensor, str], order: Sequence[str]) -> list[Tensor]:
    """Return parameters so that `split` launches those first that come first in `order`; the others come last."""
    place = {name: -i for i, name in enumerate(order)}
    return sorted(params, key=lambda p: place.get(names[p], -len(order)))


def better_order(
    cuts: Sequence[Sequence[Sequence[Tensor]]], arrived: Collection[Tensor], names: dict[Tensor, str], size: int
) -> list[str] | None:
    """Return the names of parameters in the order in which their gradients arrived; None if little comes earlier so.

    `cuts` are the buckets of each rule on gradients, and `size` is the bytes of one.
    """
    order = [names[p] for p in arrived if p in names]  # others have been removed meanwhile
    gain = 0.0
    for buckets in cuts:
        held = {p for bucket in buckets for p in bucket}
        cut = split(in_order([p for p in names if p in held], names, order), size)
        gain = max(gain, mean_launch(buckets, arrived) - mean_launch(cut, arrived))
    return order if gain > WORTH else None


def mean_launch(buckets: Sequence[Sequence[Tensor]], arrived: Collection[Tensor]) -> float:
    """Return T, the mean time at which bytes are launched, from 0 to 1; see this module."""
    own = {p for bucket in buckets for p in bucket}
    came = [p for p in arrived if p in own]
    total = sum(p.nbytes for p in came)
    a = dict(zip(came, accumulate(p.nbytes / total for p in came), strict=True)) if total else {}
    t = accumulate((max((a.get(p, 1.0) for p in bucket), default=0.0) for bucket in buckets), max)
    sizes = [sum(p.nbytes for p in bucket) for bucket in buckets]
    return sum(b * x for b, x in zip(sizes, t, strict=True)) / max(1, sum(sizes))
