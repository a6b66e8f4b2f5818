"""Parts as users write them, each with one mistake, and the check that should find it."""

import threading
from dataclasses import dataclass
from typing import ClassVar

import torch

import baguakit as bk
from baguakit.compressors import Compressor
from baguakit.stages import Stage
from baguakit.topology import Topology


def sign(x):
    """Return the sign of each value; torch's own is 0 of NaN, which hides an overflow."""
    return x.sign() + (x - x)


@dataclass(frozen=True, repr=False)
class Signum(Stage):
    """Signum, without a mistake: the sign of the mean of momenta. Each of the stages below has one."""

    beta: float = 0.9
    same_on_all_ranks: ClassVar = True
    elementwise: ClassVar = {"m": "zero"}

    def init(self, bucket, comm):
        return {"m": torch.zeros_like(bucket.flat)}

    def __call__(self, x, state, comm):
        state["m"].lerp_(x, 1 - self.beta)
        return sign(bk.primitives.mean_(sign(state["m"]), comm))


# Stages


class HiddenMemory(Signum):
    """The momentum is kept in the class: no state_dict has it."""

    held: ClassVar = {}

    def __call__(self, x, state, comm):
        m = self.held.setdefault(len(x), torch.zeros_like(x))
        m.lerp_(x, 1 - self.beta)
        return sign(bk.primitives.mean_(sign(m), comm))


class Undeclared(Signum):
    """The momentum is not declared: it is lost when buckets change."""

    elementwise: ClassVar = {}


class Replaces(Signum):
    """The momentum is a new tensor after each flight."""

    def __call__(self, x, state, comm):
        state["m"] = self.beta * state["m"] + (1 - self.beta) * x
        return sign(bk.primitives.mean_(sign(state["m"]), comm))


class CountsInPython(Signum):
    """The number of flights is a Python number, which is not saved."""

    def init(self, bucket, comm):
        return super().init(bucket, comm) | {"flights": 0}

    def __call__(self, x, state, comm):
        state["flights"] += 1
        return super().__call__(x, state, comm) / state["flights"]


class Different(Signum):
    """It says that all ranks end alike, and each adds its own."""

    def __call__(self, x, state, comm):
        return super().__call__(x, state, comm) + 1e-3 * comm.rank


class HidesNaN(Signum):
    """NaN and infinity become zero, so that no scaler finds the overflow."""

    def __call__(self, x, state, comm):
        return super().__call__(x.nan_to_num(0.0, 0.0, 0.0), state, comm)


class KeepsNaN(Signum):
    """It says that its state stays finite, and writes to it without a look."""

    keeps: ClassVar = True


class Reads(Signum):
    """The host waits for the GPU in every flight."""

    def __call__(self, x, state, comm):
        if x.abs().max().item() == 0:
            return bk.primitives.mean_(x, comm)
        return super().__call__(x, state, comm)


class Draws(Signum):
    """It draws from torch's own generator."""

    def __call__(self, x, state, comm):
        return super().__call__(x, state, comm) + bk.primitives.mean_(torch.randn(len(x), dtype=x.dtype), comm)


@dataclass(frozen=True, repr=False)
class ShortRepr(Signum):
    """Its repr leaves out a field, so that ranks with other values agree to attach."""

    def __repr__(self):
        return "ShortRepr()"


class Biased(Stage):
    """The sum is divided by a wrong number."""

    averages: ClassVar = True
    same_on_all_ranks: ClassVar = True

    def __call__(self, x, state, comm):
        return bk.primitives.mean_(x, comm) * comm.size / (comm.size - 1)


class LosesResidual(bk.stages.CompressedMean):
    """It writes no error to the residual."""

    def __call__(self, x, state, comm, residual=None):
        return bk.primitives.compressed_mean_(x, self.compressor, comm)


class Starts(Stage):
    """It starts a thread that nobody ends."""

    def init(self, bucket, comm):
        threading.Thread(target=threading.Event().wait, daemon=True).start()
        return {}

    def __call__(self, x, state, comm):
        return bk.primitives.mean_(x, comm)


class OfTheBucket(Stage):
    """It normalises a bucket, so that the result depends on the buckets."""

    def __call__(self, x, state, comm):
        return bk.primitives.mean_(x, comm) / x.numel()


# Compressors


class Grid(Compressor):
    """Bytes on a grid of one step for each row, without a mistake: 4 bytes of the step, and a byte for each value."""

    def row_bytes(self, n):
        return n + 4

    def steps(self, x):
        return x.abs().amax(1, keepdim=True) / 127 if x.shape[1] else x.new_ones(len(x), 1)

    def rounded(self, y, key):
        return y.round()

    def compress(self, x, residual=None, key=0):
        x, bad = x.float(), float("nan")
        step = self.steps(x)
        step = torch.where(step == 0, 1.0, step)
        codes = self.rounded(x / step, key).nan_to_num().clamp(-127, 127).to(torch.int8)
        step = torch.where(step.isfinite(), step, bad)
        packed = torch.cat([step.contiguous().view(torch.uint8), codes.view(torch.uint8)], 1)
        if residual is not None:
            residual.copy_(x - self.values(packed))
        return packed

    def values(self, packed):
        step = packed[:, :4].clone(memory_format=torch.contiguous_format).view(torch.float32)
        return packed[:, 4:].contiguous().view(torch.int8).float() * step

    def decompress(self, packed, n, dtype=torch.float32, out=None):
        values = self.values(packed).to(dtype)
        return values if out is None else out.copy_(values)

    def __eq__(self, other):
        return type(self) is type(other)

    def __hash__(self):
        return hash(type(self))

    def __repr__(self):
        return f"{type(self).__name__}()"


