"""PowerSGD: average matrices through two thin factors, computed by one power iteration per step.

For n ranks, M_r the gradient of an m × k matrix on rank r, M its mean, and factors P (m × `rank`) and Q (k × `rank`):

    P    ← orthogonalize( (1/n) Σ_r M_r Q )       Q is from the previous step
    Q_rᵀ ← Pᵀ M_r;    Q ← (1/n) Σ_r Q_r
    M    ← P Qᵀ;      the error of rank r is M_r − P Q_rᵀ

A tensor of more dimensions is a matrix with the first dimension as rows and all others as columns. Vectors are averaged
exactly, in the same message as P.

Vogels, Karimireddy and Jaggi 2019, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization",
arXiv:1905.13727.

Columns are in the order of their addresses, and so are the rows of Q. In the rare case that the stride of the first
dimension is between the strides of other dimensions, the matrix is copied.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..arguments import Declared, Natural, Positive, checked
from ..buckets import Bucket, Span, pieces
from ..comm import Comm
from ..costs import Cost, Load, Place
from ..keeping import finite, hold, update_if_finite_
from ..primitives import mean_
from ..primitives.compressed import longer
from ..rules import Algorithm, during_backward
from ..stages import ErrorFeedback, Mean, State
from ..stages.means import Average


class MatrixSpan(Span):
    """The part of a flat tensor that holds a matrix: the shape is (rows, *other dimensions, by decreasing stride)."""

    def matrix(self, x: Tensor) -> Tensor:
        """Return the matrix (rows, columns): a view, or a copy if the rows' stride is between the other strides."""
        return self.of(x).flatten(1)

    def put_(self, x: Tensor, matrix: Tensor) -> None:
        """Copy `matrix` to this part of `x` if the method `matrix` returned a copy."""
        if self.stride[-1] < self.stride[0] < self.stride[1]:
            self.of(x).copy_(matrix.view(self.shape))


@dataclass(frozen=True, repr=False)
class LowRankMean(Declared, Average):
    """The mean of matrices through factors with `rank` columns; see the module for the equations."""

    rank: Positive
    lossy: ClassVar[bool] = True
    needs_shapes: ClassVar[bool] = True

    def remembers(self) -> bool:
        return True

    def init(self, bucket: Bucket, comm: Comm) -> State:
        """Return the state: `layout` has the `MatrixSpan` of each matrix, and `q` the factor Q of each matrix."""
        if not bucket.params and bucket.flat.numel():
            raise ValueError(f"{self!r} works on matrices and was given a bare tensor; give it a Bucket of parameters")
        layout: list[MatrixSpan] = []
        q: State = {}
        at = 0
        draw = torch.Generator().manual_seed(comm.key(shared=True))
        for view in pieces(bucket.flat, bucket.params):
            if view.dim() > 1 and view.numel():
                m, k = len(view), view.numel() // len(view)
                order = sorted(range(1, view.dim()), key=view.stride, reverse=True)
                factor = torch.randn(k, min(self.rank, m, k), dtype=torch.float32, generator=draw)
                factor = factor.view(*view.shape[1:], -1).permute(*(dim - 1 for dim in order), -1).reshape(k, -1)
                q[str(len(layout))] = factor.to(bucket.flat.device)
                span = view.permute(0, *order)
                layout.append(MatrixSpan(at, span.shape, span.stride()))
            at += view.numel()
        return {"layout": layout, "q": q}

    def __call__(self, x: Tensor, state: State, comm: Comm, residual: Tensor | None = None) -> Tensor:
        layout = state["layout"]
        exact = between(x, layout)
        if comm.size == 1:
            comm.note(self, self)
        elif exact:
            count = sum(map(Tensor.numel, exact))
            comm.note(self, x.dtype, f"{count:,} value{'s' * (count != 1)} outside matrices")
        if comm.size == 1 or not layout:
            if residual is not None:
                residual.zero_()
            mean_(exact, comm)
            return x
        wide, known = x.float(), [state["q"][str(i)] for i in range(len(layout))]  # wide is x itself, if that is fp32
        matrices = [span.matrix(wide) for span in layout]
        vectors = exact if wide is x else []  # are sent in one message with all P
        shapes = [piece.shape for piece in vectors]
        shapes += [torch.Size((span.shape[0], factor.shape[1])) for span, factor in zip(layout, known, strict=True)]
        # Over gloo, Q is sent as Qᵀ = Pᵀ M, because Mᵀ P takes three times as long on CPUs.
        by_nccl = comm._by_nccl(x.device)
        shapes += [factor.shape if by_nccl else factor.T.shape for factor in known]
        lengths = [math.prod(shape) for shape in shapes]
        messages, first = wide.new_empty(sum(lengths)), sum(lengths[: -len(layout)])
        parts = [part.view(shape) for part, shape in zip(messages.split(lengths), shapes, strict=True)]
        sent, p, q = parts[: len(vectors)], parts[len(vectors) : -len(layout)], parts[-len(layout) :]
        q = [each.T for each in q] if by_nccl else q
        if residual is None:
            copy_all_(sent, vectors)
        else:
            copy_all_([*sent, *between(residual, layout)], [*vectors, *between(wide, layout)])
        for each, matrix, factor in zip(p, matrices, known, strict=True):
            torch.mm(matrix, factor, out=each)
        if wide is not x:
            mean_(exact, comm)
        mean_(messages[:first], comm)
        p = orthonormal(p, together=x.is_cuda)
        for each, matrix, factor in zip(p, matrices, q, strict=True):
            torch.mm(each.T, matrix, out=factor)
        plain, factors = sum(map(Tensor.numel, matrices)) * x.itemsize, sum(each.nbytes for each in [*p, *q])
        comm.note(self, self, longer(factors, plain) if factors >= plain else "")
        if residual is not None:
            for span, each, factor in zip(layout, p, q, strict=True):
                span.put_(residual, torch.mm(each, factor, out=span.matrix(residual)))
            torch.sub(wide, residual, out=residual)
        mean_(messages[first:], comm)
        # ErrorFeedback passes `residual` and checks the result, which is not finite if a factor is not.
        if residual is None or not all(hold(old, new.T) for old, new in zip(known, q, strict=True)):
            ok = finite(messages if wide is x else torch.cat([messages, *exact]))
            for old, new in zip(known, q, strict=True):
                update_if_finite_(old, new.T, where=ok)
        for span, matrix, each, factor in zip(layout, matrices, p, q, strict=True):
            span.put_(wide, torch.mm(each, factor, out=matrix))
        if wide is x:
            copy_all_(vectors, sent)
        else:
            copy_all_([span.of(x) for span in layout], [span.of(wide) for span in layout])
        return x

    def cost(self, load: Load, place: Place) -> Cost:
        """Return the cost of a mean of the vectors and all P, of a mean of all Q, and of 6 copies."""
        if place.ranks == 1:
            return Cost()
        matrices = [(s[0], math.prod(s[1:])) for s in load.shapes if len(s) > 1]
        vectors = load.values - sum(m * k for m, k in matrices)
        first = vectors + sum(min(self.rank, m, k) * m for m, k in matrices)
        second = sum(min(self.rank, m, k) * k for m, k in matrices)
        factors = Mean().cost(Load(first), place) + Mean().cost(Load(second), place)
        return factors + place.copies(6, load.fp32.size)


