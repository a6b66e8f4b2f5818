"""A compressed mean with the fewest bits that keep the error below a bound.

    E_b = ‖Q_b(x_r) − x_r‖² / ‖x_r‖²              for each b of `bits`, on a sample of the values of rank r
    b   ← max_r min { b : E_b ≤ error }           the largest of `bits` if no b is accurate enough
    x   ← Q_b( (1/n) Σ_r Q_b(x_r) )

Q_b(x) is x compressed to b bits per value and decompressed; x_r is the tensor of rank r, and n the number of ranks.
Every 8 flights, each rank measures E_b of its own values, and sends its choice behind its packed values. So ranks need
no separate messages to agree on b. The largest choice takes effect 4 flights later, so that the host never waits.
"""

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import torch
from torch import Tensor, float32

from ..arguments import Range, check_fields, message
from ..buckets import Bucket
from ..comm import Comm
from ..compressors import Compressor, Uniform
from ..costs import Cost, Load, Place
from ..primitives import compressed_mean_
from ..tensors import uploaded
from .base import State
from .means import Average, CompressedMean

EVERY, LATER = 8, 4  # flights from one choice to the next, and until a choice takes effect
SAMPLE, BLOCK = 1 << 16, 256  # values that a rank measures, in whole blocks from all parts of a bucket
NOTE = 16  # bytes behind a packed row, which keep what follows aligned


@dataclass(frozen=True, repr=False)
class Adaptive(Average):
    """The compressed mean over all ranks, with the fewest bits per value that keep a bucket's error below `error`.

    The error is relative and squared, ‖Q(x) − x‖² / ‖x‖², where Q compresses and decompresses once (a mean in two hops
    is compressed twice). It is measured on up to 65,536 of a rank's own values. At first, and if no choice is accurate
    enough, the largest of `bits` is used. Blocks have 256 values. With fewer than 8 bits they are rotated, so that a
    few large values do not change the error. The choice is saved; with other buckets or ranks it is made again.

    Args:
        error: the largest error of a compression, between 0 and 1: 5e-5 needs 8 bits, 1e-3 needs 6, 1.5e-2 needs 4.
        bits: the numbers of bits to choose from, each 1 to 8, in rising order.

    Raises:
        ValueError: `error` or `bits` is invalid, or `error` is below 1 / (2ᵇ − 1)² for the largest b of `bits`.
    """

    error: Annotated[float, Range(above=0, below=1)]
    bits: tuple[Annotated[int, Range(1, 8)], ...] = (2, 3, 4, 5, 6, 8)
    lossy: ClassVar[bool] = True
    # `keeps` is True, although the state may change after a result that is not finite. A rank whose values are not
    # finite, or are all zero (as gradients may be in the first step), sends the current choice again.

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.bits or list(self.bits) != sorted(set(self.bits)):
            raise ValueError(message("bits", "whole numbers that rise, such as (2, 4, 8)", self.bits))
        if self.error < (least := (2 ** self.bits[-1] - 1) ** -2):
            raise ValueError(
                f"error={self.error:g} is less than {self.bits[-1]} bits can keep, about {least:.2g} of evenly spread "
                "values; allow more, or take a wider format such as bytegrad(BFloat16()) or gradient_allreduce()"
            )

    def compressors(self) -> tuple[Compressor, ...]:
        return tuple(map(format_of, self.bits))

    def remembers(self) -> bool:
        return True

    def multiple_of(self, comm: Comm) -> int:
        return 64 * comm.size

    def init(self, bucket: Bucket, comm: Comm) -> State:
        """Return `bits`, the current number of bits; `chosen`, the next; `arrived`, an event of its copy to the CPU."""
        self.prepare(bucket.flat, comm)
        pinned = bucket.flat.is_cuda  # so that a choice is copied without a wait
        most = torch.tensor([self.bits[-1]], pin_memory=pinned)
        return {"bits": most, "chosen": most.clone().pin_memory() if pinned else most.clone(), "arrived": None}

    def __call__(self, x: Tensor, state: State, comm: Comm, residual: Tensor | None = None) -> Tensor:
        if comm.round % EVERY == LATER:
            if state["arrived"] is not None:
                state["arrived"].synchronize()  # four flights ago
            state["bits"].copy_(state["chosen"])
        format = format_of(int(state["bits"]))
        if comm.round % EVERY or comm.size == 1:
            return compressed_mean_(x, format, comm, residual=residual)
        noting = Noting(format, choice(self, x, int(state["bits"])))
        y = compressed_mean_(x, noting, comm, residual=residual)
        if noting.heard:
            state["chosen"].copy_(torch.stack(noting.heard).amax(), non_blocking=True)
            if x.is_cuda:
                state["arrived"] = torch.cuda.current_stream(x.device).record_event()
        return y

    def cost(self, load: Load, place: Place) -> Cost:
        """Return the cost of `CompressedMean` with as many bits as normally distributed values need."""
        return CompressedMean(format_of(bits_of_normal_values(self))).cost(load, place)


