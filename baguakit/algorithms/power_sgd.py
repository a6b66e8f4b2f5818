"""PowerSGD: matrices averaged through two thin factors, found by one power iteration a step.

For M_r the gradient of a weight matrix (m × k) on rank r, and Q (k × rank) left from the step before:

    P    ← orthogonalize( (1/n) Σ_r M_r Q )
    Q_rᵀ ← Pᵀ M_r;    Q ← (1/n) Σ_r Q_r
    M    ← P Qᵀ;      what rank r lost is M_r − P Q_rᵀ

A tensor of more dimensions is a matrix of its first against all others; vectors are averaged exactly, in the message
of the P. Vogels et al. 2019, arXiv:1905.13727.

In memory the first dimension may lie anywhere among the others: outermost, as in a contiguous tensor or a convolution
in channels_last; innermost, as in one that is transposed; or between them. The first two are multiplied as they lie;
the third, which is rare, is copied. Columns are in the order of memory, and so are the rows of Q.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from ..arguments import check_fields, checked, whole
from ..buckets import Bucket
from ..comm import Comm
from ..keeping import finite, keep_
from ..primitives import mean_
from ..rules import Algorithm, during_backward
from ..stages import ErrorFeedback, Mean, Stage, State


class Place(NamedTuple):
    """The place of a matrix in a flat tensor: (outer, rows, inner), its columns being outer × inner."""

    at: int
    outer: int
    rows: int
    inner: int

    @property
    def end(self) -> int:
        """The first place after it."""
        return self.at + self.outer * self.rows * self.inner

    def of(self, x: Tensor) -> Tensor:
        """(rows, outer, inner), a view."""
        return x[self.at : self.end].view(self.outer, self.rows, self.inner).transpose(0, 1)

    def matrix(self, x: Tensor) -> Tensor:
        """(rows, columns): a view, but a copy where the rows lie between the others."""
        if self.outer == 1:  # nearly always, and then one view is enough
            return x[self.at : self.end].view(self.rows, self.inner)
        return self.of(x).reshape(self.rows, self.outer * self.inner)

    def put_(self, x: Tensor, matrix: Tensor) -> None:
        """Bring what became of the matrix into `x`, if it was a copy."""
        if self.outer > 1 < self.inner:
            self.of(x).copy_(matrix.view(self.rows, self.outer, self.inner))


@dataclass(frozen=True, repr=False)
class LowRankMean(Stage):
    """The mean of matrices through factors of `rank` columns; the equations are those of the module."""

    rank: int
    lossy: ClassVar[bool] = True
    agrees: ClassVar[bool] = True
    averages: ClassVar[bool] = True
    keeps: ClassVar[bool] = True
    needs_shapes: ClassVar[bool] = True
    derived: ClassVar[tuple[str, ...]] = ("layout",)

    def __post_init__(self) -> None:
        check_fields(self)
        whole("rank", self.rank, 1)

    def remembers(self) -> bool:
        return True

    def init(self, bucket: Bucket, comm: Comm) -> State:
        """`layout` (matrices, 4): the `Place` of each; `q`: the factor of each."""
        if not bucket.params and bucket.flat.numel():
            raise ValueError(f"{self!r} works on matrices and was given a bare tensor; give it a Bucket of parameters")
        layout: list[Place] = []
        q: State = {}
        at = 0
        draw = torch.Generator().manual_seed(comm.key(shared=True))
        for view in bucket.views:
            if view.dim() > 1 and view.numel():
                m, k = view.shape[0], view.numel() // view.shape[0]
                factor = torch.randn(k, min(self.rank, m, k), generator=draw)
                outer, inner = around_first(view)
                order = [dim - 1 for dim in (*outer, *inner)]
                factor = factor.view(*view.shape[1:], -1).permute(*order, len(order)).reshape(k, -1)
                q[str(len(layout))] = factor.to(bucket.flat.device)
                layout.append(Place(at, *(math.prod(view.shape[d] for d in dims) for dims in (outer, [0], inner))))
            at += view.numel()
        return {"layout": torch.tensor(layout, dtype=torch.int64).view(-1, 4), "q": q}

    def __call__(self, x: Tensor, state: State, comm: Comm, residual: Tensor | None = None) -> Tensor:
        if comm.size == 1:
            if residual is not None:
                residual.zero_()
            return x
        layout = places(state["layout"])  # on the CPU: nothing is waited for
        matrices, vectors = cut(x, layout)
        wide = [matrix.float() for matrix in matrices]
        p = [matrix @ state["q"][str(i)] for i, matrix in enumerate(wide)]
        mean_([*vectors, *p], comm)
        p = orthonormal(p, together=x.is_cuda)
        q = [each.T @ matrix for each, matrix in zip(p, wide, strict=True)]  # on CPUs Mᵀ P takes three times as long
        if residual is not None:
            lost, exact = cut(residual, layout)
            for place, rest, matrix, each, mine in zip(layout, lost, wide, p, q, strict=True):
                place.put_(residual, torch.sub(matrix, torch.mm(each, mine, out=rest), out=rest))
            for piece in exact:
                piece.zero_()
        mean_(q, comm)
        whole = finite(torch.cat([each.flatten() for each in (x[:0], *vectors, *q)]))  # of an empty bucket, too
        for i, (place, matrix, full, each, new) in enumerate(zip(layout, matrices, wide, p, q, strict=True)):
            place.put_(x, matrix.copy_(torch.mm(each, new, out=full)))  # in fp32 they are one: nothing is copied
            keep_(state["q"][str(i)], new.T, where=whole)
        return x


def orthonormal(matrices: list[Tensor], together: bool) -> list[Tensor]:
    """Return matrices of orthonormal columns, those of each being a basis of the columns given.

    Columns that depend on others, or are zero, become orthonormal ones too: reflections complete the basis, as the
    roots of a Gram matrix would not, and a factor that was zero finds a direction again.

    Args:
        matrices: (m, k) with m ≥ k, in fp32.
        together: factor those of one shape in one call. It saves calls on a GPU; a CPU factors them one by one either
            way, and the last bits of its results depend on where in memory they lie.
    """
    if not together:
        return [torch.linalg.qr(each).Q for each in matrices]
    alike: dict[torch.Size, list[int]] = {}
    for i, matrix in enumerate(matrices):
        alike.setdefault(matrix.shape, []).append(i)
    found = list(matrices)
    for places in alike.values():
        for i, factor in zip(places, torch.linalg.qr(torch.stack([matrices[i] for i in places])).Q, strict=True):
            found[i] = factor
    return found


def around_first(view: Tensor) -> tuple[list[int], list[int]]:
    """The dimensions but the first, as they lie in memory: those around it, and those in it."""
    length, stride = view.shape[0], view.stride()
    others = sorted(range(1, view.dim()), key=lambda dim: -stride[dim])
    outer = [dim for dim in others if stride[dim] > stride[0] and length > 1 < view.shape[dim]]
    return outer, [dim for dim in others if dim not in outer]


def places(layout: Tensor) -> list[Place]:
    """The rows of a layout; those of an earlier one are (at, rows, columns), of contiguous matrices."""
    rows = layout.tolist()
    return [Place(row[0], 1, row[1], row[2]) if len(row) == 3 else Place(*row) for row in rows]


def cut(x: Tensor, layout: list[Place]) -> tuple[list[Tensor], list[Tensor]]:
    """The matrices in a flat tensor, and what lies between them."""
    between, end = [], 0
    for place in layout:
        between.append(x[end : place.at])
        end = place.end
    return [place.matrix(x) for place in layout], [piece for piece in [*between, x[end:]] if piece.numel()]


@checked
def power_sgd(rank: int = 4, warmup_steps: int = 0) -> Algorithm:
    """Gradients averaged through factors of few columns, what is lost being added to the next step's.

    Sends 2 (n − 1)/n · rank · (m + k) values for a matrix of m × k. Costs an fp32 copy of the gradients, and the
    factors.

    Args:
        rank: columns of the factors; 1 to 4 for large models.
        warmup_steps: average exactly in the first so many steps.

    Raises:
        ValueError: `rank` is less than 1, or `warmup_steps` negative.
    """
    start = whole("warmup_steps", warmup_steps, 0)
    low = during_backward(ErrorFeedback(LowRankMean(rank)), start=start)
    return (during_backward(Mean(), stop=start), low) if start else low