def orthonormal(matrices: list[Tensor], together: bool) -> list[Tensor]:
    """Return an orthonormal basis (m, k) for the columns of each of `matrices`, which are (m, k), m ≥ k, in fp32.

    A column that is zero or depends on other columns becomes a new orthonormal column, because Householder reflections
    complete the basis. With `together`, matrices of the same shape are factored in one call, which is faster on a GPU.
    On a CPU, the last bits of the result would then depend on the addresses of the matrices.
    """
    if not together:
        return [torch.linalg.qr(each).Q for each in matrices]
    alike: dict[torch.Size, list[int]] = {}
    for i, matrix in enumerate(matrices):
        alike.setdefault(matrix.shape, []).append(i)
    found = list(matrices)
    for members in alike.values():
        stack = torch.stack([matrices[i] for i in members]) if len(members) > 1 else matrices[members[0]][None]
        for i, factor in zip(members, torch.linalg.qr(stack).Q, strict=True):
            found[i] = factor
    return found


def between(x: Tensor, layout: list[MatrixSpan]) -> list[Tensor]:
    starts, ends = [0, *(span.end for span in layout)], [*(span.at for span in layout), x.numel()]
    return [x[start:end] for start, end in zip(starts, ends, strict=True) if start < end]


def copy_all_(to: list[Tensor], source: list[Tensor]) -> None:
    """Copy the tensors of `source` to those of `to`, in one launch. The lists may be empty."""
    if to:
        torch._foreach_copy_(to, source)


@checked
def power_sgd(rank: int = 4, warmup_steps: Natural = 0) -> Algorithm:
    """Average gradients through factors of few columns, with error feedback.

    Sends 2 (n − 1)/n · rank · (m + k) values for an m × k matrix. Costs an fp32 copy of the gradients, and the factors.

    Args:
        rank: the number of columns of the factors; 1 to 4 for large models.
        warmup_steps: the number of first steps that average exactly.
    """
    low = during_backward(ErrorFeedback(LowRankMean(rank)), start=warmup_steps)
    return during_backward(Mean(), stop=warmup_steps) + low if warmup_steps else low