class OneStep(Grid):
    """All rows have the step of the largest."""

    def steps(self, x):
        return super().steps(x).amax().expand(len(x), 1)


class Floors(Grid):
    """It says that rounding is unbiased, and rounds down."""

    stochastic = True

    def rounded(self, y, key):
        draw = torch.Generator().manual_seed(key % 2**31)
        return (y + 0.5 * torch.rand(y.shape, generator=draw)).floor()


class NoResidual(Grid):
    """It leaves the residual as it was."""

    def compress(self, x, residual=None, key=0):
        return super().compress(x, None, key)


class WrongLength(Grid):
    """It says a byte too many."""

    def row_bytes(self, n):
        return n + 5


class GlobalDraws(Grid):
    """It draws from torch's own generator, whatever the key."""

    def rounded(self, y, key):
        return (y + torch.rand_like(y)).floor()


class Grows(Grid):
    """Its error is larger than the values."""

    def values(self, packed):
        return -super().values(packed)


class Finite(Grid):
    """It makes finite values of what is not."""

    def values(self, packed):
        return super().values(packed).nan_to_num()


class Overwrites(Grid):
    """It scales the user's values in place."""

    def compress(self, x, residual=None, key=0):
        return super().compress(x.mul_(2.0), residual, key)


# Topologies


@dataclass(frozen=True, repr=False)
class Circle(Topology):
    """Each rank hears the next, without a mistake."""

    def links(self, rank, size, round):
        return [(rank, 0.5), ((rank + 1) % size, 0.5)]


class Claims(Circle):
    """It is declared symmetric, and is not."""

    facts: ClassVar = ("symmetric",)


class Heavy(Circle):
    """Its weights sum to more than one."""

    def links(self, rank, size, round):
        return [(rank, 0.5), ((rank + 1) % size, 0.75)]


class LongPeriod(Circle):
    """It says a period of two rounds, which are equal."""

    def period(self, size):
        return 2


class OtherTargets(Circle):
    """It says that those hear a rank whom it hears."""

    def targets(self, rank, size, round):
        return tuple(peer for peer in self.weights(rank, size, round) if peer != rank)


class Pairs(Circle):
    """Pairs that never change: news do not spread."""

    def check(self, size):
        super().check(size)
        if size % 2:
            raise ValueError(f"Pairs needs an even number of ranks and this group has {size}")

    def links(self, rank, size, round):
        return [(rank, 0.5), (rank ^ 1, 0.5)]


FAULTY = [  # (part, the check that finds it, words of the sentence)
    (HiddenMemory(), "determinism", "keep memory in the state only"),
    (Draws(), "determinism", "draw by comm.key()"),
    (Undeclared(), "declared", 'state["m"] is not'),
    (Replaces(), "state", "replaces a tensor of its state"),
    (CountsInPython(), "state", "the result of round 2 differs by up to"),
    (Different(), "result", "values differ between ranks"),
    (HidesNaN(), "not_finite", "all values are finite after nan on rank 1"),
    (KeepsNaN(), "not_finite", "state.m differs"),
    (Reads(), "host_sync", "Waited"),
    (ShortRepr(0.5), "expression", "evaluates to another value"),
    (Biased(), "mean", "it is off by"),
    (LosesResidual(), "mean", "without what it wrote to residual"),
    (bk.during_backward(Starts()), "detach", "threads, and were"),
    (bk.during_backward(OfTheBucket()), "other_buckets", "model.0.weight differs"),
    (bk.during_backward(CountsInPython()), "resume", "differs"),
    (bk.during_backward(HidesNaN()), "overflow", "differs"),
    (OneStep(), "rows", "when the values of the other rows are 1000.0"),
    (Floors(), "unbiased", "that of 256 keys"),
    (NoResidual(), "operations", "the residual differs"),
    (WrongLength(), "row_bytes", "makes a tensor (1, 4)"),
    (GlobalDraws(), "determinism", "draw from the key"),
    (Grows(), "bounds", "has the norm"),
    (Finite(), "not_finite", "makes 0.0 of nan"),
    (Overwrites(), "row_bytes", "it overwrites 2 rows of 1 values"),
    (Claims(), "claims", "symmetric=True, and its matrices say False"),
    (Heavy(), "weights", "for 2 ranks those of the rows of round 0 are [1.25, 1.25]"),
    (LongPeriod(), "period", "it is 2, and they repeat after 1"),
    (OtherTargets(), "matrix", "and the targets (1,), and the matrix says"),
    (Pairs(), "reaches", "for 4 ranks rank 0 has not heard of all"),
]
FAULTLESS = [Signum(), Grid(), Circle(), bk.during_backward(Signum()), bk.after_step(Signum(0.5), every=2)]