def format_of(bits: int) -> Uniform:
    return Uniform(bits, BLOCK, rotate=bits < 8)


def choice(stage: Adaptive, x: Tensor, now: int) -> Tensor:
    """Return the fewest bits that are accurate enough for `x` (n,), as uint8; `now` if `x` is zero or not finite."""
    sample = sample_of(x)
    lost, errors = torch.empty_like(sample), []
    for bits in stage.bits:
        format_of(bits).compress(sample, lost)
        errors.append(lost.double().square().sum())
    size = sample.double().square().sum()
    enough = torch.stack(errors) <= size * stage.error
    choices = uploaded(torch.tensor([*stage.bits, now]), x.device)
    least = torch.where(enough, choices[:-1], choices[-2]).amin()
    return torch.where(size.isfinite() & (size > 0), least, choices[-1]).to(torch.uint8)


@dataclass(frozen=True, repr=False)
class Noting(Compressor):
    """A compressor that appends `note`, a number, to each packed row. Decoding appends the rows' largest to `heard`."""

    inner: Compressor
    note: Tensor = field(compare=False)  # a report counts flights that are alike
    heard: list[Tensor] = field(default_factory=list, compare=False)

    def row_bytes(self, n: int) -> int:
        return self.inner._unchecked_row_bytes(n) + NOTE

    def compress(self, x: Tensor, residual: Tensor | None = None, key: int = 0) -> Tensor:
        packed = self.inner._unchecked_compress(x, residual, key)
        return torch.cat([packed, self.note.expand(len(packed), NOTE)], 1)

    def decompress(self, packed: Tensor, n: int, dtype: torch.dtype = float32, out: Tensor | None = None) -> Tensor:
        self.heard.append(packed[:, -1].amax())
        return self.inner._unchecked_decompress(packed[:, :-NOTE].contiguous(), n, dtype, out)

    def reduce(self, packed: Tensor, n: int, residual: Tensor | None = None, key: int = 0) -> Tensor:
        sent = self.inner._unchecked_reduce(packed[:, :-NOTE].contiguous(), n, residual, key)
        return torch.cat([sent, packed[:, -NOTE:].amax(0, keepdim=True)], 1)

    def __repr__(self) -> str:
        return repr(self.inner)


def sample_of(x: Tensor) -> Tensor:
    """Return (1, m) values of `x` (n,) in fp32: all values of a short `x`, else whole blocks at regular distances."""
    if x.numel() <= SAMPLE:
        return x.float().view(1, -1)
    blocks = x[: x.numel() // BLOCK * BLOCK].view(-1, BLOCK)
    return blocks[:: -(-len(blocks) // (SAMPLE // BLOCK))].float().reshape(1, -1)


def bits_of_normal_values(stage: Adaptive) -> int:
    """Return the bits that a stage chooses for normally distributed values: b bits have an error of 2.6 / (2ᵇ − 1)²."""
    return next((bits for bits in stage.bits if 2.6 / (2**bits - 1) ** 2 <= stage.error), stage.bits[-1])
