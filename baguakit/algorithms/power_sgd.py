"""PowerSGD: matrices averaged through two thin factors, found by one power iteration a step.

For M_r the gradient of a weight matrix (m × k) on rank r, and Q (k × rank) left from the step before:

    P    ← orthogonalize( (1/n) Σ_r M_r Q )
    Q_rᵀ ← Pᵀ M_r;    Q ← (1/n) Σ_r Q_r
    M    ← P Qᵀ;      what rank r lost is M_r − P Q_rᵀ

A tensor of more dimensions is a matrix of its first against all others; vectors are averaged exactly, in the message
of the P. Vogels et al. 2019, arXiv:1905.13727.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..buckets import Bucket
from ..comm import Comm
from ..primitives import mean_
from ..rules import Algorithm, during_backward, whole
from ..stages import ErrorFeedback, Mean, Stage, State, finite, keep_


@dataclass(frozen=True, repr=False)
class LowRankMean(Stage):
    """The mean of matrices through factors of `rank` columns; the equations are those of the module."""

    rank: int
    lossy: ClassVar[bool] = True
    agrees: ClassVar[bool] = True
    needs_shapes: ClassVar[bool] = True

    def __post_init__(self) -> None:
        whole("rank", self.rank, 1)

    def remembers(self) -> bool:
        return True

    def init(self, bucket: Bucket, comm: Comm) -> State:
        """`layout` (matrices, 3): where each begins, its rows and its columns; `q`: the factor of each."""
        if not bucket.params and bucket.flat.numel():
            raise ValueError(f"{self!r} works on matrices and was given a bare tensor; give it a Bucket of parameters")
        layout, at = [], 0
        for shape in bucket.shapes:
            if len(shape) > 1 and shape.numel():
                layout.append((at, shape[0], shape.numel() // shape[0]))
            at += shape.numel()
        draw = torch.Generator().manual_seed(comm.key(shared=True))
        q = {}
        for i, (_, m, k) in enumerate(layout):
            q[str(i)] = torch.randn(k, min(self.rank, m, k), generator=draw).to(bucket.flat.device)
        return {"layout": torch.tensor(layout, dtype=torch.int64).view(-1, 3), "q": q}

    def __call__(self, x: Tensor, state: State, comm: Comm, residual: Tensor | None = None) -> Tensor:
        if comm.size == 1:
            if residual is not None:
                residual.zero_()
            return x
        layout = [tuple(row) for row in state["layout"].tolist()]  # on the CPU: nothing is waited for
        matrices, vectors = cut(x, layout)
        wide = [matrix.float() for matrix in matrices]
        p = [matrix @ state["q"][str(i)] for i, matrix in enumerate(wide)]
        mean_([*vectors, *p], comm)
        p = [torch.linalg.qr(each).Q for each in p]
        q = [each.T @ matrix for each, matrix in zip(p, wide, strict=True)]  # on CPUs Mᵀ P takes three times as long
        if residual is not None:
            lost, exact = cut(residual, layout)
            for rest, matrix, each, mine in zip(lost, wide, p, q, strict=True):
                torch.sub(matrix, torch.mm(each, mine, out=rest), out=rest)
            for piece in exact:
                piece.zero_()
        mean_(q, comm)
        for i, (matrix, full, each, new) in enumerate(zip(matrices, wide, p, q, strict=True)):
            matrix.copy_(torch.mm(each, new, out=full))  # in fp32 they are one: nothing is copied
            keep_(state["q"][str(i)], new.T, where=finite(new))
        return x


def cut(x: Tensor, layout: list[tuple[int, ...]]) -> tuple[list[Tensor], list[Tensor]]:
    """The matrices in a flat tensor, and what lies between them."""
    matrices, between, end = [], [], 0
    for at, rows, columns in layout:
        between.append(x[end:at])
        end = at + rows * columns
        matrices.append(x[at:end].view(rows, columns))
    return matrices, [piece for piece in [*between, x[end:]] if piece.numel()]


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
